"""How a training run is split over its mesh.

Mesh axes: `data` and `fsdp` split the batch, `fsdp` also the parameters and moments, `tensor` the heads, the MLP's
width and the vocabulary. The rules only say where arrays lie: what is computed does not depend on them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxspec.parallel.rules import DATA, TENSOR, dotted, logical_axes

FSDP = "fsdp"
BATCH = (DATA, FSDP)


@dataclasses.dataclass(frozen=True)
class TrainingRules:
    """`fsdp` and `tensor` are the sizes of those axes. A dimension that they do not divide stays whole, and so does a
    parameter of fewer than `small` elements, whose messages would cost more than its memory."""

    fsdp: int = 1
    tensor: int = 1
    small: int = 1 << 14

    def parameter(self, name: str, shape: Sequence[int]) -> PartitionSpec:
        """Of the tensor of a dotted name (a moment's name ends in its parameter's), layers stacked or not: its head,
        MLP or vocabulary axis over `tensor`, the longest other axis over `fsdp`."""
        if len(shape) < 2 or math.prod(shape) < self.small:
            return PartitionSpec()
        known = logical_axes(name) or ()
        axes: list[str | None] = [None] * (len(shape) - len(known))
        axes += [TENSOR if axis and self.tensor > 1 else None for axis in known]
        axes = [axis if size % self.tensor == 0 else None for axis, size in zip(axes, shape, strict=True)]
        free = [index for index in range(max(len(shape) - 2, 0), len(shape)) if axes[index] is None]
        free = [index for index in free if shape[index] % self.fsdp == 0]
        if free and self.fsdp > 1:
            axes[max(free, key=lambda index: shape[index])] = FSDP
        return PartitionSpec(*axes)

    def parameters(self, tree: Any) -> Any:
        """A PartitionSpec for each leaf; typed keys and counters are whole."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.parameter(dotted(path), leaf.shape), tree)


def apart(x: jax.Array) -> jax.Array:
    """[batch_shards(), …]: each device that shares the batch holds its own part (of another length: as it is). A sum
    over them that a loop goes on with stays theirs until the loop is over; left to the compiler they would add up in
    each of its turns."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH if axis in mesh.axis_names)
    if batch_shards() == 1 or x.shape[0] != batch_shards():
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)))


def batch_shards() -> int:
    """Devices that share the batch in the program that is being traced; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in BATCH if axis in mesh.axis_names)
