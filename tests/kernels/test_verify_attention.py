"""Verify attention: every implementation against loops over single rows, at ragged layouts with poisoned caches."""

from __future__ import annotations

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from jaxspec.decoding.trees import tree_layout
from jaxspec.drafters.base import Tree
from jaxspec.models.attention import PagedCausal
from jaxspec.models.layout import uniform_layout
from pallas_kernels import tuning
from pallas_kernels.verify_attention import api, gpu, library, tpu
from pallas_kernels.verify_attention.rows import VerifyRows, pack_bits, unpack_bits
from tests.helpers.kernels import assert_close, interpreted

pytestmark = pytest.mark.ci

# (requests, rows, kv heads, group, head dim, page, pages a request): none is a multiple of a tile
SHAPES = {"verify": (3, 7, 2, 2, 64, 4, 6), "wide": (2, 17, 1, 3, 128, 16, 3), "long": (1, 35, 1, 1, 20, 8, 9),
          "library": (3, 7, 2, 2, 128, 16, 3)}  # fmt: skip
OURS = ("reference", "tpu", "gpu")


def draw(seed, shape="verify", dtype=np.float32, poison=np.nan, **given):
    """Operands of a random ragged layout: gaps between segments, empty segments, and unwritten slots that hold
    `poison`."""
    requests, count, kv, group, dim, page, pages = SHAPES[shape] if isinstance(shape, str) else shape
    rng = np.random.default_rng(seed)
    lengths = given.get("lengths", rng.integers(0, count + 1, requests))
    first = given.get("first", rng.integers(0, page * pages - count + 1, requests))
    gaps = rng.integers(0, 3, requests)
    starts = np.cumsum(gaps + np.concatenate([[0], np.asarray(lengths)[:-1]]))
    total = requests * (count + 2)
    owner = np.zeros(total, np.int64)
    owned = np.zeros(total, bool)
    for r in range(requests):
        owner[starts[r] : starts[r] + lengths[r]] = r
        owned[starts[r] : starts[r] + lengths[r]] = True
    table = 1 + rng.permutation(requests * pages).reshape(requests, pages)
    pool = rng.normal(size=(1 + requests * pages, page, 2 * kv, dim))
    pool[0] = poison
    for r in range(requests):
        for slot in range(first[r], page * pages):
            pool[table[r, slot // page], slot % page] = poison
    q, k, v = (rng.normal(size=(total, heads, dim)) for heads in (kv * group, kv, kv))
    for x in (q, k, v):
        x[~owned] = poison
    parents = [np.array([-1, *(rng.integers(0, i) for i in range(1, count))]) for _ in range(requests)]
    above, depth = np.zeros((requests, count, count), bool), np.zeros((requests, count), np.int64)
    for r, i in np.ndindex(requests, count):
        if parents[r][i] >= 0:
            above[r, i], depth[r, i] = above[r, parents[r][i]], depth[r, parents[r][i]] + 1
        above[r, i, i] = True
    place = first[:, None] + depth
    positions = np.zeros(total, np.int64)
    for r in range(requests):
        positions[starts[r] : starts[r] + lengths[r]] = place[r, : lengths[r]]
    arrays = [x.astype(dtype) for x in (q, k, v, pool)]
    return arrays, dict(
        starts=starts, lengths=np.asarray(lengths), first=np.asarray(first), requests=owner, table=table,
        positions=positions, above=above, count=count, owned=owned,
    )  # fmt: skip


def rows_of(layout, mask):
    tree = mask == "tree"
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return VerifyRows(
        as_int(layout["starts"]), as_int(layout["lengths"]), as_int(layout["first"]), as_int(layout["requests"]),
        as_int(layout["table"]), layout["count"],
        as_int(layout["positions"]) if tree else None, pack_bits(jnp.asarray(layout["above"])) if tree else None,
    )  # fmt: skip


def oracle(arrays, layout, mask, window, inner):
    """One row at a time, in float64, from the pages that it may see."""
    q, k, v, pool = (np.asarray(x, np.float64) for x in arrays)
    out = np.zeros_like(q)
    page, kv = pool.shape[1], k.shape[1]
    group = q.shape[1] // kv
    for r, (start, length, first) in enumerate(zip(layout["starts"], layout["lengths"], layout["first"], strict=True)):
        for j in range(length):
            tree = mask == "tree"
            at = lambda i, start=start, first=first, tree=tree: layout["positions"][start + i] if tree else first + i  # noqa: E731
            slots = [t for t in range(first) if window == 0 or t > at(j) - window]
            admitted = {"causal": lambda i, j=j: i <= j, "full": lambda i: True,
                        "tree": lambda i, r=r, j=j: layout["above"][r, j, i]}[mask]  # fmt: skip
            mates = [i for i in range(length) if admitted(i) and (inner == 0 or abs(at(j) - at(i)) < inner)]
            for head in range(q.shape[1]):
                pages = [pool[layout["table"][r, t // page], t % page] for t in slots]
                keys = [p[2 * (head // group)] for p in pages] + [k[start + i, head // group] for i in mates]
                values = [p[2 * (head // group) + 1] for p in pages] + [v[start + i, head // group] for i in mates]
                raw = np.array([q[start + j, head] @ key for key in keys]) / np.sqrt(q.shape[2])
                weights = np.exp(raw - raw.max())
                out[start + j, head] = weights @ np.array(values) / weights.sum()
    return out


@functools.cache
def compiled(name, mask):
    options = interpreted(name)
    return jax.jit(
        lambda arrays, rows, window, inner: api.verify_attention(
            *arrays, rows, mask, window, inner, implementation=name, **options
        )
    )


def check(name, arrays, layout, mask, window, inner):
    out = compiled(name, mask)(arrays, rows_of(layout, mask), jnp.int32(window), jnp.int32(inner))
    assert out.dtype == arrays[0].dtype
    assert_close(out, oracle(arrays, layout, mask, window, inner))
    assert not np.asarray(out, np.float32)[~layout["owned"]].any()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("seed", range(6))
def test_B64_trees_over_poisoned_pages_equal_the_oracle(name, seed):
    window = [0, 0, 3, 9, 1, 100][seed]
    arrays, layout = draw(seed, poison=[np.nan, 1e30][seed % 2])
    check(name, arrays, layout, "tree", window, [window, 0][seed % 2])


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [0, 5])
def test_B64_causal_rows_and_bidirectional_blocks_equal_the_oracle(name, mask, window):
    arrays, layout = draw(20 + window)
    check(name, arrays, layout, mask, window, 0 if mask == "full" else window)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("first", [[0, 0, 0], [0, 17, 1], [16, 4, 8]])
def test_B64_empty_contexts_and_whole_pages(name, first):
    """No context at all gives attention among the own rows, never NaN; first = a multiple of the page fills it."""
    arrays, layout = draw(30, lengths=np.array([7, 0, 3]), first=np.array(first))
    check(name, arrays, layout, "tree", 0, 0)


@pytest.mark.parametrize("name", OURS)
def test_B64_rows_that_may_see_nothing_give_zeros(name):
    """No context, and bits that leave out even the row itself."""
    arrays, layout = draw(32, lengths=np.array([7, 2, 0]), first=np.array([0, 5, 0]))
    layout["above"][0, 3:] = False
    out = compiled(name, "tree")(arrays, rows_of(layout, "tree"), jnp.int32(0), jnp.int32(0))
    assert np.isfinite(out).all()
    start = layout["starts"][0]
    assert not np.asarray(out)[start + 3 : start + 7].any()
    assert np.asarray(out)[start : start + 3].any(axis=(1, 2)).all()


@pytest.mark.parametrize("name", OURS)
def test_a_batch_without_rows_gives_zeros(name):
    arrays, layout = draw(31, lengths=np.array([0, 0, 0]))
    check(name, arrays, layout, "tree", 0, 0)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("shape", ["wide", "long"])
def test_shapes_that_fill_no_tile(name, shape):
    """17 rows of three query heads; 35 rows take a second word of bits, and 20 is no head dimension of a chip."""
    arrays, layout = draw(40, shape)
    check(name, arrays, layout, "tree", 11, 4)


@pytest.mark.parametrize("name", OURS)
def test_B70_bfloat16(name):
    arrays, layout = draw(41, "wide", jnp.bfloat16)
    check(name, arrays, layout, "tree", 0, 0)


@pytest.mark.parametrize("name", OURS)
def test_B65_operands_that_the_same_program_computes(name):
    arrays, layout = draw(42)
    call = compiled(name, "causal")
    rows = rows_of(layout, "causal")
    inside = jax.jit(lambda xs: call([x * 0.5 for x in xs], rows, jnp.int32(0), jnp.int32(0)))(arrays)
    outside = call([x * np.float32(0.5) for x in arrays], rows, jnp.int32(0), jnp.int32(0))
    assert_close(inside, outside)


def test_B65_the_order_of_the_grid_does_not_matter():
    arrays, layout = draw(43)

    def run(seed):
        params = pltpu.InterpretParams(random_seed=seed, num_cores_or_threads=2, detect_races=True)
        return api.verify_attention(*arrays, rows_of(layout, "causal"), implementation="tpu", interpret=params)

    np.testing.assert_array_equal(run(0), run(1))


@pytest.mark.parametrize("window", [0, 6])
def test_the_library_kernel_is_given_segments_without_gaps(window, monkeypatch):
    """It reads the own rows from the pages."""
    arrays, layout = draw(50 + window, "library", poison=0.0, lengths=np.array([5, 0, 7]))
    _, k, v, pool = arrays
    for r, (start, length, first) in enumerate(zip(layout["starts"], layout["lengths"], layout["first"], strict=True)):
        for i in range(length):
            slot = first + i
            pool[layout["table"][r, slot // 16], slot % 16, 0::2] = k[start + i]
            pool[layout["table"][r, slot // 16], slot % 16, 1::2] = v[start + i]

    def plain(q, pages, *rest, **options):
        """The library's own reference in its kernel's place, which no interpreter runs; it leaves later rows open."""
        for name in ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"):
            assert options.pop(name) > 0
        out = ref_ragged_paged_attention(q, pages, *rest, **options)
        return jnp.full(q.shape, jnp.nan).at[: out.shape[0]].set(out)

    monkeypatch.setattr(library, "ragged_paged_attention", plain)
    out = api.verify_attention(*arrays, rows_of(layout, "causal"), "causal", window, implementation="tpu_library")
    assert_close(out, oracle(arrays, layout, "causal", window, window))
    assert not np.asarray(out)[~layout["owned"]].any()


def test_what_the_library_kernel_lacks_is_named():
    pool = jnp.zeros((2, 16, 6, 128), jnp.bfloat16)
    good = jnp.zeros((2, 16, 16, 128), jnp.bfloat16)
    assert library.why_not(good, "causal", 64, None) is None
    assert "K/V heads" in library.why_not(pool, "causal", 0, None)
    assert "mask" in library.why_not(good, "tree", 0, None)
    assert "window" in library.why_not(good, "causal", jnp.int32(3), None)
    assert "head_dim" in library.why_not(good[..., :64], "causal", 0, None)
    with pytest.raises(ValueError, match="mask: found 'full'"):
        library.verify_attention(good, good, good, good, None, "full")


def test_wrong_arguments_are_named(caplog):
    arrays, layout = draw(0)
    rows = rows_of(layout, "causal")
    with pytest.raises(ValueError, match="'turbo'"):
        api.verify_attention(*arrays, rows, implementation="turbo")
    with pytest.raises(ValueError, match="'diagonal'"):
        api.verify_attention(*arrays, rows, "diagonal")
    with pytest.raises(ValueError, match="expected bit masks"):
        api.verify_attention(*arrays, rows, "tree")
    with pytest.raises(ValueError, match="pool, q, k"):
        api.verify_attention(*arrays[:3], arrays[3][:, :, :2], rows)
    with caplog.at_level(logging.INFO):
        api._chosen.cache_clear()
        for _ in range(2):
            api.verify_attention(*arrays, rows, implementation="auto")
    assert [r.message for r in caplog.records if "auto" in r.message] == [
        "verify_attention: auto chose reference on cpu"
    ]


def test_pairs_split_into_the_even_and_the_odd_row():
    rows = np.random.default_rng(0).normal(size=(4, 8)).astype(jnp.bfloat16)
    words = rows.view(np.uint16).astype(np.uint32)
    low, high = tpu.split_pairs(jnp.asarray(words[0::2] | (words[1::2] << 16)))
    np.testing.assert_array_equal(low, rows[0::2])
    np.testing.assert_array_equal(high, rows[1::2])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_a_target_that_reads_its_pages_in_place_answers_as_the_gathering_one(tree, window, monkeypatch):
    """`PagedCausal` with a kernel: chains of mixed lengths, a request that is not live, and a tree with idle nodes."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, "gpu", functools.partial(gpu.verify_attention, interpret=True))
    rng = np.random.default_rng(7)
    table = jnp.asarray(1 + rng.permutation(12).reshape(3, 4), jnp.int32)
    first, rows = jnp.asarray([9, 0, 3], jnp.int32), 6
    layout = uniform_layout(first, jnp.asarray([6, 0, 2]), table, rows)
    if tree:
        shape = Tree(
            jnp.asarray([[0, 0, 1, 1, 2]] * 3), jnp.asarray([[1, 1, 2, 2, 2]] * 3),
            jnp.asarray([[1, 1, 1, 0, 1], [0] * 5, [1, 0, 1, 1, 0]], bool), max_depth=2,
        )  # fmt: skip
        layout = tree_layout(first, jnp.asarray([True, False, True]), shape, table)
    q, k, v = (jnp.asarray(rng.normal(size=(18, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    pool = jnp.asarray(rng.normal(size=(14, 4, 4, 16)), jnp.float32)
    outputs = [
        jax.jit(lambda *xs, name=name: PagedCausal(xs[4], name)(*xs[:4], window))(q, k, v, pool, layout)
        for name in ("reference", "gpu")
    ]
    assert_close(outputs[1][0], outputs[0][0])
    assert not np.asarray(outputs[1][0])[~np.asarray(layout.valid)].any()
    np.testing.assert_array_equal(outputs[1][1], outputs[0][1])


def test_bits_round_trip():
    seen = np.random.default_rng(0).random((3, 5, 70)) < 0.5
    words = pack_bits(jnp.asarray(seen))
    assert words.shape == (3, 5, 3)
    assert np.asarray(words)[0, 0, 1] == int(
        sum(int(b) << i for i, b in enumerate(seen[0, 0, 32:64])) - (seen[0, 0, 63] << 32)
    )
    np.testing.assert_array_equal(unpack_bits(words, 70), seen)


def test_the_context_is_split_and_merged(monkeypatch):
    """Several shares, some of them empty."""
    monkeypatch.setattr(gpu, "heuristic", lambda *_: {"rows": 3, "tokens": 8, "splits": 4, "warps": 4, "stages": 2})
    tuning._tiles.cache_clear()
    arrays, layout = draw(60)
    with contextlib.ExitStack() as stack:
        stack.callback(tuning._tiles.cache_clear)
        out = api.verify_attention(*arrays, rows_of(layout, "tree"), "tree", 0, 0, implementation="gpu", interpret=True)
    assert_close(out, oracle(arrays, layout, "tree", 0, 0))


def test_an_untuned_chip_warns_once(caplog):
    tuning._tiles.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [tuning.tiles("verify_attention", "a", {"rows": 3}) for _ in range(2)] == [{"rows": 3}] * 2
    assert [r.message for r in caplog.records] == [
        "verify_attention: no tuned tiles for cpu at a, using the heuristic {'rows': 3}"
    ]
