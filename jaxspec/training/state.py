"""What a training step carries from one step to the next, and where it lives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.models.layers import split_trainable

__all__ = ["Placement", "TrainState", "abstract", "create"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 masters; opt_state: moments; step, skipped, nonfinite: int32 counters of optimizer steps (all
    of them; without a supervised token; with a gradient that was no number); key: typed PRNG key of the run, never
    advanced: each use folds in what it is for."""

    params: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    nonfinite: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays live: the state on every device, a batch split over `data` by its second axis (rows of a
    micro-batch)."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: Any = None) -> Placement:
        """A one-axis mesh over `devices`; the default device when None."""
        devices = jax.devices()[:1] if devices is None else devices
        return cls(Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,)))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of state, target and shared arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Sharding of batch arrays [A, B, ...]."""
        return NamedSharding(self.mesh, PartitionSpec(None, "data"))

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Explicit transfer of a host batch."""
        return jax.device_put(batch, self.rows)


def create(params: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """State before the first step. Masters are float32 whatever dtype `params` have (integers and flags stay as they
    are and have no moments), and always copies: the step donates them, and the caller's arrays must outlive that."""

    def master(leaf: Any) -> jax.Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.array(leaf, jnp.float32 if floating else leaf.dtype, copy=True)

    masters = jax.tree.map(master, params)
    step, skipped, nonfinite = (jnp.zeros((), jnp.int32) for _ in range(3))  # one buffer each: all are donated
    return TrainState(masters, optimizer.init(split_trainable(masters)[0]), step, skipped, nonfinite, key)


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
