"""`serve.py --plan`: every round of a server, compiled for TPUs that are not there: HBM, estimated times, a cost table.

Nothing runs, and no weights are read: arguments are shapes with their shardings. A time is an estimate: the FLOP and
bytes that the compiler counts, at the chip's limits. It counts the bytes of every fusion and gather in full, so that
buckets can be compared and rounds are faster than it says. (Its own `optimal_seconds` is negative for large programs.)
The table made of the estimates says what it is.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import ServeConfig
from jaxspec.decoding.round import Weights
from jaxspec.errors import ConfigError, InvariantError, problem
from jaxspec.models.quantization import tree_bytes
from jaxspec.parallel.mesh import CHIPS, GIB, Chip, placement, tpu_devices
from jaxspec.serving.cost import StepsTable, save_cost_table, unmeasured
from jaxspec.serving.main import ENGINE_KEYS, draft_options
from jaxspec.serving.requests import Shape
from jaxspec.serving.sharded import ShardedEngine

__all__ = ["Estimate", "estimated_table", "estimates", "plan", "planned_engine"]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the compiler says of one program, a device: bytes held, FLOP and bytes moved, and seconds that nobody
    measured."""

    shape: Shape
    name: str
    arguments: int
    temporaries: int
    total: int
    flops: float
    moved: float
    seconds: float
    compiled_in: float
    error: str = ""  # why there is no such program

    def line(self, hbm: int) -> str:
        """For people."""
        if self.error:
            return f"DOES NOT FIT {self.name}: {self.error}"
        state = "OK" if self.total <= hbm else "DOES NOT FIT"
        return (
            f"{state} {self.name}: arguments {self.arguments / GIB:.2f} GiB, temporaries "
            f"{self.temporaries / GIB:.2f} GiB, total {self.total / GIB:.2f} of {hbm / GIB:.0f} GiB; "
            f"{self.flops / 1e9:.1f} GFLOP and {self.moved / 1e9:.2f} GB, estimated {1e3 * self.seconds:.2f} ms "
            f"(compiled in {self.compiled_in:.0f} s)"
        )


def plan(config: ServeConfig, topology: str, table: Path, say: Callable[[str], None]) -> int:
    """Prints a line a program and writes the cost table. Returns 0, or 1 where a program does not fit the chip.

    Raises ConfigError, CheckpointError or HubError for a config that cannot be planned.
    """
    devices = tpu_devices(topology)
    engine = planned_engine(config, devices)
    chip = CHIPS[topology.partition(":")[0]]
    hbm = chip.hbm_bytes
    mesh = config.mesh
    say(
        f"plan for {topology} ({devices[0].device_kind}): mesh data={mesh.data} tensor={mesh.tensor} on "
        f"{mesh.data * mesh.tensor} of {len(devices)} devices of {hbm / GIB:.0f} GiB; {engine.num_executables} programs"
    )
    weights = engine.weights
    say(
        f"whole target {tree_bytes(_distinct(weights.target)) / GIB:.2f} GiB, whole drafter "
        f"{tree_bytes(_distinct(weights.draft)) / GIB:.2f} GiB, m={engine.num_proposals}, {engine.num_slots} slots of "
        f"{engine.max_context} tokens"
    )
    found = []
    for one in estimates(engine, chip):
        found.append(one)
        say(one.line(hbm))
    whole = {one.shape: one.seconds for one in found if not one.error and one.name == str(one.shape)}
    if whole:
        table.parent.mkdir(parents=True, exist_ok=True)
        save_cost_table(estimated_table(whole), table)
        say(f"estimated cost table for engine.cost_table: {table} (no measurement: profile the device for one)")
    say("times are estimates: what the compiler counts, at the chip's limits; nothing was run")
    return int(any(one.error or one.total > hbm for one in found))


def planned_engine(config: ServeConfig, devices: Any) -> ShardedEngine:
    """The configured engine on devices that are not there. It has the buckets of a budget even where no cost table is
    named, since one is to be made."""
    from jaxspec.checkpoints.shapes import drafter_shape, target_shape

    keys = config.engine
    target = target_shape(config.target.source, config.target.dtype, config.target.quantization)
    draft, proposals = None, keys.num_proposals
    if config.drafter is not None:
        draft, proposals = drafter_shape(config.drafter, target, draft_options(keys))
    chain = draft is not None and not draft.drafter.tree_nodes
    return ShardedEngine(
        target,
        draft,
        placement=placement(config.mesh.data, config.mesh.tensor, devices, abstract=True),
        num_proposals=proposals,
        cost_table=unmeasured(1) if chain else None,
        halves=keys.grammar,
        **{name: getattr(keys, name) for name in ENGINE_KEYS},
    )


def estimates(engine: ShardedEngine, chip: Chip) -> Iterable[Estimate]:
    """Of every program, in the order in which they are done."""
    repeated = repeated_bytes(engine.weights)

    def build(shape: Shape, name: str, lowered: Any) -> Estimate:
        started = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = " ".join(str(error).split())[:200]
            return Estimate(shape, name, 0, 0, 0, 0.0, 0.0, math.nan, time.perf_counter() - started, said)
        memory = compiled.memory_analysis()
        arguments = memory.argument_size_in_bytes - repeated
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = arguments + outputs + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        cost = compiled.cost_analysis() or {}
        flops, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
        if not (flops > 0 and moved > 0):
            raise InvariantError(problem(f"the compiler's count of {name}", cost, "FLOP and bytes"))
        seconds, taken = chip.seconds(flops, moved), time.perf_counter() - started
        return Estimate(shape, name, arguments, memory.temp_size_in_bytes, total, flops, moved, seconds, taken)

    # libtpu's compiler works on several threads itself; more than one program for each core only takes memory
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        waiting = [pool.submit(build, *named) for named in engine.lowered()]
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()


def estimated_table(seconds: Mapping[Shape, float]) -> StepsTable:
    """A table over the rows M of rounds that draft (of all of them, where none does).

    A bucket costs the same from its lower edge on, the row behind the bucket before it. Where two buckets have as many
    rows in all, the dearer one counts.
    """
    if not seconds:
        raise ConfigError(problem("cost table", "no estimate", "at least one"))
    drafting = {shape: value for shape, value in seconds.items() if shape.drafting} or dict(seconds)
    sizes: dict[int, float] = {}
    for shape, value in drafting.items():
        rows = shape.rows + shape.prefill
        sizes[rows] = max(value, sizes.get(rows, 0.0))
    buckets = sorted(sizes)
    edges = (1, *(before + 1 for before in buckets[:-1]))
    return StepsTable(edges, tuple(1 / sizes[rows] for rows in buckets), buckets[-1], estimated=True)


def repeated_bytes(weights: Weights) -> int:
    """Bytes a device of arguments that are named twice: tables that the drafter shares with the target."""
    known = {id(leaf) for leaf in jax.tree.leaves(weights.target)}
    repeated = 0
    for table in (weights.shared.embedding, weights.shared.head):
        if id(table) in known:
            repeated += math.prod(table.sharding.shard_shape(table.shape)) * table.dtype.itemsize
        known.add(id(table))
    return repeated


def _distinct(params: Any) -> Any:
    """Shapes of equal layers may be one object; each stands for an array of its own."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
