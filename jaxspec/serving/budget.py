"""How many drafts a round verifies: DSpark's search over the cost table (CONTRACTS.md §6.3).

K is chosen on the host from confidences that are two rounds old; the device spreads it with the present ones
(`jaxspec.decoding.plan.allocate`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxspec.decoding.plan import Mode, Schedule
from jaxspec.errors import ConfigError, problem
from jaxspec.serving.buckets import filling_budget, round_rows, round_up
from jaxspec.serving.confidence_ring import LAG, Carry, known_survival
from jaxspec.serving.cost import CostTable

__all__ = ["BudgetPlanner", "Decision", "search"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Budget K of a round; what the table expects of it, None where nothing was looked up."""

    budget: int
    step_seconds: float | None = None
    tokens_per_second: float | None = None


def search(
    survival: np.ndarray,
    table: CostTable,
    schedule: Schedule,
    *,
    prefill_rows: int = 0,
    pinned: np.ndarray | None = None,
    most: int | None = None,
    run: tuple[int, tuple[int, ...]] | None = None,
) -> Decision:
    """K = the first global argmax over 0 … n of tau(K) / seconds(R, R + K + C), tau(K) = R + the K best survivals.

    `survival` is [R, m]. Requests that are `pinned` [R] (an explicit seed) verify everything: their drafts are in
    every K that is looked at. `most` bounds K (what the largest bucket has room for). With `run`, (slots, row buckets),
    the table is asked for what would run: R and R + K padded up. No early stop: costs are a staircase, and the best K
    may lie behind a dip.
    """
    requests = survival.shape[0]
    fixed = np.zeros(requests, bool) if pinned is None else pinned
    held = survival[fixed].astype(np.float64)
    free = survival[~fixed, : schedule.most_rows].astype(np.float64).reshape(-1)
    free = np.sort(free[free >= schedule.survival_eps])[::-1]
    free = free if most is None else free[: max(most - held.size, 0)]
    tokens = requests + held.sum() + np.concatenate([[0.0], np.cumsum(free)])
    drafts = held.size + np.arange(len(tokens))
    slots, rows = requests, requests + drafts
    if run is not None:
        slots, grid = run[0], np.array(run[1])
        rows = np.where(rows > grid[-1], rows, grid[np.minimum(np.searchsorted(grid, rows), len(grid) - 1)])
    rows = rows + prefill_rows
    throughput = table.throughput(tokens, slots, rows)
    best = int(np.argmax(throughput))
    seconds = float(table.step_seconds(slots, rows[best]))
    return Decision(int(drafts[best]), seconds, float(throughput[best]))


class BudgetPlanner:
    """The host's half of the planner, one step after the other. One thread owns it.

    `lag_steps` counts rounds between a confidence and its use, of which `relayed` have passed when it gets here.
    `forced_fraction` in [0, 1] pins K to that share of all drafts (profiling). `grid` (with `align`) rounds K up to
    what the bucket holds anyway.
    """

    def __init__(
        self,
        table: CostTable,
        schedule: Schedule,
        slots: int,
        *,
        mode: Mode = "compact",
        lag_steps: int = LAG,
        relayed: int = LAG,
        grid: tuple[int, ...] = (),
        align: bool = False,
        forced_fraction: float | None = None,
    ):
        if forced_fraction is not None and not 0 <= forced_fraction <= 1:
            raise ConfigError(problem("planner.forced_fraction", forced_fraction, "a number from 0 to 1"))
        if align and (mode != "compact" or not grid):
            raise ConfigError(problem("planner.align", True, "mode compact and its buckets", "set align to false"))
        self.table, self.schedule, self.mode = table, schedule, mode
        self.forced_fraction = forced_fraction
        self._grid, self._align = grid, align
        self._carry = Carry(max(max(lag_steps, 1) - relayed, 0), slots, schedule.proposals)

    def plan(
        self,
        known: tuple[np.ndarray, np.ndarray] | None,
        slots: np.ndarray,
        current: np.ndarray,
        *,
        prefill_rows: int = 0,
        pinned: np.ndarray | None = None,
        most: int | None = None,
        run: tuple[int, tuple[int, ...]] | None = None,
    ) -> Decision | None:
        """Decision for the requests on `slots`; None is the full layout: nothing known yet, or mode static.

        `known` is (confidence [slots, m], generations [slots]) of the relay, `current` the generations [R] now.
        """
        if known is None or self.mode == "static":
            return None
        confidence, generations = self._carry.exchange(slots, known[0][slots], known[1][slots])
        survival = known_survival(confidence, generations, current)
        if self.forced_fraction is not None:
            forced = int(self.forced_fraction * survival[:, : self.schedule.most_rows].size)
            return Decision(forced if most is None else min(forced, most))
        about: dict[str, Any] = {"prefill_rows": prefill_rows, "pinned": pinned, "most": most, "run": run}
        decision = search(survival, self.table, self.schedule, **about)
        return self._aligned(decision, len(slots), prefill_rows) if self._align else decision

    def _aligned(self, decision: Decision, requests: int, prefill_rows: int) -> Decision:
        each, least = self.schedule.proposals + 1, self.schedule.min_rows
        bucket = round_up(round_rows(requests, decision.budget, each, least) + prefill_rows, self._grid)
        if bucket is None:
            return decision
        return dataclasses.replace(
            decision, budget=max(decision.budget, filling_budget(bucket - prefill_rows, requests, each, least))
        )
