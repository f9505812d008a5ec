"""int8 weights of a target, through qwix: the matrices of its layers, one scale a row (an output channel).

Embedding and head keep their dtype, since the drafter reads them; norms and biases are vectors. Activations stay what
they are: a product takes the int8 values as they are stored and its result is scaled, so that no dequantised copy of a
matrix is made.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

if TYPE_CHECKING:  # importing it takes a second, and few targets are quantised
    from qwix import QArray

_LAYER_MATRIX = re.compile(r"model\.layers\.\d+\..*proj\.weight")


def is_quantised(name: str) -> bool:
    """Whether `target.quantization` changes the tensor of this name."""
    return _LAYER_MATRIX.fullmatch(name) is not None


def quantise_weight(weight: Float[Array, "outputs inputs"]) -> QArray:
    """Symmetric int8 with a float32 scale a row. Takes an abstract weight too."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.eval_shape(_rows(), weight)
    return _rows()(weight)


@functools.cache
def _rows() -> Any:
    import qwix

    return jax.jit(lambda weight: qwix.quantize(weight.astype(jnp.float32), jnp.int8, channelwise_axes=(0,)))


def quantised_product(x: Float[Array, "*rows inputs"], weight: QArray) -> Float[Array, "*rows outputs"]:
    """x W^T in x's dtype, summed and scaled in float32. int8 values are exact in bfloat16 and above."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(x, weight.qvalue.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    return (sums * weight.scale[:, 0].astype(jnp.float32)).astype(x.dtype)


def tree_bytes(params: Any) -> int:
    """Bytes of a tree's arrays, each counted once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
