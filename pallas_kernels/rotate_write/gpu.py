"""Triton kernel of the joined norm, rotation and page write: a program a row and head, halves in two registers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # traced and lowered once for all layers
def rotate_write(
    heads: Float[Array, "M all D"],
    norm: Float[Array, "rotated D"] | None,
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    page: Int[Array, "M"],
    offset: Int[Array, "M"],
    pool: Float[Array, "pages page combined D"],
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "M heads D"], Float[Array, "M kv D"], Float[Array, "M kv D"], Float[Array, "pages page c D"]]:
    """See `reference.rotate_write`. The pool is updated in place where the caller donates it; a row of page 0 is not
    written at all."""
    rows, total, dim = heads.shape
    kv, half = pool.shape[2] // 2, dim // 2
    queries = total - 2 * kv
    lanes = 1 << (half - 1).bit_length()

    def kernel(*refs: Any) -> None:
        heads, cos, sin, page, offset, *scale, _, q, k, v, pool = refs
        row, head, column = pl.program_id(0), pl.program_id(1), jnp.arange(lanes)
        inside = column < half
        spin = head < queries + kv
        raw = [plt.load(heads.at[row, head, at], mask=inside, other=0) for at in (column, column + half)]
        x = [part.astype(jnp.float32) for part in raw]
        if scale:
            scale_row = jnp.minimum(head, queries + kv - 1)
            inverse = jax.lax.rsqrt((jnp.sum(x[0] * x[0]) + jnp.sum(x[1] * x[1])) / dim + eps)
            parts = [
                plt.load(scale[0].at[scale_row, at], mask=inside, other=0).astype(heads.dtype)
                for at in (column, column + half)
            ]
            # rounded where the plain form rounds: the quotient, then the product
            x = [((a * inverse).astype(heads.dtype) * b).astype(jnp.float32) for a, b in zip(x, parts, strict=True)]
        c, s = (plt.load(table.at[row, column], mask=inside, other=0) for table in (cos, sin))
        turned = [(x[0] * c - x[1] * s).astype(heads.dtype), (x[1] * c + x[0] * s).astype(heads.dtype)]
        out = [jnp.where(spin, a, b) for a, b in zip(turned, raw, strict=True)]
        is_query, is_value = head < queries, head >= queries + kv
        own = jnp.clip(jnp.where(is_value, head - queries - kv, head - queries), 0, kv - 1)
        where = page[row]
        for at, value in zip((column, column + half), out, strict=True):
            plt.store(q.at[row, jnp.minimum(head, queries - 1), at], value, mask=inside & is_query)
            plt.store(k.at[row, own, at], value, mask=inside & ~is_query & ~is_value)
            plt.store(v.at[row, own, at], value, mask=inside & is_value)
            target = pool.at[where, offset[row], 2 * own + is_value.astype(jnp.int32), at]
            plt.store(target, value.astype(pool.dtype), mask=inside & ~is_query & (where > 0))

    operands = [heads, cos, sin, page.astype(jnp.int32), offset.astype(jnp.int32), *([] if norm is None else [norm])]
    shape = lambda count: jax.ShapeDtypeStruct((rows, count, dim), heads.dtype)  # noqa: E731
    return pl.pallas_call(
        kernel,
        grid=(rows, total),
        in_specs=[pl.no_block_spec] * (len(operands) + 1),
        out_specs=[pl.no_block_spec] * 4,
        out_shape=[shape(queries), shape(kv), shape(kv), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(operands): 3},
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=interpret,
        name="rotate_write",
    )(*operands, pool)
