"""What a training step carries from one step to the next, and where it lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.config import TrainMeshSection
from jaxspec.errors import ConfigError, problem
from jaxspec.models.layers import join_trainable, split_trainable
from jaxspec.parallel.rules import DATA, TENSOR
from jaxspec.parallel.training import BATCH, FSDP, TrainingRules

__all__ = ["Placement", "TrainState", "abstract", "choose", "create"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 masters; opt_state: moments; step, skipped, nonfinite: int32 counters of optimizer steps (all
    of them; without a supervised token; with a gradient that was no number); key: typed PRNG key of the run, never
    advanced: each use folds in what it is for; ema: float32 average of what is trained of the parameters, None without
    optimizer.ema_decay."""

    params: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    nonfinite: jax.Array
    key: jax.Array
    ema: Any = None

    @property
    def served(self) -> Any:
        """The parameters that an evaluation measures and an export writes: the average where there is one."""
        return self.params if self.ema is None else join_trainable(self.ema, split_trainable(self.params)[1])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays live: parameters and moments by the rules, a batch split over `data` and `fsdp` by its second axis
    (rows of a micro-batch)."""

    mesh: Mesh
    rules: TrainingRules

    @classmethod
    def of(cls, devices: Sequence[Any] | None = None, fsdp: int = 1, tensor: int = 1, **rules: int) -> Placement:
        """All of `devices` (the first one where None): what fsdp and tensor leave is `data`."""
        grid = np.asarray(jax.devices()[:1] if devices is None else devices).reshape(-1, fsdp, tensor)
        mesh = Mesh(grid, (DATA, FSDP, TENSOR), axis_types=(AxisType.Auto,) * 3)
        return cls(mesh, TrainingRules(fsdp, tensor, **rules))

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return f"{self.mesh.size} {self.mesh.devices.flat[0].platform} ({axes})"

    @property
    def batch(self) -> int:
        """Parts of a batch."""
        return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Sharding of batch arrays [A, B, ...]."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH))

    def shard(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Of one tensor, by its dotted name."""
        return NamedSharding(self.mesh, self.rules.parameter(name, shape))

    def shardings(self, tree: Any) -> Any:
        """By the rules, of a state's or a model's leaves."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.rules.parameters(tree))

    def put(self, tree: Any) -> Any:
        """Explicit transfer of a state or a model to where the rules want it. One array that occurs twice stays one
        array."""
        placed: dict[int, Any] = {}

        def one(leaf: Any, sharding: NamedSharding) -> Any:
            if id(leaf) not in placed:
                placed[id(leaf)] = _place(leaf, sharding)
            return placed[id(leaf)]

        return jax.tree.map(one, tree, self.shardings(tree))

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Explicit transfer of a host batch. Every process of a pod reads the whole batch and keeps its devices'
        share."""
        if self.rows.is_fully_addressable:
            return jax.device_put(batch, self.rows)
        with jax.transfer_guard_host_to_device("allow"):  # this is the explicit transfer, made of pieces
            return {name: _pieces(array, self.rows) for name, array in batch.items()}


def _place(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # on the devices of all processes already
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.random.wrap_key_data(_place(jax.random.key_data(leaf), words), impl=jax.random.key_impl(leaf))
    return _pieces(np.asarray(leaf), sharding)


def _pieces(whole: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Each process puts what its devices hold."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def choose(mesh: TrainMeshSection, batch_size: int, devices: Sequence[Any]) -> Placement:
    """The mesh that a config asks for on `devices`; `mesh.data` 0 takes as many as there are and divide the batch.

    Raises ConfigError naming the key that does not fit.
    """
    shards, found = mesh.fsdp * mesh.tensor, len(devices)
    if shards > found:
        expected = f"at most {found} devices, what there is"
        raise ConfigError(problem("mesh.fsdp x mesh.tensor", f"{mesh.fsdp} x {mesh.tensor}", expected))
    if batch_size % mesh.fsdp:
        expected = f"a divisor of optimizer.batch_size {batch_size}, since the batch is split over it too"
        raise ConfigError(problem("mesh.fsdp", mesh.fsdp, expected))
    each = batch_size // mesh.fsdp
    data = mesh.data or max(n for n in range(1, found // shards + 1) if each % n == 0)
    if data * shards > found:
        expected = f"at most {found // shards} of the {found} devices"
        raise ConfigError(problem("mesh.data", data, expected))
    if each % data:
        expected = f"a divisor of optimizer.batch_size / mesh.fsdp = {each}"
        raise ConfigError(problem("mesh.data", data, expected))
    return Placement.of(devices[: data * shards], mesh.fsdp, mesh.tensor)


def create(params: Any, optimizer: optax.GradientTransformation, key: jax.Array, average: bool = False) -> TrainState:
    """State before the first step. Masters are float32 whatever dtype `params` have (integers and flags stay as they
    are and have no moments), and always copies: the step donates them, and the caller's arrays must outlive that. With
    `average` the state carries one of the parameters, which begins as a copy of them."""

    def master(leaf: Any) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.array(leaf, jnp.float32 if floating else leaf.dtype, copy=True)

    masters = jax.tree.map(master, params)
    step, skipped, nonfinite = (jnp.zeros((), jnp.int32) for _ in range(3))  # one buffer each: all are donated
    moving = split_trainable(masters)[0]
    ema = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), moving) if average else None
    return TrainState(masters, optimizer.init(moving), step, skipped, nonfinite, key, ema)


def abstract(state: Any, sharding: Any = None) -> Any:
    """Shapes, dtypes and shardings of a state or batch, for compiling and for restoring.

    Args:
      sharding: one for every leaf, or a tree of them; None keeps each leaf's own.
    """

    def one(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    if sharding is None:
        return jax.tree.map(lambda leaf: one(leaf, getattr(leaf, "sharding", None)), state)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: one(leaf, sharding), state)
    return jax.tree.map(one, state, sharding)
