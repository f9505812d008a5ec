"""Who runs in the next round: a policy without threads, clocks or arrays, so that it can be simulated.

The engine tells it what happened and asks `plan` before each round. Times are seconds of any one clock.

- Every decoding request is in every round. While any is, prefills get `prefill_share` of the round's rows, so that a
  long prompt does not stall the answers; drafts give way to them, so that answers do not stall a prompt.
- Prefills share evenly (a short prompt is not kept behind a long one), and what one does not need goes to the others.
- Waiting requests are ordered by priority, which grows with the time waited, then by deadline, then by arrival. One
  that does not fit may be overtaken by later ones, but not for longer than `patience`.
- A request that cannot be served in time, or at all, is refused, not queued.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxspec.errors import ConfigError, RequestError, problem

__all__ = ["Limits", "Overloaded", "Request", "Round", "Scheduler", "urgency"]


class Overloaded(RequestError):
    """The queue is full, or the deadline cannot be met: the same request may be served later, or elsewhere."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server has. `rows` bounds a round's target rows (the largest bucket), `queue` the requests that wait."""

    slots: int
    rows: int
    page_size: int
    pages: int
    queue: int
    rows_in_flight: int  # rows reserved behind a decoding request (`pages.rows_in_flight`)
    max_context: int
    prefill_share: float = 0.25
    aging_seconds: float = 10.0  # waiting time that is worth one step of priority
    patience: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.prefill_share < 1:
            raise ConfigError(problem("scheduler.prefill_share", self.prefill_share, "a number between 0 and 1"))
        if self.slots < 1 or self.slots >= self.rows:
            raise ConfigError(problem("scheduler.rows", self.rows, f"more than the {self.slots} slots"))
        if self.aging_seconds <= 0:
            raise ConfigError(problem("scheduler.aging_seconds", self.aging_seconds, "a positive number"))


@dataclasses.dataclass(eq=False)
class Request:
    """One request as the policy sees it. `priority`: the higher first. `deadline`: when its first token is due."""

    id: int
    prompt_rows: int
    max_new_tokens: int
    arrived: float
    priority: int = 0
    deadline: float = math.inf
    # kept by the scheduler
    done_rows: int = 0  # of the prompt, from the prefix cache or prefilled
    emitted: int = 0

    @property
    def prefilling(self) -> bool:
        return self.done_rows < self.prompt_rows


@dataclasses.dataclass(frozen=True)
class Round:
    """Who is admitted to a slot, prompt rows of each prefilling request, who decodes, and who is refused instead."""

    admitted: tuple[Request, ...] = ()
    prefill: dict[int, int] = dataclasses.field(default_factory=dict)
    decoding: tuple[int, ...] = ()
    refused: tuple[Request, ...] = ()

    @property
    def prefill_rows(self) -> int:
        """C."""
        return sum(self.prefill.values())


def urgency(
    priority: int, deadline: float, arrived: float, now: float, aging_seconds: float
) -> tuple[float, float, float]:
    """The order of a queue, the lowest first: priority, which grows by 1 each `aging_seconds`, deadline, arrival."""
    return -(priority + math.floor((now - arrived) / aging_seconds)), deadline, arrived


class Scheduler:
    """The queue and the requests on slots."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._prefill_rate = math.inf  # prompt rows a second; nothing is refused before one was measured

    # -- what happens -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queues a request. RequestError for one that can never fit, Overloaded for one that cannot be served now."""
        needed, limits = self.pages_to_start(request), self.limits
        if needed > limits.pages:
            raise RequestError(
                problem("prompt", f"{request.prompt_rows} rows on {needed} pages", f"at most {limits.pages} pages")
            )
        if len(self.waiting) >= limits.queue:
            raise Overloaded(problem("queue", f"{limits.queue} requests waiting", "a free place", "try again later"))
        if self._too_late(request, now):
            raise Overloaded(problem("deadline", f"{request.deadline - now:.3g} s from now", "a later one"))
        self.waiting.append(request)

    def prefilled(self, id: int, rows: int, seconds: float | None = None) -> None:
        """Rows of a prompt are committed; the round took `seconds`, where that is known."""
        self.running[id].done_rows += rows
        if seconds is not None and seconds > 0 and rows > 0:
            rate = rows / seconds
            self._prefill_rate = rate if self._prefill_rate == math.inf else 0.9 * self._prefill_rate + 0.1 * rate

    def emitted(self, id: int, tokens: int) -> None:
        """A request brought tokens."""
        self.running[id].emitted += tokens

    def finish(self, id: int) -> None:
        """A request ended, was cancelled or failed, wherever it stood. Unknown ids are ignored."""
        self.running.pop(id, None)
        self.waiting = [request for request in self.waiting if request.id != id]

    def victim(self, than: Request) -> Request:
        """Whom to preempt so that `than`, which runs, may go on: the least important, of those the last to arrive. It
        may be `than` itself, and is nobody more important.
        """
        return max(
            (one for one in self.running.values() if one.priority <= than.priority),
            key=lambda one: (-one.priority, one.arrived, one.id),
        )

    def preempt(self, id: int) -> Request:
        """Back into the queue, at its old place and whatever the queue's bound. Its answer is part of its prompt."""
        request = self.running.pop(id)
        if request.emitted:
            request.deadline = math.inf  # its first token is out
        request.prompt_rows += request.emitted
        request.max_new_tokens -= request.emitted
        request.emitted = request.done_rows = 0
        self.waiting.append(request)
        return request

    # -- what to do ---------------------------------------------------------------------------------------------------

    def plan(self, now: float, free_pages: int, cached_rows: Callable[[Request], int] = lambda request: 0) -> Round:
        """The next round. `free_pages` may be had, by eviction too; `cached_rows` says what a prefix hit would give.

        Admission counts a request's whole prompt and the rows in flight behind it, so that it can prefill without
        preempting anybody.
        """
        late = [request for request in self.waiting if self._too_late(request, now)]
        self.waiting = [request for request in self.waiting if request not in late]
        admitted = self._admit(now, free_pages, cached_rows)
        decoding = [one for one in self.running.values() if not one.prefilling]
        return Round(
            admitted=tuple(admitted),
            prefill=self._share([one for one in self.running.values() if one.prefilling], len(decoding)),
            decoding=tuple(one.id for one in decoding),
            refused=tuple(late),
        )

    def draft_rows(self, plan: Round) -> int:
        """Drafts that fit into a round beside its anchors and its prefill: the bound of K."""
        return max(self.limits.rows - len(plan.decoding) - plan.prefill_rows, 0)

    def pages_to_start(self, request: Request, cached: int = 0) -> int:
        """Pages of the prompt and of the first rounds behind it that a prefix hit does not give."""
        rows = min(request.prompt_rows + self.limits.rows_in_flight, self.limits.max_context)
        return -(-rows // self.limits.page_size) - cached // self.limits.page_size

    # -- inside -------------------------------------------------------------------------------------------------------

    def _too_late(self, request: Request, now: float) -> bool:
        return now + (request.prompt_rows - request.done_rows) / self._prefill_rate > request.deadline

    def _order(self, request: Request, now: float) -> tuple[float, float, float, int]:
        aging = self.limits.aging_seconds
        return *urgency(request.priority, request.deadline, request.arrived, now, aging), request.id

    def _admit(self, now: float, free: int, cached_rows: Callable[[Request], int]) -> list[Request]:
        admitted = []
        for request in sorted(self.waiting, key=lambda one: self._order(one, now)):
            if len(self.running) == self.limits.slots:
                break
            cached = cached_rows(request)
            needed = self.pages_to_start(request, cached)
            if needed > free:
                if now - request.arrived > self.limits.patience:
                    break  # what becomes free is kept for it
                continue
            free -= needed
            request.done_rows = cached
            self.running[request.id] = request
            admitted.append(request)
        self.waiting = [request for request in self.waiting if request not in admitted]
        return admitted

    def _share(self, prefilling: Sequence[Request], decoding: int) -> dict[int, int]:
        """Prompt rows of each prefill: even shares, what one leaves going to the others."""
        rows = self.limits.rows - decoding
        if decoding:
            rows = min(rows, max(int(self.limits.rows * self.limits.prefill_share), 1))
        shares = {}
        by_need = sorted(prefilling, key=lambda one: (one.prompt_rows - one.done_rows, one.arrived, one.id))
        for index, request in enumerate(by_need):
            share = min(request.prompt_rows - request.done_rows, -(-rows // (len(by_need) - index)))
            rows -= share
            if share:
                shares[request.id] = share
        return shares
