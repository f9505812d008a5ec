"""The thread that owns the engine: queue in, events out.

Every touch of jax state (start-up, rounds, cancelling) happens on this one thread, so the engine needs no lock and the
device sees one order of work. Other threads only enter the queue and mark requests as cancelled.

The engine decides what runs in a round; who gets a free slot, and who is refused because its deadline cannot be met,
is decided here by the rules of `scheduler`.

A request is known to the engine by its handle. Handles are never reused, and a finished or cancelled handle is
forgotten at once: whatever still arrives for it (a round that was in flight) is dropped, and a late cancel cannot hit
the next owner of its slot.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from jaxspec.decoding.runner import Event, TokenLogprob
from jaxspec.errors import RequestError, problem
from jaxspec.serving.engine import Metrics
from jaxspec.serving.facts import Facts, Loaded
from jaxspec.serving.failure import Failure, Status
from jaxspec.serving.grammar import Grammar, GrammarCompiler
from jaxspec.serving.scheduler import choose
from jaxspec.serving.text import Codec

__all__ = ["Delta", "Load", "State", "Stopped", "Ticket", "Usage", "Worker"]


class State(enum.Enum):
    STARTING = "warming up"
    SERVING = "serving"
    DRAINING = "shutting down"
    FAILED = "failed"
    STOPPED = "stopped"


class Stopped(Exception):
    """Raised inside start-up to leave it when a stop was asked for."""


@dataclass(frozen=True)
class Usage:
    """Counts of one answer; seconds from arrival to a slot, from there to the first token, and to the last one."""

    prompt_tokens: int
    completion_tokens: int
    rounds: int
    accepted: int
    proposed: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Delta:
    """New tokens of one round (or the first token, from the prefill); the last one has a reason and the usage.

    `text` is that of a request with stop strings, which the engine must look at; `by_id`: the last token is a stop id.
    """

    tokens: tuple[int, ...]
    reason: str | None = None  # "stop" or "length"
    usage: Usage | None = None
    text: str = ""
    by_id: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


Sink = Callable[[Delta | Failure], None]


class Load(NamedTuple):
    """Requests waiting for a slot, in a slot, and of the latter (or already ended) those marked as cancelled."""

    waiting: int
    running: int
    cancelling: int


@dataclass(eq=False)
class Ticket:
    """One answer to a request inside the worker, which owns the fields below `deadline` (on `time.monotonic`). `sink`
    must not block, whatever thread calls it.
    """

    prompt_ids: tuple[int, ...]
    params: Any
    sink: Sink
    sample: int = 0
    grammar: Grammar | None = None
    priority: int = 0
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = math.inf
    cancelled: bool = False
    handle: int | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    completion_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0

    def usage(self) -> Usage:
        given = {one.name: getattr(self, one.name) for one in fields(Usage) if one.name != "prompt_tokens"}
        return Usage(prompt_tokens=len(self.prompt_ids), **given)


class Worker:
    """Owns the engine on one thread.

    `start(check)` runs on that thread, returns the warm engine and calls `check` between its stages (it raises Stopped
    when a stop was asked for meanwhile). `on_state(state, error)` is called on that thread at every change of state.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], None]], Loaded],
        *,
        max_queue: int,
        on_state: Callable[[State, BaseException | None], None] = lambda state, error: None,
    ):
        self._start_up = start
        self._max_queue = max_queue
        self._on_state = on_state
        self._changed = threading.Condition()
        self._state = State.STARTING
        self._loaded: Loaded | None = None
        self._metrics: Metrics | None = None
        self._waiting: list[Ticket] = []
        self._admitting: Ticket | None = None
        self._running: dict[int, Ticket] = {}
        self._to_cancel: deque[Ticket] = deque()
        self._drain_until = float("inf")
        # A daemon, since a compilation or a hung device cannot be interrupted: the process must be able to end anyway.
        self._thread = threading.Thread(target=self._run, name="jaxspec-runner", daemon=True)

    # -- any thread --

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        return self._state

    @property
    def facts(self) -> Facts | None:
        """None until start-up is over."""
        return None if self._loaded is None else self._loaded.facts

    @property
    def codec(self) -> Codec | None:
        return None if self._loaded is None else self._loaded.codec

    @property
    def grammars(self) -> GrammarCompiler | None:
        return None if self._loaded is None else self._loaded.grammars

    @property
    def metrics(self) -> Metrics | None:
        """The engine's counters after its last round; None until start-up is over."""
        return self._metrics

    def load(self) -> Load:
        with self._changed:
            held = len(self._running) + (self._admitting is not None)
            return Load(len(self._waiting), held, len(self._to_cancel))

    def submit(self, prompt_ids: Sequence[int], params: Any, sink: Sink, **more: Any) -> Ticket:
        """Queues one answer. Its events go to `sink`. See `submit_all`."""
        ticket = Ticket(tuple(prompt_ids), params, sink, **more)
        self.submit_all([ticket])
        return ticket

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        """Queues the answers to one request, all or none: Failure when the server is not serving or is full."""
        with self._changed:
            if self._state is not State.SERVING or self._loaded is None:
                raise Failure(Status.UNAVAILABLE, f"the server is {self._state.value}; try again later or elsewhere")
            slots = self._loaded.facts.slots
            held = self.load().waiting + self.load().running
            if held + len(tickets) > slots + self._max_queue:
                raise Failure(
                    Status.RESOURCE_EXHAUSTED,
                    f"the server is full: {slots} slots and a queue of {self._max_queue} (server.max_queue) hold "
                    f"{held} requests; try again later",
                )
            self._waiting += tickets
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request in whatever phase it is; its sink hears nothing more. Harmless after the end, and twice."""
        with self._changed:
            if ticket.cancelled:
                return
            ticket.cancelled = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            else:
                self._to_cancel.append(ticket)
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """No new requests; those in a slot get up to `seconds` to finish, those still waiting are given back."""
        with self._changed:
            self._drain_until = time.monotonic() + seconds
            if self._state in (State.STARTING, State.SERVING):
                self._state = State.DRAINING
            refused, self._waiting = self._waiting, []
            self._changed.notify_all()
        for ticket in refused:
            ticket.sink(Failure(Status.UNAVAILABLE, "the server is shutting down; the request was not started"))

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits for a condition on `load` or `state`, checked at each change of them; False when it stays false."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end; False when it did not."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the worker's thread --

    def _run(self) -> None:
        try:
            loaded = self._start_up(self._check_stop)
            self._metrics = loaded.runner.metrics()
            self._loaded = loaded
            self._enter(State.SERVING, unless=State.DRAINING)
            self._serve(self._loaded.runner)
        except Stopped:
            self._enter(State.STOPPED)
        except BaseException as error:
            # Whatever broke, the runner's donated buffers may be gone: nothing that it held can go on.
            self._give_up(error)
        else:
            self._enter(State.STOPPED)

    def _check_stop(self) -> None:
        if self._state is not State.STARTING:
            raise Stopped

    def _enter(self, state: State, error: BaseException | None = None, unless: State | None = None) -> None:
        with self._changed:
            if self._state is unless:
                return
            self._state = state
            self._changed.notify_all()
        self._on_state(state, error)

    def _serve(self, runner: Any) -> None:
        while self._wait_for_work():
            self._refuse_late(runner)
            # Admission runs nothing: prompts are prefilled in pieces, in the rounds of the running answers.
            while (ticket := self._next(runner)) is not None:
                self._admit(runner, ticket)
            self._cancel_marked(runner)
            if self._running:
                for event in runner.step():
                    self._deliver(event)
            self._metrics = runner.metrics()

    def _wait_for_work(self) -> bool:
        """False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._to_cancel or self._leaving())
            if not self._leaving():
                return True
            if time.monotonic() >= self._drain_until:
                self._to_cancel.extend(self._running.values())
            return bool(self._running)

    def _refuse_late(self, runner: Any) -> None:
        """Answers the waiting requests whose deadline has passed, or would before a prompt of their length had run."""
        now, late = time.monotonic(), []
        with self._changed:
            for ticket in self._waiting:
                if ticket.deadline == math.inf:
                    continue
                least = runner.seconds_to_first_token(ticket.prompt_ids, ticket.params)
                if now + least > ticket.deadline:
                    late.append((ticket, least))
            self._waiting = [ticket for ticket in self._waiting if all(ticket is not one for one, _ in late)]
            self._changed.notify_all()
        for ticket, least in late:
            left = ticket.deadline - now
            if left <= 0:
                self._tell(ticket, Failure(Status.DEADLINE_EXCEEDED, "the deadline passed before the request began"))
            else:
                action = f"its prompt takes {least:.3g} s; try again with more time, or elsewhere"
                message = problem("deadline", f"{left:.3g} s from now", "a later one", action)
                self._tell(ticket, Failure(Status.RESOURCE_EXHAUSTED, message))

    def _next(self, runner: Any) -> Ticket | None:
        """The request to admit now, if there is one, and a slot and pages for it."""
        with self._changed:
            fits = lambda one: runner.fits(one.prompt_ids, one.params)  # noqa: E731
            ticket = choose(self._waiting, time.monotonic(), fits) if runner.free_slots else None
            if ticket is not None:
                self._waiting.remove(ticket)
                self._admitting = ticket
            elif self._waiting and not self._running and not self._to_cancel:
                raise RuntimeError("the runner has lost its slots or pages: none is free although none is in use")
            return ticket

    def _leaving(self) -> bool:
        return self._state is not State.SERVING

    def _admit(self, runner: Any, ticket: Ticket) -> None:
        ticket.admitted = time.monotonic()
        ticket.queue_seconds = ticket.admitted - ticket.arrived
        try:
            handle = runner.admit(
                ticket.prompt_ids, ticket.params, ticket.sample, ticket.grammar, priority=ticket.priority
            )
        except RequestError as error:
            with self._changed:
                self._admitting = None
                self._changed.notify_all()
            self._tell(ticket, Failure(Status.INVALID_ARGUMENT, str(error)))
            return
        with self._changed:
            ticket.handle = handle
            self._running[handle] = ticket
            self._admitting = None
            self._changed.notify_all()

    def _cancel_marked(self, runner: Any) -> None:
        with self._changed:
            marked, self._to_cancel = self._to_cancel, deque()
            self._changed.notify_all()
        for ticket in marked:
            # Finished meanwhile, or refused by the runner: there is nothing to cancel, the handle may not even exist.
            handle = ticket.handle
            if handle is None or self._running.get(handle) is not ticket:
                continue
            runner.cancel(handle)
            with self._changed:
                del self._running[handle]
                self._changed.notify_all()
            self._tell(ticket, Failure(Status.UNAVAILABLE, "the server shut down before the answer was complete"))

    def _deliver(self, event: Event) -> None:
        ticket = self._running.get(event.handle)
        if ticket is None:  # the rest of a round that was in flight when its request ended
            return
        elapsed = time.monotonic() - ticket.admitted
        if not ticket.completion_tokens:
            ticket.prefill_seconds = elapsed
        ticket.decode_seconds = elapsed - ticket.prefill_seconds
        ticket.completion_tokens += len(event.tokens)
        ticket.rounds += bool(event.from_round)
        ticket.accepted += event.accepted
        ticket.proposed += event.proposed
        if event.finish_reason is not None:
            with self._changed:
                del self._running[event.handle]
                self._changed.notify_all()
        usage = None if event.finish_reason is None else ticket.usage()
        if event.tokens or usage is not None:
            about = event.text, event.by_id, event.logprobs, event.prompt_logprobs
            self._tell(ticket, Delta(event.tokens, event.finish_reason, usage, *about))

    def _tell(self, ticket: Ticket, item: Delta | Failure) -> None:
        if not ticket.cancelled:
            ticket.sink(item)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            touched = [*self._running.values(), *([self._admitting] if self._admitting else [])]
            untouched = list(self._waiting)
            self._running, self._admitting, self._waiting = {}, None, []
            self._state = State.FAILED  # in the same breath, so that no request can enter a queue that nobody reads
        self._on_state(State.FAILED, error)
        for ticket in touched:
            self._tell(ticket, Failure(Status.INTERNAL, f"the runner failed: {type(error).__name__}: {error}"))
        for ticket in untouched:
            self._tell(ticket, Failure(Status.UNAVAILABLE, "the server failed before the request was started"))
