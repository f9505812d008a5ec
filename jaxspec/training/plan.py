"""`train.py --plan`: the real training step, compiled for TPUs that are not there, without weights.

Says where parameters and moments lie, what a chip must hold, what the chips say to each other, and what to change where
it does not fit. The time is the compiler's estimate and no measurement.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.shapes import target_shape
from jaxspec.config import TrainConfig
from jaxspec.config.eagle_rules import EAGLE
from jaxspec.drafters.base import Shared
from jaxspec.errors import ConfigError, problem
from jaxspec.models.layers import stack_layers
from jaxspec.parallel.mesh import CHIPS, GIB, tpu_devices
from jaxspec.training import optimizer as opt
from jaxspec.training.build import fresh_drafter, initial_params
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.pipeline import batch_shapes
from jaxspec.training.state import Placement, choose, create
from jaxspec.training.step import Frozen, StepSpec, attention_over, compile_step

__all__ = ["Plan", "account", "advice", "collectives", "lines", "plan", "planned_step", "tree_share"]

_ASSUMED_STEPS = 1000  # of the schedule, where a config limits a run by time or epochs: the program is the same
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}
_CALL = re.compile(r"= (\(?.*?\)?) (" + "|".join(_KINDS) + r")(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one chip, of the step's parts and as the compiler counts them; what it estimates of the step.

    `collectives`: kind -> (how many, bytes of their results on a chip); None where the program has no text.
    """

    devices: int
    hbm: int
    target: int
    drafter: int
    moments: int
    arguments: int
    temporaries: int
    total: int
    flops: float
    seconds: float
    collectives: dict[str, tuple[int, int]] | None

    @property
    def fits(self) -> bool:
        """Whether a chip holds it."""
        return self.total <= self.hbm


def plan(config: TrainConfig, topology: str | None, say: Callable[[str], None]) -> int:
    """Prints the plan; 0, or 1 where it does not fit the chip.

    Raises ConfigError, CheckpointError or HubError for what cannot be planned.
    """
    topology = topology or config.mesh.topology
    if topology is None:
        raise ConfigError(problem("mesh.topology", "none", "a TPU topology, for example v5p:2x4x4", "or give --tpu"))
    devices = tpu_devices(topology)
    hbm = CHIPS[topology.partition(":")[0]].hbm_bytes
    placement = choose(config.mesh, config.optimizer.batch_size, devices)
    rows = config.optimizer.batch_size
    say(f"plan for {topology} ({devices[0].device_kind}), {hbm / GIB:.0f} GiB of HBM a device")
    say(f"mesh: {placement} of {len(devices)} devices; {rows // placement.batch} of {rows} sequences on each")
    started = time.perf_counter()
    try:
        found = planned_step(config, placement, hbm)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(f"DOES NOT FIT: the compiler gives up ({' '.join(str(error).split())[:300]})")
        say(f"to change first: {advice(config, None)}")
        return 1
    for line in lines(found, config):
        say(line)
    say(f"compiled in {time.perf_counter() - started:.0f} s; nothing was run, and the time is the compiler's estimate")
    return int(not found.fits)


def planned_step(config: TrainConfig, placement: Placement, hbm: int = 0) -> Plan:
    """Compiles the configured step for the placement's devices."""
    target = target_shape(config.target.source, config.target.dtype, config.target.quantization)
    drafter: Any = fresh_drafter(config, target.config)
    total = config.run.steps or _ASSUMED_STEPS
    spec = StepSpec(
        model=target.model,
        drafter=drafter,
        optimizer=opt.build(config.optimizer),
        learning_rate=opt.schedule(config.optimizer, total),
        num_anchors=config.data.num_anchors,
        anchor_rule=config.data.anchor_rule,
        block_size=drafter.config.block_size,
        total_steps=total,
        dtype=jnp.dtype(config.drafter.dtype),
        ema_decay=config.optimizer.ema_decay,
    )
    averages = config.optimizer.ema_decay is not None
    params = jax.eval_shape(stack_layers, target.params)
    tables = [jax.ShapeDtypeStruct(table.shape, table.dtype) for table in (target.embedding, target.head)]
    if not drafter.needs_teacher and not config.run.eval_every:
        params = jax.eval_shape(lambda tree: target.model.truncated(tree, drafter.taps)[1], params)
        spec = dataclasses.replace(spec, model=target.model.truncated({"model": {"layers": []}}, drafter.taps)[0])
    frozen = Frozen(params, Shared(*tables))
    state = jax.eval_shape(
        lambda key: create(initial_params(drafter, key, jnp.float32), spec.optimizer, key, averages), jax.random.key(0)
    )
    layout = None
    if config.features.mode != "online":  # the target runs elsewhere; the step takes what was stored
        hidden = target.config.hidden_size
        layout = Layout(len(drafter.taps) * hidden, hidden if drafter.needs_teacher else 0, config.features.storage)
        frozen = Frozen(params if config.run.eval_every else {}, frozen.shared)
    batch = batch_shapes(config.optimizer.accumulation, config.optimizer.batch_size, config.data.max_length, layout)
    with attention_over(config.run.anchor_attention):
        compiled: Any = compile_step(spec, state, frozen, batch, placement)
    return account(compiled, state, frozen, placement, hbm)


def account(compiled: Any, state: Any, frozen: Any, placement: Placement, hbm: int) -> Plan:
    """What a compiled step needs of each device; its parts alone where `compiled` is None (it could not be)."""
    parts: dict[str, Any] = {
        "devices": placement.mesh.size,
        "hbm": hbm,
        "target": tree_share(frozen, placement),
        "drafter": tree_share(state.params, placement),
        "moments": tree_share((state.opt_state, state.ema), placement),
    }
    if compiled is None:
        arguments = parts["target"] + parts["drafter"] + parts["moments"]
        none: dict[str, Any] = {"temporaries": 0, "flops": 0.0, "seconds": 0.0, "collectives": {}}
        return Plan(**parts, arguments=arguments, total=arguments, **none)
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    live = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Plan(
        **parts,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        total=memory.argument_size_in_bytes + live + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        flops=float(cost.get("flops", 0.0)),
        seconds=max(float(cost.get("optimal_seconds", 0.0)), 0.0),
        collectives=_collectives(compiled),
    )


def tree_share(tree: Any, placement: Placement) -> int:
    """Bytes of one device's share of a state or a model."""
    sizes = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        tree,
        placement.shardings(tree),
    )
    return sum(jax.tree.leaves(sizes))


def _collectives(compiled: Any) -> dict[str, tuple[int, int]] | None:
    """None for a program that this jaxlib cannot read back: libtpu may be newer, and know operations that it does
    not."""
    try:
        return collectives(compiled.as_text())
    except jax.errors.JaxRuntimeError:
        return None


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Kind -> (calls in the program's text, bytes of their results on a device). A call in a loop counts once."""
    found: dict[str, tuple[int, int]] = {}
    for result, kind, _ in _CALL.findall(hlo):
        sizes = [math.prod(map(int, shape.split(","))) if shape else 1 for _, shape in _ARRAY.findall(result)]
        widths = [_WIDTHS.get(name, 4) for name, _ in _ARRAY.findall(result)]
        count, total = found.get(kind, (0, 0))
        found[kind] = count + 1, total + sum(n * width for n, width in zip(sizes, widths, strict=True))
    return found


def lines(found: Plan, config: TrainConfig) -> Iterator[str]:
    gib = lambda size: f"{size / GIB:.2f} GiB"  # noqa: E731
    yield f"parameters on a device: target and tables {gib(found.target)}, drafter {gib(found.drafter)} (float32)"
    average = "" if config.optimizer.ema_decay is None else " and average"
    yield f"moments{average} on a device: {gib(found.moments)}"
    yield f"arguments {gib(found.arguments)}, temporaries {gib(found.temporaries)}"
    for kind, (count, size) in sorted((found.collectives or {}).items()):
        yield f"{kind}: {count} in the program (one in a loop counts once), {size / 1e6:.1f} MB a device"
    if not found.collectives:
        unread = "unknown: this jaxlib cannot read the program that libtpu made; a newer one may"
        yield f"collectives: {unread if found.collectives is None else 'none'}"
    yield f"{found.flops / 1e12:.2f} TFLOP a device as the compiler counts them"
    yield f"estimated {1e3 * found.seconds:.0f} ms a step"
    state = "OK" if found.fits else "DOES NOT FIT"
    yield f"{state}: total {gib(found.total)} of {gib(found.hbm)}"
    if not found.fits:
        yield f"to change first: {advice(config, found)}"


def advice(config: TrainConfig, found: Plan | None, devices: int | None = None) -> str:
    """The one setting that takes most off what is too large, with `devices` at hand (any number where None)."""
    shards = config.mesh.fsdp * config.mesh.tensor
    if found is not None and found.arguments > found.temporaries:
        if devices is None or 2 * shards <= devices:
            if config.mesh.data != 1 and config.optimizer.batch_size % (2 * config.mesh.fsdp) == 0:
                return f"mesh.fsdp={2 * config.mesh.fsdp}, since parameters and moments are most of it"
            return f"mesh.tensor={2 * config.mesh.tensor}, since parameters and moments are most of it"
        if found.target > found.drafter + found.moments and config.target.quantization is None:
            return "target.quantization=int8, since the target is most of it and every device is in use"
        return "more devices (mesh.fsdp), or a smaller drafter, since parameters and moments are most of it"
    shards = config.mesh.fsdp * max(config.mesh.data, 1)
    if config.optimizer.batch_size > shards and config.optimizer.batch_size % 2 == 0:
        half = config.optimizer.batch_size // 2
        return f"optimizer.batch_size={half} with optimizer.accumulation={2 * config.optimizer.accumulation}"
    if config.objective.chunk_blocks == 0 or config.objective.chunk_blocks > 16:
        return f"objective.chunk_blocks={max(config.objective.chunk_blocks // 4, 16)}, the slice of the vocabulary loss"
    if config.drafter.method == "eagle3" and config.objective.keep_products:
        return "objective.keep_products=false, since what the layer gave in each step is kept"
    if config.drafter.method in EAGLE:
        return f"data.max_length={config.data.max_length // 2}"
    return f"data.num_anchors={config.data.num_anchors // 2}, or a shorter data.max_length"
