"""What a request asks for, checked before it reaches a slot."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

from jaxspec.decoding.processors import LogitRules
from jaxspec.errors import RequestError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Per-request sampling. temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off; no seed = a fresh one.

    Generation ends at a stop token (kept in the output), at an end-of-sequence id of the target unless `ignore_eos`,
    after `max_new_tokens`, or at the end of the context. A temperature below 1e-5 is greedy too: dividing by less
    overflows float32.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    rules: LogitRules = dataclasses.field(default_factory=LogitRules)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # ids reported beside each chosen one; None: no log probabilities
    prompt_logprobs: bool = False  # the prompt's as well

    @property
    def plain(self) -> bool:
        """Whether temperature, truncation, seed, length and ids to stop at are all that is asked for."""
        return not (self.stop or self.prompt_logprobs) and self.logprobs is None and self.rules == LogitRules()

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError naming the first field that is out of range."""
        heat = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        _expect("temperature", self.temperature, "0 (greedy) or a positive number", heat)
        _expect("top_k", self.top_k, "0 (off) or a positive integer", _is_int(self.top_k) and self.top_k >= 0)
        _expect("top_p", self.top_p, "a number in (0, 1]", _is_number(self.top_p) and 0 < self.top_p <= 1)
        _expect("min_p", self.min_p, "a number in [0, 1)", _is_number(self.min_p) and 0 <= self.min_p < 1)
        seed_fits = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63)
        _expect("seed", self.seed, "an integer from 0 to 2^63 - 1", seed_fits)
        _expect(
            "max_new_tokens",
            self.max_new_tokens,
            "0 or more",
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 0,
        )
        listed = isinstance(self.stop_token_ids, (tuple, list))
        stops_fit = listed and all(_is_int(token) and 0 <= token < vocab_size for token in self.stop_token_ids)
        _expect("stop_token_ids", self.stop_token_ids, f"ids below vocab_size {vocab_size}", stops_fit)
        strings = isinstance(self.stop, (tuple, list)) and all(isinstance(text, str) and text for text in self.stop)
        _expect("stop", self.stop, "strings of at least one character", strings)
        counted = self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0)
        _expect("logprobs", self.logprobs, "nothing, or how many ids beside the chosen one", counted)
        _expect("prompt_logprobs", True, "logprobs to be set", not self.prompt_logprobs or self.logprobs is not None)
        _expect(
            "prompt_logprobs", "max_new_tokens 0", "at least 1", not (self.prompt_logprobs and not self.max_new_tokens)
        )
        _expect("rules", self.rules, "LogitRules", isinstance(self.rules, LogitRules))
        self.rules.validate(vocab_size, self.max_new_tokens)


def validate_prompt(prompt: Sequence[int], vocab_size: int, max_context: int) -> None:
    """Raises RequestError for an empty prompt, an id out of range, or a prompt that leaves no room for a token."""
    _expect("prompt", "no tokens", "at least one token", len(prompt) > 0)
    for index, token in enumerate(prompt):
        if not (_is_int(token) and 0 <= token < vocab_size):
            raise RequestError(f"prompt[{index}]: found {token!r}, expected a token id below vocab_size {vocab_size}")
    if len(prompt) >= max_context:
        raise RequestError(
            f"prompt: {len(prompt)} tokens, expected fewer than max_context = {max_context}; shorten the prompt or "
            "raise max_context (engine.max_context in a config)"
        )


def _is_int(value: object) -> bool:
    """A whole number of Python's or numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _expect(field: str, found: object, expected: str, fits: bool) -> None:
    if not fits:
        raise RequestError(f"{field}: found {found!r}, expected {expected}")
