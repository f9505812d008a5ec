"""Paged K/V: what is written where, what is never read, and that paging changes no number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.attention import DenseCausal, PagedCausal
from jaxspec.models.cache import TRASH_PAGE, gather, init_pool, write_rows
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layout import RaggedLayout, keep_rows, ragged_layout, uniform_layout
from tests.helpers.scatters import assert_apart, scatters
from tests.models.numpy_decoder import random_weights

PAGE, KV, DIM = 4, 2, 6
POISON = [np.nan, np.inf, 1e30]


def ragged(firsts, lengths, table, capacity, bad=0, order=None):
    """Segments of different length behind one another, then padding rows whose every field is `bad`."""
    order = range(len(firsts)) if order is None else order
    starts, rows = [0] * len(firsts), []
    for request in order:
        starts[request] = len(rows)
        rows += [(request, firsts[request] + i, i) for i in range(lengths[request])]
    count = len(rows)
    assert count <= capacity
    rows += [(bad, bad, 0)] * (capacity - count)
    requests, positions, offset = (np.array(column) for column in zip(*rows, strict=True))
    return RaggedLayout(
        starts=jnp.asarray(starts, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slots=jnp.asarray(positions, jnp.int32),
        parents=jnp.asarray(np.where(offset == 0, -1, np.arange(capacity) - 1), jnp.int32),
        requests=jnp.asarray(requests, jnp.int32),
        valid=jnp.arange(capacity) < count,
        page_table=table,
        max_rows=max([*lengths, 1]),
    )


def shuffled_table(requests, pages, seed=0):
    return jnp.asarray(
        1 + np.random.default_rng(seed).permutation(requests * pages).reshape(requests, pages), jnp.int32
    )


def numbered_pool(pages):
    size = pages * PAGE * 2 * KV * DIM
    return jnp.arange(1, size + 1, dtype=jnp.float32).reshape(pages, PAGE, 2 * KV, DIM)


def new_rows(count, seed=9):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(-1 - rng.random(size=(count, KV, DIM)), jnp.float32) for _ in range(2)]


def test_a_round_is_laid_out_without_a_loop():
    """A loop on a GPU is a launch for each of its steps, and ends the graph around it."""
    table = jnp.zeros((3, 2), jnp.int32)
    made = str(
        jax.make_jaxpr(lambda first, lengths: ragged_layout(first, lengths, table, 9, 4))(*jnp.zeros((2, 3), int))
    )
    assert "cumsum" in made and "while[" not in made and "scan[" not in made


@pytest.mark.parametrize("bad", [0, -1, 2])
def test_B62_padding_rows_touch_only_the_trash_page(bad):
    """-1 as request, position and slot of a padding row must not wrap to the last request, page or offset."""
    table = shuffled_table(3, 2)
    firsts, lengths = [1, 6, 3], [2, 2, 0]
    layout = ragged(firsts, lengths, table, 9, bad)
    before = numbered_pool(8)  # page 7 belongs to nobody
    keys, values = new_rows(9)
    after = np.asarray(jax.jit(write_rows)(before, keys, values, layout))
    expected = np.array(before)
    row = 0
    for request, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        for slot in range(first, first + length):
            place = expected[table[request, slot // PAGE], slot % PAGE]
            place[0::2], place[1::2] = keys[row], values[row]  # K at even, V at odd combined heads
            row += 1
    np.testing.assert_array_equal(after[TRASH_PAGE + 1 :], expected[TRASH_PAGE + 1 :])


def test_B62_a_layout_of_padding_alone_changes_no_page_but_trash():
    layout = ragged([0, 0], [0, 0], jnp.full((2, 2), -1, jnp.int32), 5, -1)
    before = numbered_pool(4)
    after = write_rows(before, *new_rows(5), layout)
    np.testing.assert_array_equal(after[1:], before[1:])


@pytest.mark.parametrize("bad", [0, -1, 2])
def test_no_row_of_a_write_waits_for_another_one(bad):
    """A GPU writes 16-bit values that may meet by compare-and-swap: padding rows of one index wait in line."""
    layout = ragged([1, 6, 3], [2, 2, 0], shuffled_table(3, 2), 9, bad)
    before = numbered_pool(8).astype(jnp.bfloat16)
    assert_apart(scatters(write_rows, before, *new_rows(9), layout), TRASH_PAGE)


def test_B62_keep_rows_commits_the_first_rows_of_each_segment_only():
    table = shuffled_table(2, 2)
    layout = uniform_layout(jnp.asarray([2, 0]), jnp.asarray([3, 2]), table, 4)
    kept = keep_rows(layout, jnp.asarray([1, 4]))
    assert kept.valid.tolist() == [True, False, False, False, True, True, False, False]
    assert kept.lengths.tolist() == [1, 2]


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_B63_a_write_at_the_very_end_does_not_slide_back(rows):
    """dynamic_update_slice would move a window that crosses the end back over valid rows."""
    table = shuffled_table(2, 2)
    capacity = 2 * PAGE
    before = numbered_pool(5)
    layout = uniform_layout(jnp.asarray([capacity - 1, capacity]), jnp.asarray([1, 0]), table, rows)
    keys, values = new_rows(2 * rows)
    after = jax.jit(write_rows)(before, keys, values, layout)
    expected = np.array(before)
    place = expected[table[0, -1], PAGE - 1]
    place[0::2], place[1::2] = keys[0], values[0]
    np.testing.assert_array_equal(after[1:], expected[1:])


def test_gather_gives_a_request_its_rows_in_order_and_zeros_beyond():
    table = shuffled_table(2, 2)
    pool = numbered_pool(5)
    keys, values = gather(pool, table, jnp.asarray([5, 0]))
    for slot in range(2 * PAGE):
        row = np.asarray(pool[table[0, slot // PAGE], slot % PAGE]) if slot < 5 else np.zeros((2 * KV, DIM))
        np.testing.assert_array_equal(keys[0, slot], row[0::2])
        np.testing.assert_array_equal(values[0, slot], row[1::2])
    np.testing.assert_array_equal(keys[1], 0.0)


ATTEND = jax.jit(lambda q, k, v, pool, layout, window: PagedCausal(layout)(q, k, v, pool, window))

DENSE = jax.jit(lambda q, k, v, lengths, window: DenseCausal(lengths)(q, k, v, None, window)[0])


def run_ragged(seed, fill, window):
    """Three sequences that grow in three ragged steps over one poisoned pool; returns paged and dense outputs."""
    rng = np.random.default_rng(seed)
    requests, pages, heads = 3, 3, 4
    table = shuffled_table(requests, pages, seed)
    totals = [int(n) for n in rng.integers(1, pages * PAGE + 1, requests)]
    q, k, v = (rng.normal(size=(requests, pages * PAGE, n, DIM)).astype(np.float32) for n in (heads, KV, KV))
    pool = jnp.full((1 + requests * pages, PAGE, 2 * KV, DIM), fill, jnp.float32)
    cuts = [sorted(rng.integers(0, total + 1, 2).tolist()) for total in totals]
    bounds = [[0, *cut, total] for cut, total in zip(cuts, totals, strict=True)]
    out = np.full((requests, pages * PAGE, heads, DIM), np.nan)
    for step in range(3):
        firsts = [b[step] for b in bounds]
        lengths = [b[step + 1] - b[step] for b in bounds]
        layout = ragged(firsts, lengths, table, requests * pages * PAGE, order=rng.permutation(requests).tolist())
        rows = [
            (int(r), int(p)) for r, p, ok in zip(layout.requests, layout.positions, layout.valid, strict=True) if ok
        ]
        pick = lambda x, rows=rows, size=len(layout.valid): jnp.asarray(  # noqa: E731
            np.stack([x[r, p] for r, p in rows] + [np.zeros_like(x[0, 0])] * (size - len(rows)))
        )
        layout = RaggedLayout(**{**vars(layout), "max_rows": pages * PAGE})
        mixed, pool = ATTEND(pick(q), pick(k), pick(v), pool, layout, window)
        for index, (request, position) in enumerate(rows):
            out[request, position] = mixed[index]
        np.testing.assert_array_equal(mixed[len(rows) :], 0.0)  # padding rows see nothing
    dense = DENSE(q, k, v, jnp.asarray(totals), window)
    return [(out[r, :total], np.asarray(dense)[r, :total]) for r, total in enumerate(totals)]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_B34_paged_attention_equals_dense_for_random_ragged_layouts(seed, window):
    for paged, dense in run_ragged(seed, 0.0, window):
        np.testing.assert_allclose(paged, dense, atol=2e-6)


@pytest.mark.parametrize("fill", POISON)
def test_B64_no_unwritten_row_is_ever_read_by_the_attention(fill):
    for paged, dense in run_ragged(1, fill, 0) + run_ragged(2, fill, 3):
        np.testing.assert_allclose(paged, dense, atol=2e-6)


HF = {
    "model_type": "qwen3", "vocab_size": 19, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 64,
    "sliding_window": 5, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
PROMPT = np.random.default_rng(4).integers(0, 19, 37)


def chunked(fill, chunk, taps=(0, 1)):
    """Prefill of one request in chunks; features and hidden of every row, and the K/V it left."""
    decoder = Decoder(ModelConfig.from_hf(HF))
    params, pages = random_weights(decoder, 0.4), 10
    table = shuffled_table(1, pages)
    pools = [jnp.full_like(init_pool(1 + pages, PAGE, 1, 6, jnp.float32), fill) for _ in range(2)]

    @jax.jit
    def step(params, pools, tokens, first, count):
        layout = uniform_layout(first[None], count[None], table, chunk)
        out = decoder.forward(params, tokens, layout.positions, PagedCausal(layout), pools, taps)
        return out.hidden, out.features, out.caches

    hidden, features = [], []
    for first in range(0, len(PROMPT), chunk):
        piece = PROMPT[first : first + chunk]
        tokens = jnp.asarray(np.pad(piece, (0, chunk - len(piece))), jnp.int32)
        one, two, pools = step(params, pools, tokens, jnp.int32(first), jnp.int32(len(piece)))
        hidden.append(np.asarray(one)[: len(piece)])
        features.append(np.asarray(two)[: len(piece)])
    kv = [np.concatenate(gather(pool, table, jnp.asarray([len(PROMPT)])), axis=-1)[0, : len(PROMPT)] for pool in pools]
    return decoder, params, np.concatenate(hidden), np.concatenate(features), kv


@pytest.fixture(scope="module")
def whole():
    decoder, params, hidden, features, kv = chunked(0.0, 37)
    dense = jax.jit(lambda p: decoder.forward_sequences(p, jnp.asarray(PROMPT)[None], (0, 1)))(params)
    np.testing.assert_allclose(hidden, dense.hidden[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(features, dense.features[0], atol=1e-5, rtol=1e-5)
    return hidden, features, kv


@pytest.mark.parametrize(("chunk", "fill"), [(1, 0.0), (7, np.nan), (16, 1e30)])
def test_B28_B64_chunked_prefill_equals_one_chunk_over_a_poisoned_cache(whole, chunk, fill):
    _, _, hidden, features, kv = chunked(fill, chunk)
    for one, other in zip((hidden, features, *kv), (whole[0], whole[1], *whole[2]), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6, rtol=1e-5)
