"""The Python API: `jaxspec.load(target, drafter).generate(...)`."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.drafting import DraftOptions, open_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.decoding.generate import Completion, generate, stream
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serving.text import Detokenizer, TokenizerCodec

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]  # a user turn, a conversation, or token ids


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. `accepted_lengths` holds r, the accepted proposals, of every round; tau is the mean of r + 1. With
    `context_limit` the context ended before max_new_tokens."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    accepted_lengths: tuple[int, ...]
    context_limit: bool

    @property
    def rounds(self) -> int:
        """Target forwards after prefill."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float | None:
        """Mean new tokens a round; None for an answer that prefill finished."""
        return sum(r + 1 for r in self.accepted_lengths) / self.rounds if self.rounds else None


class Engine:
    """A target, with or without a drafter, behind `generate` and `stream`. One thread at a time."""

    def __init__(self, target: Target, draft: Draft | None, tokenizer: Any, **runner: Any):
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self._codec = TokenizerCodec(tokenizer)
        self.runner = SlotRunner(target, draft, **runner)

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Any:
        """Answers one prompt (an Answer) or several (a list, in order).

        A prompt is text (one user turn in the target's chat template; as it is where the target has none), a list of
        {"role", "content"} messages, or token ids. `sampling` are the fields of SamplingParams: temperature, top_k,
        top_p, min_p, seed, max_new_tokens, stop_token_ids, ignore_eos. Raises RequestError naming what does not fit.
        """
        params = self._params(sampling)
        if _is_prompt(prompts):
            done = generate(self.runner, [self.encode(prompts)], params)  # type: ignore[arg-type]
            return self._answer(done[0], params)
        ids = [self.encode(prompt) for prompt in prompts]  # type: ignore[arg-type]
        return [self._answer(one, params) for one in generate(self.runner, ids, params)]

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Text of one answer, piece by piece, never inside a character."""
        text = Detokenizer(self._codec)
        for tokens in stream(self.runner, self.encode(prompt), self._params(sampling)):
            if piece := text.push(tokens):
                yield piece
        if rest := text.flush():
            yield rest

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            if getattr(self.tokenizer, "chat_template", None):
                return self._codec.chat([{"role": "user", "content": prompt}])
            return self._codec.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            for turn in prompt:
                if not (
                    isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
                ):
                    raise RequestError(f"prompt: found the message {turn!r}, expected role and content as text")
            return self._codec.chat([dict(turn) for turn in prompt])  # type: ignore[arg-type]
        try:
            return [operator.index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestError(f"prompt: found {prompt!r}, expected text, messages or token ids") from error

    def _params(self, sampling: dict[str, Any]) -> SamplingParams:
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        for name in sampling:
            if name not in known:
                raise RequestError(f"{name}: unknown sampling parameter, expected one of {', '.join(sorted(known))}")
        if "stop_token_ids" in sampling:
            ids = sampling["stop_token_ids"]
            if not isinstance(ids, Iterable) or isinstance(ids, str):
                raise RequestError(f"stop_token_ids: found {ids!r}, expected a list of token ids")
            sampling = {**sampling, "stop_token_ids": tuple(ids)}
        return SamplingParams(**sampling)

    def _answer(self, done: Completion, params: SamplingParams) -> Answer:
        text = self._codec.decode(done.tokens)
        limit = done.finish_reason == "length" and len(done.tokens) < params.max_new_tokens
        return Answer(text, done.tokens, done.prompt_ids, done.finish_reason, done.accepted, limit)


def load(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str | None = None,
    num_slots: int = 8,
    max_context: int = 2048,
    **runner: Any,
) -> Engine:
    """Loads a target and, if named, a drafter made for it.

    Each is a folder, a GGUF file (language models) or `org/name[@revision]`; `smollm2` is built in. A drafter may also
    be a smaller language model of the same vocabulary, or `ngram`. `dtype` None takes float32 on a CPU and bfloat16 on
    an accelerator. `runner` holds the fields of DraftOptions (num_proposals, draft_sampling, tree_nodes, ngram_min,
    ngram_max, survival_confidence) and whatever else goes to SlotRunner. Raises CheckpointError, ConfigError or
    HubError.
    """
    import jax

    if not isinstance(target, (str, Path)):
        raise ConfigError(f"target: found {target!r}, expected a folder, a file or a name")
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    loaded = load_target(target, dtype=dtype)
    keys = {field.name for field in dataclasses.fields(DraftOptions)}
    options = DraftOptions(**{name: runner.pop(name) for name in list(runner) if name in keys})
    for name in runner:
        if name not in _RUNNER:
            raise ConfigError(f"{name}: unknown option, expected one of {', '.join(sorted({*keys, *_RUNNER}))}")
    draft = None
    if drafter is None and options != DraftOptions():
        changed = [key for key in sorted(keys) if getattr(options, key) != getattr(DraftOptions(), key)]
        raise ConfigError(f"{', '.join(changed)}: found options of a drafter, expected a drafter to go with them")
    if drafter is not None:
        draft, runner["num_proposals"] = open_drafter(drafter, loaded, options, dtype)
    tokenizer = load_tokenizer(loaded.directory)
    return Engine(loaded, draft, tokenizer, num_slots=num_slots, max_context=max_context, **runner)


_RUNNER = [name for name in inspect.signature(SlotRunner).parameters if name not in ("target", "draft")]


def _is_prompt(prompts: Any) -> bool:
    """Whether this is one prompt and not a batch of them. Raises RequestError for what is neither."""
    if isinstance(prompts, str):
        return True
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__") or isinstance(prompts, Mapping):
        raise RequestError(f"prompts: found {prompts!r}, expected text, messages, token ids, or a list of them")
    return len(prompts) > 0 and isinstance(prompts[0], (numbers.Number, Mapping))
