"""The host's many small arrays as one: a transfer and a launch argument instead of dozens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

_WORDS = {np.dtype(name): name for name in ("bool", "int32", "uint32", "float32")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcel:
    """A pytree's leaves, one behind the other as 32-bit words; what it was is static, so one form is one program."""

    words: UInt32[Array, "n"]
    tree: Any = dataclasses.field(metadata={"static": True})
    leaves: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})  # shape, dtype

    @classmethod
    def pack(cls, tree: Any) -> Parcel:
        """Of host arrays. Raises TypeError for a dtype that is no 32-bit word and no flag."""
        found, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in found]
        for array in arrays:
            if array.dtype not in _WORDS:
                raise TypeError(f"dtype: found {array.dtype}, expected one of {', '.join(_WORDS.values())}")
        words = [(x.astype(np.uint32) if x.dtype == bool else x.view(np.uint32)).reshape(-1) for x in arrays]
        packed: Any = np.concatenate([np.zeros(0, np.uint32), *words])
        return cls(packed, structure, tuple((x.shape, _WORDS[x.dtype]) for x in arrays))

    def open(self) -> Any:
        """The pytree, inside a compiled program."""
        found, at = [], 0
        for shape, dtype in self.leaves:
            end = at + math.prod(shape)
            part = self.words[at:end].reshape(shape)
            found.append(part != 0 if dtype == "bool" else jax.lax.bitcast_convert_type(part, jnp.dtype(dtype)))
            at = end
        return jax.tree.unflatten(self.tree, found)
