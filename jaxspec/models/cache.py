"""Paged K/V pools: [pages, page, 2 x kv heads, head_dim], K at even and V at odd combined heads, page 0 = trash."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.layout import RaggedLayout
from jaxspec.parallel.rules import heads_apart
from pallas_kernels.pages import TRASH_PAGE, write

KVPool = Float[Array, "pages page combined dim"]


def init_pool(num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVPool:
    """An empty pool. `num_pages` counts the trash page."""
    return jnp.zeros((num_pages, page_size, 2 * kv_heads, head_dim), dtype)


def write_rows(
    pool: KVPool, keys: Float[Array, "M kv dim"], values: Float[Array, "M kv dim"], layout: RaggedLayout
) -> KVPool:
    """Writes each valid row at its cache slot; padding rows land in the trash page with an in-range index.

    A negative index would wrap even under mode="drop", so padding is redirected instead of dropped. No two valid rows
    may have one place (`pallas_kernels.pages.write`): a request's rows have slots of their own, and a page that is
    written has one owner.
    """
    page, offset = places(layout, pool.shape[1])
    heads = keys.shape[1]
    rows = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, keys.shape[-1])
    return heads_apart(write(pool, page, offset, heads_apart(rows.astype(pool.dtype), heads)), heads)


def places(layout: RaggedLayout, page_size: int) -> tuple[Int[Array, "M"], Int[Array, "M"]]:
    """(page, row of the page) that each row is written to; the trash page's first for padding."""
    table = layout.page_table[layout.requests, layout.slots // page_size]
    page = jnp.where(layout.valid, table, TRASH_PAGE)
    return page, jnp.where(layout.valid, layout.slots % page_size, 0)


def gather(
    pool: KVPool, page_table: Int[Array, "R P"], lengths: Int[Array, "R"]
) -> tuple[Float[Array, "R L kv dim"], Float[Array, "R L kv dim"]]:
    """`gather_known` of the first `lengths` rows of each request."""
    rows = page_table.shape[1] * pool.shape[1]
    return gather_known(pool, page_table, jnp.arange(rows) < lengths[:, None])


def gather_known(
    pool: KVPool, page_table: Int[Array, "R P"], known: Bool[Array, "R L"]
) -> tuple[Float[Array, "R L kv dim"], Float[Array, "R L kv dim"]]:
    """K and V of each request, L = P x page rows, zero where not `known`: unwritten rows may hold anything, NaN
    included, and a masked score times a NaN value would still be NaN."""
    rows = pool[page_table].reshape(page_table.shape[0], -1, *pool.shape[2:])
    rows = jnp.where(known[:, :, None, None], rows, 0)
    return rows[:, :, 0::2], rows[:, :, 1::2]


def read_rows(
    pool: KVPool, page_table: Int[Array, "R P"], slots: Int[Array, "R n"]
) -> tuple[Float[Array, "R n kv dim"], Float[Array, "R n kv dim"]]:
    """K and V of single cache slots of each request."""
    page_size = pool.shape[1]
    rows = pool[jnp.take_along_axis(page_table, slots // page_size, axis=1), slots % page_size]
    return rows[:, :, 0::2], rows[:, :, 1::2]
