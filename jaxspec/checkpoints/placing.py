"""Tensors from a folder to their devices, one shard after the other.

The host holds one shard of one tensor at a time: each is read from the file (mapped, so that only the shard's own bytes
are touched), cast, put on its device, and let go of once it is there. A transfer is waited for, since one that is still
going keeps its bytes on the host and a hundred of them would be the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxspec.checkpoints.store import TensorFolder

__all__ = ["Shardings", "layer_groups", "place", "same_values", "stack"]

Shardings = Callable[[str, tuple[int, ...]], Sharding]
Read = Callable[[tuple[slice, ...]], np.ndarray]


def place(read: Read, shape: tuple[int, ...], sharding: Sharding | None) -> jax.Array:
    """One tensor on its devices.

    Args:
      read: a part of it, by one slice an axis, as a fresh array in its final dtype.
      sharding: the default device when None.
    """
    if sharding is None:
        leaf = jax.device_put(read(tuple(slice(0, size) for size in shape)))
    else:
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices that hold the same part read it once

        def part(index: tuple[slice, ...]) -> np.ndarray:
            bounds = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
            if bounds not in parts:
                parts[bounds] = read(tuple(slice(*pair) for pair in bounds))
            return parts[bounds]

        leaf = jax.make_array_from_callback(shape, sharding, part)
    return leaf.block_until_ready()


def stack(layers: list[Any]) -> Any:
    """The leaves of equal trees, one a layer, stacked on their devices (leading axis L); the layers' own buffers are
    freed as soon as the caller lets go of them."""

    def one(*leaves: jax.Array) -> jax.Array:
        sharding = leaves[0].sharding
        if not isinstance(sharding, NamedSharding):
            return jnp.stack(leaves)
        whole = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jax.jit(lambda *parts: jnp.stack(parts), out_shardings=whole)(*leaves)

    return jax.block_until_ready(jax.tree.map(one, *layers))


def same_values(folder: TensorFolder, one: str, other: str) -> bool:
    """Whether two tensors hold the same bytes, compared piece by piece."""
    first, second = folder.bytes_of(one), folder.bytes_of(other)
    if folder.dtype(one) != folder.dtype(other) or first.shape != second.shape:
        return False
    step = 1 << 24
    return all(np.array_equal(first[at : at + step], second[at : at + step]) for at in range(0, first.size, step))


def layer_groups(names: Mapping[str, Any], layers: str = "model.layers.") -> dict[str, list[str]]:
    """The names of the layers' tensors by what follows the layer's number, in the order of the layers."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if name.startswith(layers):
            number, _, rest = name.removeprefix(layers).partition(".")
            groups.setdefault(rest, []).append((int(number), name))
    return {rest: [name for _, name in sorted(found)] for rest, found in groups.items()}
