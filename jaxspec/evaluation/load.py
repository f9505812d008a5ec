"""A closed loop of requests on an engine: so many at a time, a new one as soon as one ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import RequestError
from jaxspec.serving.engine import Engine

__all__ = ["LoadReport", "closed_loop"]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a window of a closed loop brought. Times in seconds; None where the window was too short to see one.

    `ttft`: from admission to the first token; `tpot`: between tokens of one request; both (median, 95th percentile).
    `tau` counts new tokens a request and round; `proposed` the proposals of a request and round that were verified.
    """

    concurrency: int
    seconds: float
    rounds: int
    drafted_rounds: int
    rows: int  # of the target, padding included
    tokens: int
    tokens_per_second: float
    round_seconds: float
    tau: float | None
    proposed: float | None
    ttft: tuple[float, float] | None
    tpot: tuple[float, float] | None
    finished: int
    compilations: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class _Answer:
    admitted: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


def closed_loop(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    concurrency: int,
    *,
    seconds: float,
    min_rounds: int = 0,
    warm_rounds: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadReport:
    """Greedy answers of `lengths` tokens to `prompts`, both taken in turn. The engine must be idle, and is afterwards.

    The first answers are shortened by different parts, as if the loop had run for long. The window opens when all of
    them have begun and `warm_rounds` more are over, and closes after `seconds` and at least `min_rounds` rounds;
    `around` is entered for its time (a profiler). RequestError for more requests than slots.
    """
    if not 1 <= concurrency <= engine.free_slots:
        raise RequestError(f"concurrency: found {concurrency}, expected 1 to {engine.free_slots} (the free slots)")
    loop = _Loop(engine, prompts, lengths, clock)
    for index in range(concurrency):
        loop.admit(part=(index + 1) / concurrency)
    while any(answer.first is None for answer in loop.running.values()):
        loop.step()
    for _ in range(warm_rounds):
        loop.step()
    with around():
        before, compiled, began = engine.metrics(), engine.compile_count, clock()
        loop.open(began)
        while (now := clock()) - began < seconds or engine.rounds - before.rounds < min_rounds:
            loop.step()
        after = engine.metrics()
    passed, rounds = now - began, after.rounds - before.rounds
    loop.close()
    return LoadReport(
        concurrency=concurrency,
        seconds=passed,
        rounds=rounds,
        drafted_rounds=after.drafted_rounds - before.drafted_rounds,
        rows=after.rows - before.rows,
        tokens=loop.tokens,
        tokens_per_second=loop.tokens / passed,
        round_seconds=passed / max(rounds, 1),
        tau=float(np.mean(loop.news)) if loop.news else None,
        proposed=float(np.mean(loop.proposed)) if loop.proposed else None,
        ttft=_quantiles(loop.ttft),
        tpot=_quantiles(loop.gaps()),
        finished=loop.finished,
        compilations=engine.compile_count - compiled,
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float] | None:
    return (float(np.median(values)), float(np.quantile(values, 0.95))) if values else None


class _Loop:
    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], clock: Any):
        self._engine, self._prompts, self._lengths, self._clock = engine, prompts, lengths, clock
        self._asked, self._since = 0, float("inf")
        self.running: dict[int, _Answer] = {}
        self._seen: list[_Answer] = []
        self.tokens = self.finished = 0
        self.ttft: list[float] = []
        self.news: list[int] = []
        self.proposed: list[int] = []

    def admit(self, part: float = 1.0) -> None:
        prompt = self._prompts[self._asked % len(self._prompts)]
        count = max(round(part * self._lengths[self._asked % len(self._lengths)]), 1)
        self._asked += 1
        handle = self._engine.admit(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        self.running[handle] = _Answer(self._clock())

    def open(self, now: float) -> None:
        """From now on everything counts."""
        self._since = now
        self._seen = [_Answer(one.admitted, now, now) for one in self.running.values()]
        self.running = dict(zip(self.running, self._seen, strict=True))

    def step(self) -> None:
        counting = self._since < float("inf")
        for event in self._engine.step():
            now, answer = self._clock(), self.running[event.handle]
            if answer.first is None:
                answer.first = now
                if counting:
                    self.ttft.append(now - answer.admitted)
            else:
                answer.tokens += len(event.tokens)
            answer.last = now
            if counting:
                self.tokens += len(event.tokens)
                if event.from_round:
                    self.news.append(event.accepted + 1)
                    self.proposed.append(event.proposed)
            if event.finish_reason is not None:
                del self.running[event.handle]
                self.finished += counting
                self.admit()
                if counting:
                    self._seen.append(next(reversed(self.running.values())))

    def gaps(self) -> list[float]:
        """Seconds a token, of each request that brought enough of them to tell."""
        return [(one.last - one.first) / one.tokens for one in self._seen if one.first is not None and one.tokens >= 16]

    def close(self) -> None:
        for handle in list(self.running):
            self._engine.cancel(handle)
        while self._engine.live:
            self._engine.step()
        self._engine.step()  # what is still in flight
        self._engine.drop_prefixes()
