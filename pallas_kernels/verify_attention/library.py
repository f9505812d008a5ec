"""jax's own ragged paged attention for TPU, with the tiles of verify shapes: causal masks and static windows only."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Float

from pallas_kernels.tuning import tiles as tuned
from pallas_kernels.verify_attention.rows import Scalar, VerifyRows
from pallas_kernels.verify_attention.tpu import VMEM_LIMIT


def why_not(
    pool: Float[Array, "pages page combined D"], mask: str, window: Scalar, inner_window: Scalar | None
) -> str | None:
    """What the library's kernel lacks for these arguments, or None."""
    pairs, odd = divmod(pool.shape[2] * pool.dtype.itemsize, 4)
    if mask != "causal":
        return f"mask: found {mask!r}, expected causal"
    if not isinstance(window, int) or (inner_window is not None and inner_window is not window):
        return "window: expected one static number"
    if odd or not (pairs in (1, 2, 4, 8) or pairs % 8 == 0):
        return f"pool: {pool.shape[2] // 2} K/V heads of {pool.dtype} do not fill its tiles"
    if pool.shape[3] % 128:
        return f"head_dim: found {pool.shape[3]}, expected a multiple of 128"
    return None


def verify_attention(
    q: Float[Array, "M heads D"],
    k: Float[Array, "M kv D"],
    v: Float[Array, "M kv D"],
    pool: Float[Array, "pages page combined D"],
    rows: VerifyRows,
    mask: str = "causal",
    window: Scalar = 0,
    inner_window: Scalar | None = None,
) -> Float[Array, "M heads D"]:
    """See `reference.verify_attention`; the own rows must have been written to the pool, at slots `first` + offset.

    Raises ValueError for what the library cannot do (`why_not`).
    """
    reason = why_not(pool, mask, window, inner_window)
    if reason is not None:
        raise ValueError(reason)
    _, page, combined, dim = pool.shape
    per_request = rows.page_table.shape[1]
    key = f"library {pool.dtype} rows={rows.max_rows} page={page} kv={combined // 2} dim={dim}"
    # a block of queries spans requests, and each request computes with all of it: small blocks waste least
    guess = {"queries": 16 if rows.max_rows <= 17 else 64, "pages": max(1, 512 // page)}
    sizes = tuned("verify_attention", key, guess)
    # The library wants segments without gaps, and no empty one before a full one.
    order = jnp.argsort(rows.lengths == 0, stable=True)
    ends = jnp.cumsum(rows.lengths[order])
    place = (ends - rows.lengths[order])[jnp.argsort(order)][rows.requests] + rows.offsets()
    owned = (rows.offsets() >= 0) & (rows.offsets() < rows.lengths[rows.requests])
    total = q.shape[0]
    source = jnp.zeros(total + 1, jnp.int32).at[jnp.where(owned, place, total)].set(jnp.arange(total))[:total]
    out = ragged_paged_attention(
        q[source],
        pool,
        (rows.first + rows.lengths)[order].astype(jnp.int32),
        rows.page_table[order].astype(jnp.int32),
        jnp.concatenate([jnp.zeros(1, jnp.int32), ends.astype(jnp.int32)]),
        jnp.sum(rows.lengths > 0, dtype=jnp.int32)[None],
        sm_scale=dim**-0.5,
        sliding_window=window or None,
        num_kv_pages_per_block=min(per_request, sizes["pages"]),
        num_queries_per_block=min(total, sizes["queries"]),
        vmem_limit_bytes=VMEM_LIMIT,
    )
    return jnp.where(owned[:, None, None], out[jnp.clip(place, 0, total - 1)], 0)
