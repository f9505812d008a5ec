"""Masks as ranges, and the tiles that the kernels visit: exact, without running a kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.anchor_attention import tpu
from pallas_kernels.anchor_attention.ranges import (
    FULL,
    PARTIAL,
    SKIPPED,
    block_ranges,
    lookahead_ranges,
    ordered_visits,
    tile_kinds,
)
from pallas_kernels.anchor_attention.reference import block_mask, context_mask

pytestmark = pytest.mark.ci


def inside(lo, hi, size):
    index = np.arange(size)
    return (index >= np.asarray(lo)[..., None]) & (index < np.asarray(hi)[..., None])


@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_the_masks_of_the_reference(seed):
    rng = np.random.default_rng(seed)
    count, block, context = 6, int(rng.integers(1, 9)), int(rng.integers(2, 40))
    anchors = np.sort(rng.integers(0, context, (2, count)), axis=1)
    anchors[:, 0], anchors[0, -1] = 0, context - 1
    anchors[1, 2] = anchors[1, 3]
    keep = rng.random((2, count)) < 0.7
    window, causal = int(rng.choice([0, 1, 3, 64])), bool(rng.integers(2))
    inner = int(rng.choice([0, 1, window]))
    starts = np.minimum(rng.integers(0, context, (2, count)), anchors) if seed % 2 else None
    ranges = block_ranges(jnp.asarray(anchors), keep, block, context, window, causal, inner, starts)
    far = np.asarray(context_mask(anchors, keep, block, context, window, starts))
    np.testing.assert_array_equal(inside(ranges.lo, ranges.hi, context), far.reshape(2, count * block, context))
    near = np.zeros((2, count * block, count * block), bool)
    for b, n in np.argwhere(keep):
        rows = slice(n * block, (n + 1) * block)
        near[b, rows, rows] = block_mask(block, causal, inner)
    np.testing.assert_array_equal(inside(ranges.own_lo, ranges.own_hi, count * block), near)


def test_lookahead_ranges_are_causal_and_diagonal():
    ranges = lookahead_ranges(2, 5, 3, 2, jnp.asarray([5, 3]))
    far = np.stack([np.tril(np.ones((5, 5), bool)), np.tril(np.ones((5, 5), bool)) & (np.arange(5) < 3)])
    np.testing.assert_array_equal(inside(ranges.lo, ranges.hi, 5), far)
    own = inside(ranges.own_lo, ranges.own_hi, 15).reshape(2, 5, 5, 3)
    assert own.sum() == 2 * 5 * 2
    assert all(own[:, t, t, :2].all() for t in range(5))


def brute_kinds(mask, rows, keys):
    batch, r, k = mask.shape
    tiles = mask.reshape(batch, r // rows, rows, k // keys, keys)
    return np.where(tiles.all(axis=(2, 4)), FULL, np.where(tiles.any(axis=(2, 4)), PARTIAL, SKIPPED))


def draw(seed, count=32, block=16, context=512, window=0, keep=1.0):
    rng = np.random.default_rng(seed)
    anchors = jnp.asarray(np.sort(rng.integers(0, context, (2, count)), axis=1))
    return block_ranges(anchors, jnp.asarray(rng.random((2, count)) < keep), block, context, window)


@pytest.mark.parametrize("window", [0, 40, 200])
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.0])
def test_B50_tiles_without_an_allowed_pair_are_skipped_and_full_ones_have_no_other(window, keep):
    ranges = draw(0, window=window, keep=keep)
    kinds = tile_kinds(ranges.lo, ranges.hi, 64, 128, 512)
    expected = brute_kinds(inside(ranges.lo, ranges.hi, 512), 64, 128)
    np.testing.assert_array_equal(kinds, expected)
    ids, counts = map(np.asarray, ordered_visits(kinds))
    for b, t in np.ndindex(expected.shape[:2]):
        full, total = counts[b, t]
        assert sorted(ids[b, t, :full]) == np.flatnonzero(expected[b, t] == FULL).tolist()
        assert sorted(ids[b, t, full:total]) == np.flatnonzero(expected[b, t] == PARTIAL).tolist()


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (0, 128, [FULL, SKIPPED, SKIPPED]),
        (0, 129, [FULL, PARTIAL, SKIPPED]),
        (1, 128, [PARTIAL, SKIPPED, SKIPPED]),
        (127, 128, [PARTIAL, SKIPPED, SKIPPED]),
        (128, 256, [SKIPPED, FULL, SKIPPED]),
        (128, 383, [SKIPPED, FULL, PARTIAL]),
        (0, 0, [SKIPPED, SKIPPED, SKIPPED]),
    ],
)
def test_B50_a_range_that_starts_or_ends_at_a_tiles_edge_touches_no_further_tile(lo, hi, expected):
    rows = jnp.full((1, 64), lo), jnp.full((1, 64), hi)
    assert tile_kinds(*rows, 64, 128, 384).tolist() == [[expected]]


@pytest.mark.parametrize("seed", range(4))
def test_visited_tiles_are_those_with_an_allowed_pair(seed):
    """At most 1.15 times as many is what is asked; the lists hold exactly them."""
    ranges = draw(seed, keep=0.9)
    far = tile_kinds(ranges.lo, ranges.hi, 128, 128, 512)
    near = tile_kinds(ranges.own_lo, ranges.own_hi, 128, 128, 512)
    needed = (far != SKIPPED).sum() + (near != SKIPPED).sum()
    visits = tpu.row_visits(far, near)
    words = np.asarray(visits.word)[: int(visits.count)]
    assert ((words & tpu.KIND) != SKIPPED).sum() == needed
    assert len(words) <= 1.15 * needed
    keys = tpu.key_visits(far)
    words = np.asarray(keys.word)[: int(keys.count)]
    assert ((words & tpu.KIND) != SKIPPED).sum() == (far != SKIPPED).sum()


@pytest.mark.parametrize("keep", [1.0, 0.3, 0.0])
def test_every_output_tile_starts_and_ends_once_even_where_nothing_is_visited(keep):
    ranges = draw(5, keep=keep, window=30)
    far = tile_kinds(ranges.lo, ranges.hi, 64, 64, 512)
    near = tile_kinds(ranges.own_lo, ranges.own_hi, 64, 64, 512)
    for visits, tiles in ((tpu.row_visits(far, near), 16), (tpu.key_visits(far), 16)):
        words = np.asarray(visits.word)[: int(visits.count)]
        for flag in (tpu.FIRST, tpu.LAST):
            assert (words & flag > 0).sum() == tiles
        open_tile = 0
        for word in words:
            open_tile += bool(word & tpu.FIRST)
            assert open_tile == 1
            open_tile -= bool(word & tpu.LAST)


def test_a_visit_that_needs_no_context_keeps_the_tile_that_is_there():
    ranges = draw(3)
    far = tile_kinds(ranges.lo, ranges.hi, 64, 128, 512)
    near = tile_kinds(ranges.own_lo, ranges.own_hi, 64, 128, 512)
    visits = tpu.row_visits(far, near)
    count = int(visits.count)
    own = (np.asarray(visits.word)[:count] & tpu.OWN) > 0
    for tiles, idle in ((visits.context, own), (visits.own, ~own)):
        moved = np.diff(np.asarray(tiles)[:count], prepend=0) != 0
        assert not moved[idle].any()
