"""What may be asked of an engine, and what an accepted request turns into."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.decoding.processors import LogitRules, rule_rows
from jaxspec.decoding.ragged import RaggedProgram, Rules
from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.errors import RequestError, problem
from jaxspec.serving.ending import AnswerEnd
from jaxspec.serving.grammar import Constraint, Grammar, GrammarCompiler
from jaxspec.serving.text import Codec


@dataclasses.dataclass(frozen=True)
class Terms:
    """Of one program; stop strings need the codec, grammars their compiler."""

    program: RaggedProgram
    eos: frozenset[int]
    codec: Codec | None = None
    grammars: GrammarCompiler | None = None

    @property
    def _vocab(self) -> int:
        return self.program.decoder.config.vocab_size

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None = None) -> None:
        """Raises RequestError if this request can never be served."""
        params.validate(self._vocab)
        validate_prompt(prompt, self._vocab, self.program.max_context)
        most = self.program.max_logprobs
        if params.logprobs is not None and (most is None or params.logprobs > most):
            limit = "none: engine.max_logprobs is off" if most is None else f"at most {most} (engine.max_logprobs)"
            raise RequestError(problem("logprobs", params.logprobs, limit))
        if params.rules != LogitRules() and not self.program.rules:
            raise RequestError(problem("sampling", "penalties, bias or min tokens", "none: engine.rules is off"))
        self.ending(prompt, params)
        self.rules(params)
        if grammar is not None and self.grammars is None:
            raise RequestError(problem("grammar", expected="none: the server was started without grammars"))

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}))

    def ending(self, prompt: Sequence[int], params: SamplingParams) -> AnswerEnd:
        """Where the answer ends."""
        return AnswerEnd(
            min(params.max_new_tokens, self.program.max_context - len(prompt)),
            stop_ids=self._stop_ids(params),
            stops=params.stop,
            codec=self.codec if params.stop else None,
            min_tokens=params.rules.min_tokens,
        )

    def rules(self, params: SamplingParams) -> Rules | None:
        """The request's row of `Rules`."""
        if params.rules == LogitRules():
            return None
        rows: Any = rule_rows(params.rules, self._stop_ids(params))
        return Rules(**{name: value[0] for name, value in rows.items()})

    def constraint(self, grammar: Grammar | None) -> Constraint | None:
        """The state of an answer under a grammar."""
        return None if grammar is None or self.grammars is None else self.grammars.start(grammar)
