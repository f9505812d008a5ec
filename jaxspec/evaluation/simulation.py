"""A server on a chip that is not here, SIMULATED: the planner's own code, measured confidences, and a cost table made
from the chip's published rates. It says how methods would rank there, not how fast they would be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.plan import Schedule, allocate
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.serving.adaptive import DraftSwitch
from jaxspec.serving.buckets import round_up
from jaxspec.serving.budget import BudgetPlanner
from jaxspec.serving.confidence_ring import ConfidenceRelay
from jaxspec.serving.cost import AdditiveTable

__all__ = ["CHIPS", "Chip", "Trace", "roofline", "simulate"]

_ROWS = tuple(2**power for power in range(14))


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published peak rates in bfloat16, of which `reached` is had; seconds of a round that are not the model's."""

    flops: float
    bytes_per_second: float
    reached: float = 0.7
    overhead: float = 3e-4


CHIPS = {"TPU v5e": Chip(197e12, 819e9), "TPU v6e": Chip(918e12, 1640e9)}


@dataclasses.dataclass(frozen=True)
class Trace:
    """One request, all proposals verified in every round: confidence [T, m] and accepted [T]."""

    confidence: np.ndarray
    accepted: np.ndarray

    @classmethod
    def parse(cls, rounds: Sequence[Any]) -> Trace:
        """From [[confidences, accepted], …], as the serving bench records it."""
        said, stood = zip(*rounds, strict=True)
        return cls(np.array(said, np.float32), np.array(stood, np.int64))


def roofline(
    config: ModelConfig, chip: Chip, *, context: int, draft_weights: int = 0, proposals: int = 0
) -> AdditiveTable:
    """Seconds of a round: weights and caches are read, rows are multiplied, logits are written and read twice. With
    `draft_weights` (parameters) the drafter runs over R x (m + 1) rows too."""
    leaves = jax.tree.leaves(Decoder(config).abstract_params(jnp.bfloat16))
    weights = sum(leaf.size for leaf in leaves)
    flops, memory = chip.reached * chip.flops, chip.reached * chip.bytes_per_second
    cache = context * config.num_layers * 4 * config.num_kv_heads * config.head_dim / memory
    row, logits = 2 * weights / flops, 12 * config.vocab_size / memory
    read, read_draft = 2 * weights / memory, 2 * draft_weights / memory
    draft_row = 2 * draft_weights / flops + (logits if draft_weights else 0.0)
    alpha = [one * cache + max(one * (proposals + 1) * draft_row - read_draft, 0.0) for one in _ROWS]
    theta = [max(one * row - read, 0.0) + one * logits for one in _ROWS]
    first = alpha[0] + theta[0]
    down = lambda values: tuple(value - values[0] for value in values)  # noqa: E731
    return AdditiveTable(chip.overhead + read + read_draft + first, _ROWS, down(alpha), _ROWS, down(theta))


def simulate(
    method: str,
    traces: Sequence[Trace],
    plain: AdditiveTable,
    drafted: AdditiveTable,
    requests: int,
    *,
    shares: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    rounds: int = 400,
    warm: int = 150,
    seed: int = 0,
) -> float:
    """Tokens a second of `requests` at once by method "none", "static" or "scheduled"; rows are padded up to `shares`
    of all. Requests are replayed from random moments of the traces; what a cut leaves of the accepted ones counts. The
    first `warm` rounds, in which the server learns, do not."""
    m = traces[0].confidence.shape[1]
    if method == "none":
        return requests / float(plain.step_seconds(requests, np.array(requests)))
    grid = tuple(sorted({max(requests, int(share * requests * (m + 1))) for share in shares}))
    world, schedule = _Replay(traces, requests, seed), Schedule(m)
    planner, relay, switch = BudgetPlanner(drafted, schedule, requests), ConfidenceRelay(), DraftSwitch()
    spread = jax.jit(lambda confidence, budget: allocate(confidence, budget, schedule))
    slots, tokens, seconds = np.arange(requests), 0, 0.0
    for step in range(warm + rounds):
        confidence, accepted, owners = world.next()
        drafting = method == "static" or switch.drafting(requests)
        if not drafting:
            new, took = requests, float(plain.step_seconds(requests, np.array(requests)))
        else:
            known = relay.resolve() if method == "scheduled" else None
            decision = planner.plan(known, slots, owners, run=(requests, grid))
            budget = requests * m if decision is None else decision.budget
            rows = round_up(requests + budget, grid)
            assert rows is not None
            lengths = np.asarray(spread(confidence, np.int32(rows - requests)))
            new = requests + int(np.minimum(accepted, lengths - 1).sum())
            took = float(drafted.step_seconds(requests, np.array(rows)))
            relay.publish(confidence, owners)
        switch.observe(requests, drafting, new, took)
        if step >= warm:
            tokens, seconds = tokens + new, seconds + took
    return tokens / seconds


class _Replay:
    """Each slot replays a request from a random moment on, then another one."""

    def __init__(self, traces: Sequence[Trace], requests: int, seed: int):
        self._traces, self._rng = traces, np.random.default_rng(seed)
        self._which = np.zeros(requests, int)
        self._at, self._owners = np.zeros(requests, int), np.zeros(requests, int)
        self._handles = 0
        for slot in range(requests):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        self._handles += 1
        self._which[slot] = self._rng.integers(len(self._traces))
        self._at[slot] = self._rng.integers(len(self._traces[self._which[slot]].accepted))
        self._owners[slot] = self._handles

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Confidence [R, m], accepted [R], whose they are [R]."""
        rows = [(self._traces[which], at) for which, at in zip(self._which, self._at, strict=True)]
        confidence = np.stack([trace.confidence[at] for trace, at in rows])
        accepted, owners = np.array([trace.accepted[at] for trace, at in rows]), self._owners.copy()
        self._at += 1
        for slot, (trace, _) in enumerate(rows):
            if self._at[slot] == len(trace.accepted):
                self._begin(slot)
        return confidence, accepted, owners
