"""Plain reference of the joined norm, rotation and page write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import write


def rotate_write(
    heads: Float[Array, "M all D"],
    norm: Float[Array, "rotated D"] | None,
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    page: Int[Array, "M"],
    offset: Int[Array, "M"],
    pool: Float[Array, "pages page combined D"],
    eps: float,
) -> tuple[Float[Array, "M heads D"], Float[Array, "M kv D"], Float[Array, "M kv D"], Float[Array, "pages page c D"]]:
    """(q, k, v, pool). `heads` are the query heads, then K's, then V's, as one product gave them; q and k are divided
    by their root mean square (float32) and scaled by their rows of `norm`, where there is one, then rotated (halves,
    float32). K goes to the even and V to the odd combined heads of row `offset` of `page`; page 0 is trash, and holds
    anything. No two rows of other pages have one place."""
    rotated = heads.shape[1] - pool.shape[2] // 2
    x, v = heads[:, :rotated], heads[:, rotated:]
    if norm is not None:
        wide = x.astype(jnp.float32)
        x = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)
        x = x * norm.astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    x = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)
    q, k = x[:, : rotated - v.shape[1]], x[:, rotated - v.shape[1] :]
    rows = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[-1])
    return q, k, v, write(pool, page, offset, rows)
