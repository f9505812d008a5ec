"""Who drafts in a round, and how much of it is verified: pauses, budgets, and what was learned from past rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.decoding.plan import Schedule
from jaxspec.serving.adaptive import DraftSwitch, ObservedAcceptance
from jaxspec.serving.buckets import filling_budget, round_up
from jaxspec.serving.budget import BudgetPlanner
from jaxspec.serving.confidence_ring import ConfidenceRelay
from jaxspec.serving.cost import CostTable
from jaxspec.serving.requests import Flight, Request


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Who proposes in a round, the budget of their proposals, and the bucket of rows that the round needs: the slots'
    number where nobody proposes."""

    drafters: list[Request]
    budget: int
    rows: int
    as_switched: bool


class Drafting:
    """Of `slots` requests with m = `proposals`. Without a cost table every proposal is verified. `shares` of all rows
    are the row buckets; `read` brings a device array to the host. `planner` and `switch` (None: nobody is paused) may
    be replaced between rounds."""

    def __init__(
        self,
        slots: int,
        proposals: int,
        *,
        table: CostTable | None,
        schedule: Schedule | None,
        shares: Sequence[float],
        align: bool,
        pause: bool,
        clock: Callable[[], float],
        read: Callable[[Any], Any],
    ):
        self.rows_each = proposals + 1
        self.confident = False  # whether the drafter has a confidence; known once a round was traced
        self._shares = shares if schedule is not None else ()
        self.planner = BudgetPlanner(table, schedule, slots) if table is not None and schedule is not None else None
        self._align = align
        self._relay = ConfidenceRelay(read)
        self._observed = ObservedAcceptance(slots, proposals)
        self.switch = DraftSwitch() if pause and proposals else None
        self._clock, self._last_read, self._num_slots = clock, 0.0, slots

    def reset(self, slot: int) -> None:
        """The slot has a new owner."""
        self._observed.reset(slot)

    def observed(self, slots: int) -> np.ndarray | None:
        """Acceptance [R, m] so far, the confidence of methods that have none; None without a budget."""
        return None if self.planner is None else self._observed.confidence(np.arange(slots))

    def publish(self, confidence: Any, decoding: list[Request]) -> None:
        """A dispatched round's confidences, for the budgets of the rounds after the next."""
        if self.planner is not None and self.confident:
            owners = np.zeros(self._num_slots, np.int64)
            owners[[request.slot for request in decoding]] = [request.handle for request in decoding]
            self._relay.publish(confidence, owners)

    def row_grid(self, slots: int) -> tuple[int, ...]:
        """Row buckets of R slots when drafting."""
        full = slots * self.rows_each
        return tuple(sorted({max(slots, int(full * share)) for share in self._shares} | {full}))

    def drafters(self, decoding: list[Request], slots: int, prefill: int) -> tuple[list[Request], bool]:
        """Who proposes in this round, and whether that is what the switch of this load said.

        A pinned request always does, since its ids must not depend on the load. Others are paused only where that makes
        the round smaller: drafts that cost nothing may as well be verified.
        """
        if self.rows_each == 1 or not decoding:
            return [], True
        if self.switch is None:
            return decoding, True
        wanted = self.switch.drafting(len(decoding), prefill > 0)
        found = [request for request in decoding if request.pinned or (wanted and request.switch.drafting)]
        if found and self._bucket(slots, len(decoding), len(found)) == self._bucket(slots, *[len(decoding)] * 2):
            found = decoding
        return found, wanted or not found

    def decide(self, decoding: list[Request], slots: int, prefill: int) -> Drafted:
        """Of a round over the first `slots` slots with `prefill` rows of prompts."""
        drafters, as_switched = self.drafters(decoding, slots, prefill)
        budget, rows = self.plan(decoding, drafters, slots, prefill)
        return Drafted(drafters, budget, rows if drafters else slots, as_switched)

    def filled(self, drafted: Drafted, decoding: list[Request], rows: int) -> Drafted:
        """The same in a larger bucket, whose rows are paid for: they take as many real proposals as there are. Only
        where budgets rule: without one everything is verified anyway."""
        drafters = drafted.drafters
        if self.planner is None or not self._align or not drafters:
            return dataclasses.replace(drafted, rows=rows)
        least = max(self.planner.schedule.min_rows, 1)
        paused = len(decoding) - len(drafters)
        more = filling_budget(rows - paused, len(drafters), self.rows_each, least)
        return dataclasses.replace(drafted, budget=max(drafted.budget, more), rows=rows)

    def _bucket(self, slots: int, requests: int, drafters: int) -> int:
        """Rows of the smallest executable for so many requests, of which some draft in full."""
        found = round_up(requests + drafters * (self.rows_each - 1), self.row_grid(slots))
        assert found is not None
        return found

    def plan(self, decoding: list[Request], drafters: list[Request], slots: int, prefill: int) -> tuple[int, int]:
        """Budget of proposals, and the bucket of rows for anchors and proposals."""
        full, bucket = len(drafters) * (self.rows_each - 1), self._bucket(slots, len(decoding), len(drafters))
        if self.planner is None or not drafters:
            return full, bucket
        known = self._survivals(decoding, drafters)
        order = np.array([request.slot for request in decoding])
        current = np.array([request.handle for request in decoding])
        pinned = np.array([request.pinned for request in decoding])
        run = (slots, self.row_grid(slots)) if self._align else None
        decision = self.planner.plan(known, order, current, prefill_rows=prefill, pinned=pinned, run=run)
        if decision is None:
            return full, bucket
        least = max(self.planner.schedule.min_rows, 1)
        paused = len(decoding) - len(drafters)
        budget = min(decision.budget, full)
        rows = paused + min(len(drafters) * least + budget, len(drafters) * self.rows_each)
        found = round_up(rows, self.row_grid(slots))
        assert found is not None
        if self._align:
            budget = max(budget, filling_budget(found - paused, len(drafters), self.rows_each, least))
        return budget, found

    def _survivals(self, decoding: list[Request], drafters: list[Request]) -> tuple[np.ndarray, np.ndarray] | None:
        """Confidences [slots, m] and whose they are; those of paused requests are 0, so that no budget is for them."""
        if self.confident:
            known = self._relay.resolve()
        else:
            owners = np.zeros(self._num_slots, np.int64)
            owners[[request.slot for request in decoding]] = [request.handle for request in decoding]
            known = self._observed.confidence(np.arange(self._num_slots)), owners
        proposing = {request.handle for request in drafters}
        paused = [request for request in decoding if request.handle not in proposing]
        if known is None or not paused:
            return known
        confidence, owners = known[0].copy(), known[1].copy()
        confidence[[request.slot for request in paused]] = 0
        owners[[request.slot for request in paused]] = [request.handle for request in paused]
        return confidence, owners

    def time(self, flight: Flight, tokens: int) -> float:
        """Tells the switch what the round brought and took: since it began, or since the one before it was read."""
        now = self._clock()
        seconds, self._last_read = now - max(flight.began, self._last_read), now
        if self.switch is not None and flight.rows and flight.as_switched:
            self.switch.observe(len(flight.rows), bool(flight.drafters), tokens, seconds, bool(flight.pieces))
        return seconds

    def note(self, flight: Flight, finished: list[tuple[Request, int, int]]) -> None:
        """What a round says about its requests' drafts: how many were verified, and accepted."""
        if self.planner is not None and flight.drafters and finished:
            columns = zip(*((request.slot, kept, stood) for request, kept, stood in finished), strict=True)
            self._observed.observe(*(np.array(column) for column in columns))
        if self.switch is None:
            return
        break_even = self.switch.break_even(len(flight.rows), bool(flight.pieces))
        for request, _, accepted in finished:
            if request.handle in flight.drafters or not request.switch.drafting:
                request.switch.observe(accepted, break_even)
