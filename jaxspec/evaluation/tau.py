"""tau of a drafter on prompts, measured by the serving round itself, with a bootstrap interval over prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding.counters import repeated_bigram_share
from jaxspec.decoding.generate import Completion, count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner

BOOTSTRAP_SAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class TauReport:
    """Pooled tau with its 95 % interval, acceptance by position, and what a number needs to be believed."""

    tau: float
    low: float
    high: float
    rounds: int
    tokens: int
    acceptance_unconditional: tuple[float, ...]
    acceptance_conditional: tuple[float, ...]
    repeated_bigram_share: float
    seconds: float
    new_tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report."""
        return dataclasses.asdict(self)


def measure_tau(
    runner: SlotRunner, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[TauReport, list[Completion]]:
    """Answers every prompt and counts. The speed includes prefill and excludes compilation."""
    runner.warm_up()
    started = time.perf_counter()
    done = generate(runner, prompts, params)
    seconds = time.perf_counter() - started
    counter = count(done, runner.num_proposals)
    low, high = bootstrap_interval(done)
    new_tokens = sum(len(one.tokens) for one in done)
    report = TauReport(
        tau=counter.tau,
        low=low,
        high=high,
        rounds=counter.rounds,
        tokens=counter.tokens,
        acceptance_unconditional=tuple(counter.acceptance_unconditional),
        acceptance_conditional=tuple(counter.acceptance_conditional),
        repeated_bigram_share=repeated_bigram_share(one.tokens for one in done),
        seconds=seconds,
        new_tokens_per_second=new_tokens / seconds,
    )
    return report, done


def bootstrap_interval(done: Sequence[Completion], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the pooled tau over resampled prompts (rounds of one answer are not independent)."""
    tokens = np.array([sum(r + 1 for r in one.accepted) for one in done], float)
    rounds = np.array([one.rounds for one in done], float)
    if not rounds.sum():
        return 0.0, 0.0
    draws = np.random.default_rng(seed).integers(0, len(done), (BOOTSTRAP_SAMPLES, len(done)))
    resampled = rounds[draws].sum(axis=1)
    taus = tokens[draws].sum(axis=1)[resampled > 0] / resampled[resampled > 0]
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)
