"""The compiled rounds: every shape that a round may take, made ahead of time, several at a time."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.compilations import CacheHits
from jaxspec.decoding.parcel import Parcel
from jaxspec.decoding.ragged import EngineState, RaggedOutput, RaggedProgram, Results, RoundInput
from jaxspec.decoding.round import Weights
from jaxspec.errors import InvariantError, problem
from jaxspec.serving.requests import Shape
from jaxspec.serving.round_inputs import RoundInputs

_SPARE = 4  # reports of a size: those of the rounds in flight, and one


def lower(step: Callable[..., Any], static: dict[str, Any], donate: tuple[int, ...], *arguments: Any) -> Any:
    """A step (weights, state, …) -> (state, …), which takes the memory of the arguments `donate`, for the devices of
    its arguments."""

    def opened(*arguments: Any, **static: Any) -> Any:
        return step(*(x.open() if isinstance(x, Parcel) else x for x in arguments), **static)

    return jax.jit(opened, static_argnames=tuple(static), donate_argnums=donate).lower(*arguments, **static)


def every_shape(
    slot_buckets: Iterable[int], chunk: int, row_grid: Callable[[int], Iterable[int]], bare: bool
) -> list[Shape]:
    """What a round may take: `row_grid` of R slots are the row buckets when drafting, `chunk` a round's prefill
    rows."""
    found = set()
    for slots in slot_buckets:
        for prefill in (0, chunk):
            found.add(Shape(slots, slots, False, prefill))
            found |= {Shape(slots, rows, True, prefill) for rows in row_grid(slots)}
    if bare:
        found |= {dataclasses.replace(shape, bare=True) for shape in found}
    return sorted(found)


class Executables:
    """One program a shape; two more, the halves of its round, where grammars may be asked for (`halves`). With
    `recycle` a round writes its report where one that was read lay: it allocates nothing that outlives it, so that
    whatever it allocates lies where it lay before."""

    def __init__(
        self,
        program: RaggedProgram,
        shapes: list[Shape],
        inputs: RoundInputs,
        halves: bool,
        recycle: bool = False,
        lower: Callable[..., Any] = lower,
    ):
        self._program, self.shapes, self._inputs, self._halves = program, shapes, inputs, halves
        self._recycle, self._lower_step = recycle, lower
        self._spare: dict[int, list[Any]] = collections.defaultdict(list)  # by words
        self.built: dict[str, Any] = {}  # by name
        self.confident = False  # whether rounds carry a confidence
        self.cached = 0  # of them from the persistent compilation cache
        self.newest: Shape | None = None  # of the round that was started last

    @property
    def count(self) -> int:
        """Programs that `compile` makes."""
        return sum(3 if self._halves and not shape.bare else 1 for shape in self.shapes)

    @property
    def ready(self) -> bool:
        """Whether `compile` was called."""
        return bool(self.built)

    def compile(
        self,
        weights: Weights,
        state: EngineState,
        observed: Callable[[int], Any],
        progress: Callable[[str, float], None] | None = None,
    ) -> list[tuple[str, float]]:
        """Returns names and seconds. What `progress` raises ends it."""

        def build(name: str, lowered: Any) -> tuple[str, Any, float]:
            started = time.perf_counter()
            return name, lowered.compile(), time.perf_counter() - started

        for shape in self.shapes:  # the copies that bring inputs are no executables of ours
            self._inputs.round(shape, observed=observed(shape.slots))
        hits, times = CacheHits(), []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            lowered = (named for shape in self.shapes for named in self.lowered(shape, weights, state, observed))
            waiting = [pool.submit(build, *named) for named in lowered]
            try:
                for done in concurrent.futures.as_completed(waiting):
                    name, executable, seconds = done.result()
                    self.built[name] = executable
                    times.append((name, seconds))
                    if progress is not None:
                        progress(name, seconds)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # a server that is stopped does not compile on
                raise
        self.cached = hits.count
        return times

    def run(self, shape: Shape, weights: Weights, state: EngineState, inputs: Any) -> tuple[EngineState, RaggedOutput]:
        """`RaggedProgram.ragged_round`. Raises InvariantError for a shape that was not compiled, as the halves do."""
        program, report = self._named(str(shape)), None
        self.newest = shape
        if self._recycle:
            words = Results.size(shape.slots, self._inputs.rows_each, self._inputs.pieces if shape.prefill else 0)
            spare = self._spare[words]
            report = spare.pop() if spare else self._inputs.home.put(np.zeros(words, np.int32))
        return program(weights, state, report, inputs)

    def give_back(self, output: RaggedOutput) -> None:
        """Its words are on the host: a later round may write over them."""
        if self._recycle and len(spare := self._spare[output.words.shape[0]]) < _SPARE:
            spare.append(output.words)

    def first_half(self, shape: Shape) -> Any:
        """`RaggedProgram.begin`."""
        return self._named(f"{shape}, first half")

    def second_half(self, shape: Shape) -> Any:
        """`RaggedProgram.finish`, with masks."""
        return self._named(f"{shape}, second half")

    def _named(self, name: str) -> Any:
        if name not in self.built:
            raise InvariantError(problem("executable", name, "one that was compiled at start-up"))
        return self.built[name]

    def lowered(
        self, shape: Shape, weights: Weights, state: EngineState, observed: Callable[[int], Any]
    ) -> Iterator[tuple[str, Any]]:
        """The shape's programs by name, not compiled yet."""
        inputs = self._inputs.round(shape, observed=observed(shape.slots))
        static = {"rows": shape.rows, "drafting": shape.drafting}

        def whole_round(weights: Weights, state: EngineState, report: Any, inputs: RoundInput, **static: Any) -> Any:
            state, output = self._program.ragged_round(weights, state, inputs, **static)
            if report is not None:
                output = dataclasses.replace(output, words=report.at[:].set(output.words))
            return state, output

        words = Results.size(shape.slots, self._inputs.rows_each, self._inputs.pieces if shape.prefill else 0)
        report = jax.ShapeDtypeStruct((words,), jnp.int32) if self._recycle else None
        lowered = self._lower_step(whole_round, static, (1, 2), weights, state, report, inputs)
        self.confident |= lowered.out_info[1].confidence is not None
        yield str(shape), lowered
        if self._halves and not shape.bare:
            begin = self._lower_step(self._program.begin, static, (1,), weights, state, inputs)
            yield f"{shape}, first half", begin
            masks = self._inputs.masks(shape)
            finish = self._lower_step(self._program.finish, {}, (1,), weights, *begin.out_info, inputs, masks)
            yield f"{shape}, second half", finish
