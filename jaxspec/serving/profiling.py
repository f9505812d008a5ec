"""What the engine's own rounds cost on this device: every executable is run under load, through the engine.

A probe is R answers on R slots whose budget is pinned so that a certain bucket runs (its lower edge: padding costs the
same), once with nothing else and once beside a prompt's chunk. A round's seconds are those between two reads, the
host's part included where it is not hidden.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.simulated import SimulatedProgram
from jaxspec.errors import ConfigError, problem
from jaxspec.serving.adaptive import DraftSwitch
from jaxspec.serving.cost_fit import Cell
from jaxspec.serving.engine import Engine
from jaxspec.serving.requests import Shape

__all__ = ["measure", "nothing_stands"]

_CONFIDENCE = 0.9  # any that leaves a survival worth a row at every slot


def nothing_stands(decoder: Any, drafter: Any, *args: Any, num_proposals: int | None = None, **more: Any) -> Any:
    """`Engine`'s program for a profile: every proposal that has a row is verified, none is accepted, so that contexts
    stay as long as they were."""
    m = drafter.num_proposals if num_proposals is None else num_proposals
    build: Any = SimulatedProgram
    said = {"rates": (0.0,) * m, "confidence": (_CONFIDENCE,) * m, "num_proposals": num_proposals}
    return build(decoder, drafter, *args, **said, **more)


def measure(
    engine: Engine,
    *,
    context: int | None = None,
    steps: int = 32,
    settle: int = 8,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """A cell for each executable that a load can reach, prefill's among them. `context` tokens are committed when a
    probe begins (None: half of what fits); `settle` rounds pass before the `steps` whose median counts.

    ConfigError for an engine without a budget. The engine must be idle, and is idle afterwards.
    """
    planner, switch = engine.drafting.planner, engine.drafting.switch
    if planner is None:
        raise ConfigError(problem("profile", "an engine without a cost table", "one with a budget to pin"))
    if engine.live:
        raise ConfigError(problem("profile", f"{engine.live} live requests", "an idle engine"))
    engine.warm_up()
    room = engine.max_context // 2 if context is None else context
    if not 1 <= room < engine.max_context:
        raise ConfigError(problem("profile: context", room, f"1 to {engine.max_context - 1} tokens"))
    forced, cells, load = planner.forced_fraction, [], _Load(engine, room, seed, clock)
    try:
        for slots in sorted({shape.slots for shape in engine.executables.shapes}):
            for feeders in (0, min(3, -(-slots // 16))) if slots > 1 else (0,):
                load.fill(slots - feeders, feeders)
                for shape in _shapes(engine, slots, feeders > 0):
                    engine.drafting.switch = None if shape.drafting else _Paused()
                    if shape.drafting and not _pin(engine, shape, slots - feeders):
                        continue
                    seconds = load.seconds(shape, steps, settle)
                    if seconds:
                        rows = shape.rows + shape.prefill
                        median = statistics.median(seconds)
                        cells.append(Cell(slots, rows, median, len(seconds), shape.drafting, shape.prefill))
                        progress(cells[-1])
    finally:
        planner.forced_fraction, engine.drafting.switch = forced, switch
        load.stop()
    return cells


class _Paused(DraftSwitch):
    """Nobody drafts."""

    def drafting(self, requests: int, prefilling: bool = False) -> bool:
        return False


def _shapes(engine: Engine, slots: int, prefilling: bool) -> list[Shape]:
    """Those that requests without options take."""
    every = engine.executables.shapes
    bare = any(shape.bare for shape in every)
    found = [shape for shape in every if shape.slots == slots and shape.bare == bare]
    return [shape for shape in found if (shape.prefill > 0) == prefilling]


def _pin(engine: Engine, shape: Shape, decoding: int) -> bool:
    """Pins the budget to the least that takes `shape`; False where so many answers cannot fill it."""
    planner = engine.drafting.planner
    assert planner is not None
    schedule = planner.schedule
    below = max((rows for rows in engine.drafting.row_grid(shape.slots) if rows < shape.rows), default=0)
    budget = max(below + 1 - decoding * max(schedule.min_rows, 1), 0)
    proposals = decoding * min(schedule.most_rows, schedule.proposals)
    if budget > proposals:
        return False
    planner.forced_fraction = min((budget + 0.5) / proposals, 1.0)
    return True


class _Load:
    """Answers that go on for as long as they are needed, and prompts of one chunk each, whose answer is one token."""

    def __init__(self, engine: Engine, context: int, seed: int, clock: Callable[[], float]):
        self._engine, self._context, self._clock = engine, context, clock
        self._rng = np.random.default_rng(seed)
        self._kinds: dict[int, bool] = {}  # handle -> whether it feeds
        self._started: set[int] = set()
        self._labels: collections.deque[Shape | None] = collections.deque()  # of the rounds in flight
        self._chunk = max(shape.prefill for shape in engine.executables.shapes)

    def fill(self, answers: int, feeders: int) -> None:
        """So many of each; the answers have all begun."""
        for kind, wanted in ((True, feeders), (False, answers)):
            handles = [handle for handle, feeds in self._kinds.items() if feeds is kind]
            for handle in handles[wanted:]:
                self._engine.cancel(handle)
                del self._kinds[handle]
        for kind, wanted in ((False, answers), (True, feeders)):
            for _ in range(wanted - sum(feeds is kind for feeds in self._kinds.values())):
                self._admit(kind)
            while any(handle not in self._started for handle, feeds in self._kinds.items() if not feeds):
                self._step()

    def seconds(self, shape: Shape, steps: int, settle: int) -> list[float]:
        """Of up to `steps` rounds of this shape; fewer, or none, where the load does not bring it about."""
        for _ in range(settle):
            self._step()
        found: list[float] = []
        for _ in range(4 * steps):
            ran, seconds = self._step()
            if ran == shape:
                found.append(seconds)
            if len(found) == steps:
                break
        return found

    def stop(self) -> None:
        """Nothing is left behind."""
        for handle in self._kinds:
            self._engine.cancel(handle)
        self._kinds.clear()
        while self._engine.live or self._labels:
            self._step()
        self._engine.drop_prefixes()

    def _admit(self, feeds: bool) -> None:
        length = min(self._chunk, self._engine.max_context - 1) if feeds else self._context
        count = 1 if feeds else self._engine.max_context - length
        prompt = self._rng.integers(0, self._engine.vocab_size, length).tolist()
        handle = self._engine.admit(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        self._kinds[handle] = feeds

    def _step(self) -> tuple[Shape | None, float]:
        """The shape of the round that was read, and how long that took."""
        engine, rounds = self._engine, self._engine.rounds
        began = self._clock()
        events = engine.step()
        seconds = self._clock() - began
        dispatched = engine.rounds > rounds
        if dispatched:
            self._labels.append(engine.executables.newest)
        read = self._labels.popleft() if len(self._labels) > (engine.lag if dispatched else 0) else None
        for event in events:
            self._started.add(event.handle)
            if event.finish_reason is not None and event.handle in self._kinds:
                self._admit(self._kinds.pop(event.handle))
        return read, seconds
