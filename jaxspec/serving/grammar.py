"""Constrained answers: JSON schema, regex or EBNF, through llguidance (the extra `grammar`).

The host builds one packed mask for each row of a drafted block while the target runs. Building masks changes nothing:
a matcher's state moves by emitted tokens alone, and can be moved back.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from jaxspec.errors import ConfigError, InvariantError, RequestError, problem

KINDS = ("json_schema", "regex", "ebnf")
_CACHED = 32  # compiled grammars that are kept


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What an answer must be. `ebnf` is llguidance's dialect of Lark, or GBNF.

    With a `marker` (the end of a thinking block, say) the answer is free up to the token that completes it, and bound
    from the next token on.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    marker: str = ""


def check_grammars(rules: bool) -> None:
    """Raises ConfigError for an engine that cannot serve grammars."""
    if not rules:
        raise ConfigError(problem("engine.grammar", expected="engine.rules to be on"))


class GrammarCompiler:
    """Grammars over one tokenizer. Its methods may be called from any thread; compiling may take a second."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        """`tokenizer` is a `transformers` fast tokenizer. RequestError where llguidance is not installed."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            action = "install jaxspec-decoding[grammar] on the server"
            raise RequestError(problem("grammar", expected="no grammar", action=action)) from error
        size = max(vocab_size, len(tokenizer))
        self._library = llguidance
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(eos_token_ids))
        self._compiled: collections.OrderedDict[tuple[str, str], Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def start(self, grammar: Grammar) -> Constraint:
        """The state of a new answer. RequestError for a grammar that cannot be compiled, in one line."""
        with self._lock:
            key = (grammar.kind, grammar.text)
            matcher = self._compiled.pop(key, None) or self._compile(grammar)
            self._compiled[key] = matcher
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._tokens, grammar.marker.encode())

    def _compile(self, grammar: Grammar) -> Any:
        matcher = self._library.LLMatcher
        try:
            if grammar.kind == "json_schema":
                text = matcher.grammar_from_json_schema(grammar.text)
            elif grammar.kind == "regex":
                text = matcher.grammar_from_regex(grammar.text)
            elif grammar.kind == "ebnf":
                from llguidance.gbnf_to_lark import any_to_lark

                text = matcher.grammar_from_lark(any_to_lark(grammar.text))
            else:
                raise RequestError(problem("grammar.kind", repr(grammar.kind), f"one of {', '.join(KINDS)}"))
        except RequestError:
            raise
        except Exception as error:  # the converters raise types of their own
            raise _refused(grammar, str(error)) from error
        made = matcher(self._tokens, text, log_level=0)
        if made.is_error():
            raise _refused(grammar, made.get_error())
        return made


def _refused(grammar: Grammar, why: str) -> RequestError:
    return RequestError(problem(f"grammar.{grammar.kind}", " ".join(why.split()), "a grammar that can be compiled"))


class Constraint:
    """One answer's state: before the marker, inside the grammar, or at its end. One thread owns it."""

    def __init__(self, matcher: Any, tokens: Any, marker: bytes = b""):
        self._matcher, self._tokens, self._marker = matcher, tokens, marker
        self._bound, self._tail = not marker, b""
        self._log: list[tuple[bool, bytes]] = []  # before each emitted token: bound, tail

    @property
    def finished(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""
        return self._bound and self._matcher.is_stopped()

    def masks(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> Int[np.ndarray, "m1 W"]:
        """Packed masks of the block's rows: row k allows what may follow the emitted tokens and d_1 … d_k, or, in a
        tree, the nodes on row k's path. `parents` are the nodes' rows (the root is row 0), -1 for one that is none.

        Rows that cannot matter allow everything: those behind a draft that the grammar rejects, which acceptance
        rejects too, and those behind the grammar's end, which the host cuts off.
        """
        rows = np.full((len(drafts) + 1, -(-self._tokens.vocab_size // 32)), -1, np.int32)
        children: dict[int, list[int]] = collections.defaultdict(list)
        for node, parent in enumerate(range(len(drafts)) if parents is None else parents):
            children[int(parent)].append(node)

        def visit(row: int, bound: bool, tail: bytes) -> None:
            if bound:
                if self._matcher.is_stopped():
                    return
                self._matcher.unsafe_compute_mask_ptr(rows[row].ctypes.data, rows[row].nbytes)
            for node in children[row]:
                token = int(drafts[node])
                if not bound:
                    visit(node + 1, *self._seen(tail, token))
                elif self._matcher.try_consume_tokens([token]):
                    visit(node + 1, True, tail)
                    self._back(1)

        visit(0, self._bound, self._tail)
        return rows

    def advance(self, tokens: Sequence[int]) -> int:
        """Moves by emitted tokens and says how many belong to the answer: those behind the grammar's end do not.

        InvariantError for a token that its mask forbade.
        """
        for index, token in enumerate(tokens):
            if self.finished:
                return index
            before = (self._bound, self._tail)
            if not self._bound:
                self._bound, self._tail = self._seen(self._tail, int(token))
            elif not self._matcher.try_consume_tokens([int(token)]):
                raise InvariantError(problem("grammar", f"token {token} emitted", "one that its mask allows"))
            self._log.append(before)
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens of the answer back. InvariantError where there are not so many."""
        if not 0 <= count <= len(self._log):
            raise InvariantError(problem("grammar", f"{count} tokens to take back", f"0 to {len(self._log)}"))
        if not count:
            return
        undone, self._log = self._log[-count:], self._log[:-count]
        self._back(sum(bound for bound, _ in undone))
        self._bound, self._tail = undone[0]

    def _back(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise InvariantError(problem("grammar", self._matcher.get_error(), f"{count} tokens taken back"))

    def _seen(self, tail: bytes, token: int) -> tuple[bool, bytes]:
        """Whether a token completes the marker, and the end of the text that may yet begin it."""
        text = tail + self._tokens.decode_bytes([token])
        return self._marker in text, text[len(text) - len(self._marker) + 1 :] if len(self._marker) > 1 else b""
