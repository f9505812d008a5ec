"""Plain reference of the context projection, the chain of roundings of the drafters' own modules."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.context_kv.rows import ContextRows, LayerWeights
from pallas_kernels.pages import write


def context_kv(
    features: Float[Array, "M F"],
    fc: Float[Array, "H F"],
    hidden_norm: Float[Array, "H"],
    layers: Sequence[LayerWeights],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    pools: Sequence[Float[Array, "pages page combined D"]],
    rows: ContextRows,
    eps: float = 1e-6,
) -> list[Array]:
    """c = norm(fc features), computed once; K = rotate(k_norm(k_proj c)), V = v_proj c of every layer, written to its
    pool at the rows' places. Norms and rotation in float32, products rounded to the weights' dtype, as the drafters
    do; cos and sin of the rows' positions in float32."""
    page, offset = rows.places(pools[0].shape[1])
    context = rms_norm(project(features.astype(fc.dtype), fc), hidden_norm, eps)
    written = []
    for layer, pool in zip(layers, pools, strict=True):
        shape = (features.shape[0], pool.shape[2] // 2, pool.shape[3])
        keys = project(context, layer.k_proj).reshape(shape)
        values = project(context, layer.v_proj).reshape(shape)
        if layer.k_norm is not None:
            keys = rms_norm(keys, layer.k_norm, eps)
        keys = rotate(keys, cos, sin)
        both = jnp.stack([keys, values], axis=2).reshape(features.shape[0], -1, shape[2])
        written.append(write(pool, page, offset, both))
    return written


def project(x: Float[Array, "M inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "M outputs"]:
    """x W^T in x's dtype."""
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((1,), (1,)), ((), ())))


def rms_norm(x: Float[Array, "*rows size"], weight: Float[Array, "size"], eps: float) -> Float[Array, "*rows size"]:
    """Root-mean-square norm in float32, scaled in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def rotate(
    x: Float[Array, "M kv D"], cos: Float[Array, "M half"], sin: Float[Array, "M half"]
) -> Float[Array, "M kv D"]:
    """Rotate-half position embedding in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
