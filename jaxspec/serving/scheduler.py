"""Who is next, who is refused, who shares a chunk and who gives way: policy without threads, clocks or arrays.

- A queue's order is priority, which grows with the time waited, then deadline, then arrival; so nobody waits for ever.
- What does not fit yet may be overtaken by what came later, but not for longer than `PATIENCE_SECONDS`, and only by the
  `OVERTAKING` next in the order, so that a long queue costs a round nothing.
- What cannot begin to answer before its deadline is refused, and takes nobody's place.
- Every decoding request is in every round, beside one chunk of prompt rows, so neither kind waits for the other. The
  most urgent prompts share the chunk evenly: a short one is not kept behind a long one, and a long one always gets on.
- Where pages run out, the least urgent request on a slot gives way; its age counts too, so it gets on in the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

__all__ = ["AGING_SECONDS", "OVERTAKING", "PATIENCE_SECONDS", "choose", "shares", "urgency"]

AGING_SECONDS = 10.0  # of waiting are worth one step of priority
PATIENCE_SECONDS = 5.0  # for which what does not fit may be overtaken
OVERTAKING = 8


class Waiting(Protocol):
    """A request in a queue. `priority`: the higher first. `deadline` and `arrived` are seconds of one clock."""

    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def arrived(self) -> float: ...


Request = TypeVar("Request", bound=Waiting)


def urgency(priority: int, arrived: float, now: float, deadline: float = math.inf) -> tuple[float, float, float]:
    """The order of a queue, the lowest first: priority, which grows by 1 each `AGING_SECONDS`, deadline, arrival."""
    return -(priority + math.floor((now - arrived) / AGING_SECONDS)), deadline, arrived


def choose(waiting: Sequence[Request], now: float, fits: Callable[[Request], bool]) -> Request | None:
    """The most urgent request that fits; none while one that does not has waited for longer than the patience."""
    order = lambda one: urgency(one.priority, one.arrived, now, one.deadline)  # noqa: E731
    for one in heapq.nsmallest(1 + OVERTAKING, waiting, key=order):
        if fits(one):
            return one
        if now - one.arrived > PATIENCE_SECONDS:
            return None  # what becomes free is kept for it
    return None


def shares(needs: Sequence[int], rows: int) -> list[int]:
    """How many of a chunk's `rows` each prompt gets: evenly, what one does not need going to the others; at least one
    row each. Raises ValueError for more prompts than rows."""
    if len(needs) > rows:
        raise ValueError(f"needs: found {len(needs)} prompts, expected at most {rows}, the rows of the chunk")
    found = [0] * len(needs)
    for rank, index in enumerate(sorted(range(len(needs)), key=lambda index: needs[index])):
        found[index] = min(needs[index], -(-rows // (len(needs) - rank)))
        rows -= found[index]
    return found
