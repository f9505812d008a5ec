"""Chat templates: a conversation in, its text in pieces out, each piece marked supervised or not.

A piece is supervised exactly when the target would have to produce it: the assistant's text and the end-of-turn
token. The header before it, the line break after it and an empty think block that the template itself inserts (it
belongs to the prompt of a target that answers without thinking) are not.

The built-in templates write the text themselves. A tokenizer's own template is opaque, so its text is searched:
header and end-of-turn are learned from one probe conversation, every answer must then be found in its place, and a
conversation where that fails is refused rather than half masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxspec.errors import DataError, problem

__all__ = [
    "LLAMA3",
    "QWEN",
    "BuiltinTemplate",
    "ChatTemplate",
    "Piece",
    "TemplateMismatch",
    "TokenizerTemplate",
    "choose",
]

Message = Mapping[str, str]


class TemplateMismatch(DataError):
    """One conversation does not fit the template; the row is dropped and counted."""


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text; `supervised` says whether the loss looks at it."""

    text: str
    supervised: bool


class ChatTemplate(Protocol):
    """What the data reader needs of a template."""

    @property
    def name(self) -> str:
        """For the log and the fingerprint."""
        ...

    @property
    def eot(self) -> str:
        """The end-of-turn text, with which every supervised piece ends."""
        ...

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """Whole text of a conversation in pieces. Raises TemplateMismatch."""
        ...

    def prompt(self, messages: Sequence[Message]) -> str:
        """Text up to where the assistant's next answer begins. Raises TemplateMismatch."""
        ...


@dataclass(frozen=True)
class BuiltinTemplate:
    """A header per role, the text, an end-of-turn token.

    `header` has one `{role}`; `tail` follows the end-of-turn token and is never supervised, since the target stops at
    the token before it.
    """

    name: str
    header: str
    eot: str
    tail: str
    prefix: str = ""
    default_system: str | None = None
    strip_text: bool = False

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """See ChatTemplate.render."""
        turns = list(messages)
        if self.default_system is not None and turns and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.default_system})
        pieces = [Piece(self.prefix, False)]
        for turn in turns:
            text = turn["content"].strip() if self.strip_text else turn["content"]
            supervised = turn["role"] == "assistant"
            pieces += [
                Piece(self.header.format(role=turn["role"]), False),
                Piece(text + self.eot, supervised),
                Piece(self.tail, False),
            ]
        return _merged(pieces)

    def prompt(self, messages: Sequence[Message]) -> str:
        """See ChatTemplate.prompt."""
        return "".join(piece.text for piece in self.render(messages)) + self.header.format(role="assistant")


QWEN = BuiltinTemplate(
    "qwen", "<|im_start|>{role}\n", "<|im_end|>", "\n", default_system="You are a helpful assistant."
)
LLAMA3 = BuiltinTemplate(
    "llama",
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
    "",
    prefix="<|begin_of_text|>",
    strip_text=True,
)

_PROBE = "probe5text"
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")


class TokenizerTemplate:
    """The target tokenizer's own `chat_template`.

    Args:
      tokenizer: a transformers tokenizer with a chat template.

    Raises:
      DataError: no template, or one whose answers have no header that could be searched for.
    """

    name = "tokenizer"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                problem(
                    "data.template",
                    "'tokenizer', but the target's tokenizer has no chat_template",
                    "qwen or llama, or a tokenizer_config.json with a chat_template",
                )
            )
        before = self._text([{"role": "user", "content": _PROBE}])
        whole = self._text([{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE + "answer"}])
        head, found, tail = whole[len(before) :].partition(_PROBE + "answer")
        self.header = head.partition("<think>")[0]
        self.eot = tail.rstrip()
        if not whole.startswith(before) or not found or not self.header.strip() or not self.eot:
            raise DataError(
                problem(
                    "data.template",
                    "the tokenizer's template marks no start or end of an answer",
                    "a template with an assistant header and an end-of-turn token",
                    "set data.template to qwen or llama",
                )
            )

    def _text(self, messages: Sequence[Message], answer_next: bool = False) -> str:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
        try:
            return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer_next)
        except Exception as error:  # a template raises what it likes, jinja's errors among them
            raise TemplateMismatch(
                f"data.template: the tokenizer's template refuses this conversation: {error}"
            ) from error

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """See ChatTemplate.render."""
        text, position, pieces = self._text(messages), 0, []
        answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        if text.count(self.header) != len(answers):
            raise TemplateMismatch(
                "data.template: the rendered text has another number of assistant headers than the "
                "conversation has answers, so it is not clear what to supervise"
            )
        for answer in answers:
            start = text.index(self.header, position) + len(self.header)
            end = text.find(self.eot, start)
            if end < 0:
                raise TemplateMismatch("data.template: an answer has no end-of-turn token")
            inserted = None if _EMPTY_THINK.match(answer.lstrip()) else _EMPTY_THINK.match(text, start)
            start = inserted.end() if inserted else start
            # thoughts of earlier turns may be dropped by the template; what follows them must be there
            if not text[start:end].strip().endswith(answer.rpartition("</think>")[2].strip()):
                raise TemplateMismatch("data.template: the text between header and end of turn is not the answer")
            pieces += [Piece(text[position:start], False), Piece(text[start : end + len(self.eot)], True)]
            position = end + len(self.eot)
        return _merged([*pieces, Piece(text[position:], False)])

    def prompt(self, messages: Sequence[Message]) -> str:
        """See ChatTemplate.prompt."""
        text, before = self._text(messages, answer_next=True), self._text(messages)
        return text if text != before else text + self.header  # a template may not know of a next answer


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind become one piece, so that the tokenizer sees as few seams as possible."""
    result: list[Piece] = []
    for piece in pieces:
        if result and result[-1].supervised == piece.supervised:
            result[-1] = Piece(result[-1].text + piece.text, piece.supervised)
        elif piece.text:
            result.append(piece)
    return result


def choose(name: str, tokenizer: Any) -> ChatTemplate:
    """The template that `data.template` asks for; "auto" takes the tokenizer's own, else the one whose tokens it knows.

    Raises:
      DataError: nothing fits.
    """
    if name == "tokenizer" or (name == "auto" and getattr(tokenizer, "chat_template", None)):
        return TokenizerTemplate(tokenizer)
    known = {"qwen": QWEN, "llama": LLAMA3}
    vocabulary = tokenizer.get_vocab()
    fits = {key: template for key, template in known.items() if template.eot in vocabulary}
    if name in fits:
        return fits[name]
    if name == "auto" and fits:
        return next(iter(fits.values()))
    wanted = (
        f"the end-of-turn token {known[name].eot!r} in the target's vocabulary"
        if name in known
        else "auto, qwen, llama or tokenizer, and a tokenizer that has the template's tokens"
    )
    raise DataError(problem("data.template", name, wanted))
