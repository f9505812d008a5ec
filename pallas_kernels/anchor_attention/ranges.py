"""Masks of anchor-block attention as two key ranges a row, and the tiles that those ranges touch.

Every mask that the block drafters use is, for one query row, a range [lo, hi) of context rows and a range of its own
block's rows. The kernels know nothing else: windows, packed documents, dropped blocks and causality are only other
numbers. Own ranges count from the first block's first key, so rows of different blocks never share a key.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Scalar = int | bool | Int[Array, ""] | Bool[Array, ""]

SKIPPED, PARTIAL, FULL = 0, 1, 2


class Ranges(NamedTuple):
    """Visible keys of every query row, int32 [B, R] each: context rows lo … hi - 1, own keys own_lo … own_hi - 1. An
    empty range has lo == hi == 0."""

    lo: Int[Array, "B R"]
    hi: Int[Array, "B R"]
    own_lo: Int[Array, "B R"]
    own_hi: Int[Array, "B R"]

    def padded(self, rows: int) -> Ranges:
        """With rows that see nothing behind the last."""
        return Ranges(*(jnp.pad(x, ((0, 0), (0, rows))) for x in self))


def _range(lo: Array, hi: Array, keep: Array) -> tuple[Array, Array]:
    seen = keep & (lo < hi)
    return jnp.where(seen, lo, 0), jnp.where(seen, hi, 0)


def block_ranges(
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    block: int,
    context: int,
    window: Scalar = 0,
    causal: Scalar = False,
    inner_window: Scalar = 0,
    starts: Int[Array, "B N"] | None = None,
) -> Ranges:
    """`reference.context_mask` and `reference.block_mask` as ranges; R = N * block, row j of block n is n * block + j.

    starts: first context row of each block's document (packed sequences); None means 0.
    """
    row = jnp.arange(block)
    alive = jnp.broadcast_to(keep[:, :, None], (*keep.shape, block))
    first = jnp.zeros_like(anchors) if starts is None else starts
    reach = anchors[:, :, None] + row - (window - 1)
    lo = jnp.maximum(first[:, :, None], jnp.where(window == 0, 0, reach))
    hi = jnp.broadcast_to(jnp.minimum(anchors, context)[:, :, None], alive.shape)
    ahead = jnp.where(inner_window == 0, block, row + inner_window)
    before = jnp.where(inner_window == 0, 0, row - inner_window + 1)
    own_lo = jnp.maximum(before, 0)
    own_hi = jnp.minimum(jnp.where(causal, jnp.minimum(row + 1, ahead), ahead), block)
    base = (jnp.arange(keep.shape[1]) * block)[:, None]
    pairs = (*_range(lo, hi, alive), *_range(base + own_lo, base + own_hi, alive))
    return Ranges(*(x.astype(jnp.int32).reshape(keep.shape[0], -1) for x in pairs))


def lookahead_ranges(
    batch: int, rows: int, steps: int, index: Scalar, lengths: Int[Array, "B"] | None = None
) -> Ranges:
    """The training-time test of EAGLE-3 at step `index`: row t sees step-0 keys 0 … t inside its sequence, and the
    first `index` of its own `steps` keys (own key t * steps + i is row t's of step i + 1)."""
    row = jnp.broadcast_to(jnp.arange(rows), (batch, rows))
    end = rows if lengths is None else lengths[:, None]
    alive = jnp.ones_like(row, bool)
    pairs = (*_range(row * 0, jnp.minimum(row + 1, end), alive), *_range(row * steps, row * steps + index, alive))
    return Ranges(*(x.astype(jnp.int32) for x in pairs))


def tile_kinds(
    lo: Int[Array, "B R"], hi: Int[Array, "B R"], rows: int, keys: int, num_keys: int
) -> Int[Array, "B T J"]:
    """What each tile of `rows` x `keys` is: SKIPPED without an allowed pair, FULL when every pair is allowed, else
    PARTIAL. R is a multiple of `rows` and num_keys of `keys`; nothing larger than R x J is formed."""
    batch, count = lo.shape
    lo, hi = (x.reshape(batch, count // rows, rows, 1) for x in (lo, hi))
    first = jnp.arange(num_keys // keys) * keys
    seen = jnp.any((lo < hi) & (lo < first + keys) & (hi > first), axis=2)
    full = jnp.all((lo <= first) & (hi >= first + keys), axis=2)
    return jnp.where(full, FULL, seen.astype(jnp.int32))


def ordered_visits(kinds: Int[Array, "B T J"]) -> tuple[Int[Array, "B T J"], Int[Array, "B T 2"]]:
    """Tiles j to visit for each t, the full ones first, then the partial ones; and how many are full and visited."""
    width = kinds.shape[-1]
    rank = jnp.where(kinds == FULL, 0, jnp.where(kinds == PARTIAL, 1, 2))
    ids = jnp.sort(rank * width + jnp.arange(width), axis=-1) % width
    counts = jnp.stack([jnp.sum(kinds == FULL, axis=-1), jnp.sum(kinds != SKIPPED, axis=-1)], axis=-1)
    return ids.astype(jnp.int32), counts.astype(jnp.int32)
