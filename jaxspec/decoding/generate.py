"""Offline generation for any number of prompts over a runner's slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxspec.decoding.counters import TauCounter
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import RequestError


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer. `accepted[i]` of `proposed[i]` verified proposals stood in round i; stop tokens are kept in
    `tokens`.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str
    accepted: tuple[int, ...]
    proposed: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Target forwards after prefill."""
        return len(self.accepted)


def generate(
    runner: SlotRunner, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """Answers every prompt, in order, keeping the slots full. All prompts are checked before the first one starts.

    Raises RequestError for a prompt or parameters that can never be served, naming the prompt.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise RequestError(f"params: found {len(each)}, expected one for each of the {len(prompts)} prompts")
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        try:
            runner.check(prompt, one)
        except RequestError as error:
            raise RequestError(f"prompts[{index}]: {error}") from error
    if runner.live:
        raise RequestError(
            f"runner: {runner.live} answers are being streamed from it, expected none; finish or close them first"
        )
    done: dict[int, Completion] = {}
    running: dict[int, tuple[int, list[int], list[int], list[int]]] = {}
    waiting = iter(range(len(prompts)))
    upcoming = next(waiting, None)
    while upcoming is not None or running:
        while upcoming is not None and runner.free_slots:
            running[runner.admit(prompts[upcoming], each[upcoming])] = (upcoming, [], [], [])
            upcoming = next(waiting, None)
        for event in runner.step():
            index, tokens, accepted, proposed = running[event.handle]
            tokens += event.tokens
            if event.from_round:
                accepted.append(event.accepted)
                proposed.append(event.proposed)
            if event.finish_reason is not None:
                done[index] = Completion(
                    tuple(prompts[index]), tuple(tokens), event.finish_reason, tuple(accepted), tuple(proposed)
                )
                del running[event.handle]
    return [done[index] for index in range(len(prompts))]


def stream(runner: SlotRunner, prompt: Sequence[int], params: SamplingParams) -> Iterator[tuple[int, ...]]:
    """New tokens of one answer as the rounds bring them. Closing the iterator early frees the slot."""
    handle = runner.admit(prompt, params)
    try:
        finished = False
        while not finished:
            for event in runner.step():
                if event.handle == handle:
                    finished = event.finish_reason is not None
                    if event.tokens:
                        yield event.tokens
    finally:
        runner.cancel(handle)


def count(completions: Sequence[Completion], num_proposals: int) -> TauCounter:
    """tau and acceptance of a set of answers."""
    counter = TauCounter(num_proposals)
    for completion in completions:
        for accepted, proposed in zip(completion.accepted, completion.proposed, strict=True):
            counter.add(accepted, proposed)
    return counter
