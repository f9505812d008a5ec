"""The engine over a mesh: slots and pages split over `data`, every model over `tensor`, one executable for all.

Each data shard has its own slots, pages, prefix cache and budget, and books them as an `Engine` does; the round is
dispatched once for all of them. They run the largest bucket that any of them needs, and those that need less fill it
with real drafts (DESIGN.md §4). No data crosses from one data shard to another.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxspec.decoding.compilations import CompilationCounter
from jaxspec.decoding.fast import Fast
from jaxspec.decoding.ragged import EngineState, RoundInput
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.round import Weights
from jaxspec.decoding.runner import DraftLike, Event, TargetLike
from jaxspec.drafters.base import Shared
from jaxspec.errors import ConfigError, RequestError, problem
from jaxspec.parallel.mesh import Placement, check_copies, shard
from jaxspec.parallel.rules import ServingRules
from jaxspec.serving.buckets import bucket_for, shared_rows
from jaxspec.serving.engine import Engine
from jaxspec.serving.executables import Executables
from jaxspec.serving.grammar import Grammar
from jaxspec.serving.requests import Chosen, Metrics, Shape
from jaxspec.serving.round_inputs import Home, RoundInputs


@dataclasses.dataclass(frozen=True)
class Part:
    """A data shard's part of an array on the mesh."""

    array: jax.Array
    index: int

    def copy_to_host_async(self) -> None:
        """Starts a copy that a later read finds done."""
        self.array.copy_to_host_async()


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A `Home` that makes of one shard's inputs what is to be made of them."""

    put: Callable[[Any], Any]

    def inputs(self, shape: Shape, tree: RoundInput) -> Any:
        """As `put`."""
        return self.put(tree)


class Shard(Engine):
    """The host's half of an engine, for one data shard: nothing here touches a device but the reading of results."""

    choose, masks_of, launched, collect = Engine._choose, Engine._masks_of, Engine._launched, Engine._collect
    fresh_state: Callable[[], EngineState]

    @property
    def inputs(self) -> RoundInputs:
        """Builds its part of a round."""
        return self._inputs

    @property
    def shapes(self) -> list[Shape]:
        """Of a round."""
        return self.executables.shapes

    @property
    def slot_buckets(self) -> tuple[int, ...]:
        """Numbers of slots that are compiled for."""
        return self._slot_buckets

    @property
    def bare(self) -> bool:
        """Whether there are bare rounds."""
        return self._bare

    @property
    def pool_shape(self) -> tuple[int, int]:
        """Pages, the trash page among them, and rows of each."""
        return self._pages.capacity + 1, self._pages.page_size

    def _place(self, embedding: Any, *asked: Any) -> tuple[Home, Fast]:
        """Nowhere: inputs stay on the host until those of all shards are there. The kernels and packed projections are
        of one device."""
        attention, packed, bare = asked
        if attention not in ("auto", "reference"):
            raise ConfigError(problem("engine.attention", f"found {attention}", "auto or reference on a mesh"))
        if packed:
            raise ConfigError(problem("engine.pack_weights", "found true", "false or null on a mesh"))
        return Gathered(lambda tree: tree), Fast(bare=bool(bare))

    def _start(self, state: Callable[[], EngineState]) -> None:
        self.fresh_state = state

    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """Nothing: `ShardedEngine` compiles."""
        return []

    def _host(self, value: Any) -> Any:
        self.reads += 1
        return jax.tree.map(lambda part: shard(part.array, part.index), value)


class ShardedEngine:
    """`Engine`'s interface over a `placement`; `options` are its options, of which `num_slots` and `num_pages` count
    all data shards. `halves` compiles the halves of rounds too (None: where there are grammars); `debug` checks that
    the tensor shards of a round agree on its tokens.

    Raises ConfigError, naming the key, for what the mesh does not divide.
    """

    def __init__(
        self,
        target: TargetLike,
        draft: DraftLike | None = None,
        *,
        placement: Placement,
        num_slots: int = 8,
        num_pages: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        halves: bool | None = None,
        debug: bool = False,
        **options: Any,
    ):
        data = placement.data
        for name, size in (("num_slots", num_slots), ("num_pages", num_pages)):
            if size is not None and size % data:
                raise ConfigError(problem(f"engine.{name}", size, f"a multiple of mesh.data {data}"))
        own: dict[str, Any] = {"num_slots": num_slots // data, "clock": clock, **options}
        own["num_pages"] = None if num_pages is None else num_pages // data
        self.placement, self._clock, self._debug = placement, clock, debug
        self._shards = [Shard(target, draft, **own) for _ in range(data)]
        first = self._first = self._shards[0]
        self.program = first.program
        rules = ServingRules.of(target.model.config, placement.tensor)
        model = None if draft is None else drafter_model(draft.drafter)
        drafts = ServingRules() if model is None else ServingRules.of(model, placement.tensor, "drafter")
        self.weights = placement.put(first.weights, _weight_specs(first.weights, rules, drafts))
        specs = _state_specs(jax.eval_shape(first.fresh_state), first.pool_shape, rules, drafts)
        self._state_shardings = jax.tree.map(lambda spec: placement.sharding(spec, by_data=True), specs)
        self.state = placement.make(first.fresh_state, specs)
        every = lambda tree: placement.inputs([tree] * data)  # noqa: E731
        self._empty = dataclasses.replace(first.inputs, home=Gathered(every))
        self._halves = options.get("grammars") is not None if halves is None else halves
        self.executables = Executables(self.program, first.shapes, self._empty, self._halves, lower=self._lower)
        self._owners: dict[int, tuple[int, int]] = {}  # handle -> shard, its handle there
        self._compilations = CompilationCounter()

    # -- start-up -----------------------------------------------------------------------------------------------------

    def _lower(self, step: Callable[..., Any], static: dict[str, Any], donate: tuple[int, ...], *arguments: Any) -> Any:
        """`executables.lower` over the mesh."""
        place = self.placement
        rows = place.sharding(PartitionSpec(), by_data=True)

        def one(*trees: Any) -> Any:
            return step(*trees, **static)

        def placed(leaf: Any) -> Any:
            known = isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding)
            return leaf if known else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows)

        one.__name__ = step.__name__
        jitted = jax.jit(place.step(one), donate_argnums=donate, out_shardings=(self._state_shardings, rows))
        with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
            return jitted.lower(*jax.tree.map(placed, arguments))

    def compile(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """Compiles every executable and runs none."""
        times = self.executables.compile(self.weights, self.state, self._first.drafting.observed, progress)
        for part in self._shards:
            part.drafting.confident = self.executables.confident
        return times

    def lowered(self) -> Iterator[tuple[Shape, str, Any]]:
        """Every program with its shape and name, not compiled yet."""
        for shape in self.executables.shapes:
            observed = self._first.drafting.observed
            for name, lowered in self.executables.lowered(shape, self.weights, self.state, observed):
                yield shape, name, lowered

    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """As `Engine.warm_up`."""
        if self.executables.ready:
            return []
        times = self.compile(progress)
        nobody = [Chosen([], []) for _ in self._shards]
        for shape in self.executables.shapes:
            inputs = self._empty.round(shape, observed=self._first.drafting.observed(shape.slots))
            self._run(shape, inputs)
            if self._halves and not shape.bare:
                self._run_masked(shape, inputs, nobody)
        jax.block_until_ready(self.state)
        self._compilations.reset()
        return times

    @property
    def num_executables(self) -> int:
        """Programs that `warm_up` compiles."""
        return self.executables.count

    @property
    def compile_count(self) -> int:
        """Backend compilations of this process since warm-up; 0 unless something went wrong."""
        return self._compilations.count

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self._first.max_context

    @property
    def num_proposals(self) -> int:
        """m, as served."""
        return self._first.num_proposals

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._first.vocab_size

    @property
    def num_slots(self) -> int:
        """Requests that fit at once."""
        return sum(part.num_slots for part in self._shards)

    @property
    def free_slots(self) -> int:
        """Slots that `admit` may still fill."""
        return sum(part.free_slots for part in self._shards)

    @property
    def live(self) -> int:
        """Requests on the slots, and events that wait for the next `step`."""
        return sum(part.live for part in self._shards)

    @property
    def held_pages(self) -> int:
        """Pages that requests or prefix caches hold."""
        return sum(part.held_pages for part in self._shards)

    def metrics(self) -> Metrics:
        """Sums over the data shards; a round of all of them counts once for each that took part."""
        sums = {
            field.name: sum(getattr(part.metrics(), field.name) for part in self._shards)
            for field in dataclasses.fields(Metrics)
        }
        return Metrics(**{**sums, "executables": self.executables.count, "compilations": self.compile_count})

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None = None) -> None:
        """Raises RequestError if this request can never be served."""
        self._first.check(prompt, params, grammar)

    def fits(self, prompt: Sequence[int], params: SamplingParams) -> bool:
        """As `Engine.fits`, of the data shard that would take the request."""
        return self._shards[self._next()].fits(prompt, params)

    def seconds_to_first_token(self, prompt: Sequence[int], params: SamplingParams) -> float:
        """As `Engine.seconds_to_first_token`, of the same."""
        return self._shards[self._next()].seconds_to_first_token(prompt, params)

    def _next(self) -> int:
        """The data shard with the most free slots, the first of them."""
        return max(range(len(self._shards)), key=lambda one: (self._shards[one].free_slots, -one))

    def admit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sample: int = 0,
        grammar: Grammar | None = None,
        priority: int = 0,
    ) -> int:
        """As `Engine.admit`, on the next data shard."""
        self.check(prompt, params, grammar)
        self.warm_up()
        index = self._next()
        if not self._shards[index].free_slots:
            raise RequestError(problem("slots", f"all {self.num_slots} are taken", "a free one", "wait for one"))
        own = self._shards[index].admit(prompt, params, sample, grammar, priority)
        handle = own * len(self._shards) + index
        self._owners[handle] = (index, own)
        return handle

    def cancel(self, handle: int) -> None:
        """Frees the request's slot and pages. Harmless for unknown or ended handles."""
        if handle in self._owners:
            index, own = self._owners.pop(handle)
            self._shards[index].cancel(own)

    def drop_prefixes(self) -> None:
        """Empties the prefix caches."""
        for part in self._shards:
            part.drop_prefixes()

    def step(self) -> list[Event]:
        """As `Engine.step`, for all data shards at once."""
        took_part = self._dispatch()
        events = []
        for index, part in enumerate(self._shards):
            for event in part.collect(took_part[index]):
                handle = event.handle * len(self._shards) + index
                events.append(event._replace(handle=handle))
                if event.finish_reason is not None:
                    self._owners.pop(handle, None)
        return events

    # -- a round ------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> list[bool]:
        """Starts a round for whoever has pages for it; says which data shards take part."""
        chosen = [part.choose() for part in self._shards]
        took_part = [bool(one.requests) for one in chosen]
        if not any(took_part):
            return took_part
        slots = bucket_for(max(one.slots for one in chosen), self._first.slot_buckets)
        prefill = self._first.inputs.chunk if any(one.pieces for one in chosen) else 0
        drafted = [
            part.drafting.decide(one.decoding, slots, prefill) for part, one in zip(self._shards, chosen, strict=True)
        ]
        bare = self._first.bare and all(one.bare for one in chosen)
        shape = Shape(slots, slots, False, prefill, bare)
        if any(one.drafters for one in drafted):
            # an idle shard needs no row, one that does not draft a row for each anchor
            needed = [
                one.rows if one.drafters else len(mine.decoding) for one, mine in zip(drafted, chosen, strict=True)
            ]
            rows = shared_rows(needed, self._first.drafting.row_grid(slots))
            assert rows is not None
            shape = Shape(slots, rows, True, prefill, bare)
            drafted = [
                part.drafting.filled(one, mine.decoding, rows)
                for part, one, mine in zip(self._shards, drafted, chosen, strict=True)
            ]
        host = [
            part.inputs.of(shape, mine, one, part.drafting.observed(slots))
            for part, mine, one in zip(self._shards, chosen, drafted, strict=True)
        ]
        began = self._clock()
        inputs = self.placement.inputs(host)
        masked = any(one.constrained for one in chosen)
        output = self._run_masked(shape, inputs, chosen) if masked else self._run(shape, inputs)
        for index, (part, mine, one) in enumerate(zip(self._shards, chosen, drafted, strict=True)):
            if took_part[index]:
                part.launched(shape, mine, one, _parts(output, index), began)
        return took_part

    def _run(self, shape: Shape, inputs: RoundInput) -> Any:
        self.state, output = self.executables.run(shape, self.weights, self.state, inputs)
        return self._checked(output)

    def _run_masked(self, shape: Shape, inputs: RoundInput, chosen: list[Chosen]) -> Any:
        self.state, pending = self.executables.first_half(shape)(self.weights, self.state, inputs)
        masks = [
            part.masks_of(shape, one, (Part(pending.proposal.tokens, index), _parts(pending.proposal.tree, index)))
            for index, (part, one) in enumerate(zip(self._shards, chosen, strict=True))
        ]
        finish = self.executables.second_half(shape)
        self.state, output = finish(self.weights, self.state, pending, inputs, self.placement.inputs(masks))
        return self._checked(output)

    def _checked(self, output: Any) -> Any:
        if self._debug:
            check_copies(output.words, "words")
        return output


def drafter_model(drafter: Any) -> Any:
    """ModelConfig of a drafter's layers; None for one without any."""
    drafter = getattr(drafter, "inner", drafter)  # a tree around a block
    config = getattr(drafter, "config", None)
    found = getattr(config, "model", None)
    return getattr(getattr(drafter, "model", None), "config", None) if found is None else found


def _weight_specs(weights: Weights, rules: ServingRules, drafts: ServingRules) -> Weights:
    table = rules.parameter("embed_tokens.weight", weights.shared.embedding.shape)
    return Weights(rules.parameters(weights.target), drafts.parameters(weights.draft), Shared(table, table))


def _state_specs(state: EngineState, pool: tuple[int, int], rules: ServingRules, drafts: ServingRules) -> EngineState:
    """Pools by their K/V heads; anchors, positions and histories whole on every tensor shard of their data shard."""
    whole = jax.tree.map(lambda leaf: PartitionSpec(), state)
    return dataclasses.replace(whole, target=rules.pools(state.target, *pool), draft=drafts.pools(state.draft, *pool))


def _parts(output: Any, index: int) -> Any:
    return jax.tree.map(lambda array: Part(array, index), output)
