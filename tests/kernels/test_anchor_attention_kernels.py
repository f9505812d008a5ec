"""The TPU kernels in interpret mode (NaN-filled memory, shuffled parallel grid) against the reference."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.anchor_attention import api, reference
from pallas_kernels.anchor_attention.gpu import GpuKernels
from pallas_kernels.anchor_attention.ranged import Keys, ranged_attention
from pallas_kernels.anchor_attention.ranges import block_ranges
from pallas_kernels.anchor_attention.tpu import TpuKernels, TpuTiles
from tests.helpers.marks import REPEATS

pytestmark = pytest.mark.ci

TILES = TpuTiles(rows=128, kv=128, own=128)


def interpreted(seed=0, tiles=TILES):
    return TpuKernels(tiles, pltpu.InterpretParams(uninitialized_memory="nan", random_seed=seed))


def apply(kernels, arrays, anchors, keep, *masks):
    """The kernels where there are any, else the reference."""
    if kernels is None:
        return reference.anchor_attention(*arrays, anchors, keep, *masks)
    q, context_k, context_v, block_k, block_v = arrays
    batch, count, block = q.shape[:3]
    rows = lambda x: x.reshape(batch, count * block, *x.shape[3:])  # noqa: E731
    ranges = block_ranges(anchors, keep, block, context_k.shape[1], *masks)
    keys = Keys(context_k, context_v, rows(block_k), rows(block_v))
    return ranged_attention(kernels, rows(q), keys, ranges)[0].reshape(q.shape)


@functools.partial(jax.jit, static_argnums=0)
def both(kernels, arrays, d_out, anchors, keep, *masks):
    """Output and gradients. The masks are data, so one compilation serves every mask of a shape."""
    out, back = jax.vjp(lambda *xs: apply(kernels, xs, anchors, keep, *masks), *arrays)
    return out, *back(d_out)


def draw(seed, context, count, block, heads, kv, dim, batch=1, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, count, block, heads), (batch, context, kv), (batch, context, kv), (batch, count, block, kv),
        (batch, count, block, kv), (batch, count, block, heads),
    ]  # fmt: skip
    *arrays, d_out = (jnp.asarray(rng.normal(size=(*shape, dim)), dtype) for shape in shapes)
    return arrays, d_out


def agree(got, expected, tolerance):
    for one, other in zip(got, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.isfinite(one).all()
        # operands are unit normals: a gradient that cancels to zero is compared at their scale
        np.testing.assert_allclose(one, other, atol=tolerance * max(np.abs(other).max(), 1.0))


def starts_of(anchors):
    return np.where(anchors >= 100, 100, 0)


# name -> (anchors, keep, window, causal, inner window, packed); N = 8 blocks over 200 context rows
MASKS = {
    "plain": ([3, 40, 77, 128, 129, 150, 190, 199], [1] * 8, 0, False, 0, False),
    "empty-context-and-last": ([0, 0, 0, 1, 127, 128, 198, 199], [1] * 8, 0, False, 0, False),
    "repeated": ([64] * 4 + [150] * 4, [1] * 8, 0, True, 0, False),
    "some-dropped": ([5, 9, 50, 80, 127, 0, 0, 0], [1, 0, 1, 0, 1, 0, 0, 0], 0, False, 0, False),
    "all-dropped": ([0] * 8, [0] * 8, 0, False, 0, False),
    "window": ([0, 2, 30, 100, 128, 140, 180, 199], [1] * 8, 37, True, 0, False),
    "window-of-one": ([0, 2, 30, 100, 128, 140, 180, 199], [1] * 8, 1, True, 1, False),
    "symmetric-inside": ([0, 2, 30, 100, 128, 140, 180, 199], [1] * 8, 3, False, 3, False),
    "packed": ([0, 20, 60, 99, 100, 101, 150, 199], [1] * 8, 0, False, 0, True),
    "packed-window": ([0, 20, 60, 99, 100, 101, 150, 199], [1, 1, 0, 1, 1, 1, 1, 1], 50, False, 50, True),
    "unsorted": ([150, 3, 199, 40, 0, 128, 77, 127], [1, 1, 1, 0, 1, 1, 1, 1], 0, False, 0, False),
}
SHAPE = (200, 8, 7, 4, 2, 64)


def mask_case(name):
    anchors, keep, window, causal, inner, packed = MASKS[name]
    anchors = np.asarray([anchors], np.int32)
    starts = starts_of(anchors) if packed else np.zeros_like(anchors)
    return anchors, np.asarray([keep], bool), window, causal, inner, starts


@pytest.mark.parametrize("name", MASKS)
def test_B64_B65_masks_forward_and_gradients_equal_the_reference(name):
    arrays, d_out = draw(0, *SHAPE)
    case = mask_case(name)
    got, expected = (both(kernels, arrays, d_out, *case) for kernels in (interpreted(), None))
    agree(got, expected, 1e-5)
    dropped = ~case[1]
    for one in (got[0], got[1], got[4], got[5]):
        np.testing.assert_array_equal(np.asarray(one)[dropped], 0.0)
    anchors, seen = case[0], case[1][0]
    unseen = np.arange(SHAPE[0]) >= (anchors[0][seen].max() if seen.any() else 0)
    for one in got[2:4]:
        np.testing.assert_array_equal(np.asarray(one)[0, unseen], 0.0)


SHAPES = {  # context, N, block, heads, kv, dim, batch
    "qwen3-b16": (512, 16, 16, 4, 1, 128, 1),
    "smollm2-b10-odd-group": (259, 5, 10, 3, 1, 64, 2),
    "d80-is-padded": (130, 3, 5, 2, 1, 80, 1),
    "d256-several-row-tiles": (160, 16, 8, 2, 2, 256, 1),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=REPEATS)])
@pytest.mark.parametrize("shape", SHAPES)
def test_B65_shapes_that_are_no_multiples_of_the_tile(shape, dtype):
    context, count, *_, batch = SHAPES[shape]
    arrays, d_out = draw(1, *SHAPES[shape], dtype=dtype)
    kernels, tolerance = interpreted(7), 1e-5 if dtype == "float32" else 2e-2
    for seed in range(2):
        rng = np.random.default_rng(seed)
        anchors = np.sort(rng.integers(0, context, (batch, count)), axis=1).astype(np.int32)
        keep = rng.random((batch, count)) < 0.8
        masks = (int(rng.choice([0, 50])), bool(rng.integers(2)), int(rng.choice([0, 3])), np.zeros_like(anchors))
        got = both(kernels, arrays, d_out, anchors, keep, *masks)
        wide = [x.astype(jnp.float32) for x in arrays]
        agree(got, both(None, wide, d_out.astype(jnp.float32), anchors, keep, *masks), tolerance)


def test_B65_the_order_of_the_parallel_grid_does_not_matter():
    arrays, d_out = draw(2, *SHAPE)
    case = mask_case("plain")
    one, other = (both(interpreted(seed), arrays, d_out, *case) for seed in (1, 2))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_B64_unwritten_context_rows_may_hold_anything(poison):
    arrays, d_out = draw(3, *SHAPE)
    case = mask_case("some-dropped")  # the last visible row is 126
    clean = both(interpreted(), arrays, d_out, *case)
    dirty = [x.at[:, 127:].set(poison) if i in (1, 2) else x for i, x in enumerate(arrays)]
    for a, b in zip(clean, both(interpreted(), dirty, d_out, *case), strict=True):
        np.testing.assert_array_equal(a, b)


def test_B65_operands_computed_in_the_same_program():
    arrays, d_out = draw(4, *SHAPE)
    case = mask_case("packed-window")

    @jax.jit
    def together(arrays, anchors):
        return apply(interpreted(), [x * 0.5 for x in arrays], anchors + 0, case[1] & True, *case[2:])

    apart = both(interpreted(), [x * 0.5 for x in arrays], d_out, *case)[0]
    np.testing.assert_allclose(together(arrays, case[0]), apart, atol=1e-6)


def test_gradient_of_the_log_sum_exp():
    """Merging with another part of the keys needs it; the anchors' own use never does."""
    (q, context_k, context_v, block_k, block_v), _ = draw(5, *SHAPE)
    anchors, keep, *_ = mask_case("some-dropped")
    ranges = block_ranges(jnp.asarray(anchors), keep, SHAPE[2], SHAPE[0])
    rows = lambda x: x.reshape(1, -1, *x.shape[3:])  # noqa: E731

    def ours(q, k):
        lse = ranged_attention(interpreted(), q, Keys(k, context_v, rows(block_k), rows(block_v)), ranges)[1]
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0.0)))

    def plain(q, k):
        scale = q.shape[-1] ** -0.5
        k, own = (jnp.repeat(x, 2, axis=2) for x in (k, rows(block_k)))
        far, near = (jnp.einsum("brhd,bshd->bhrs", q, x) * scale for x in (k, own))
        index = lambda n: jnp.arange(n)[None, None]  # noqa: E731
        sees = (index(SHAPE[0]) >= ranges.lo[..., None]) & (index(SHAPE[0]) < ranges.hi[..., None])
        sees_own = (index(56) >= ranges.own_lo[..., None]) & (index(56) < ranges.own_hi[..., None])
        mask = jnp.concatenate([sees, sees_own], axis=-1)[:, None]
        raw = jnp.where(mask, jnp.concatenate([far, near], axis=-1), -1e30)
        lse = jax.nn.logsumexp(raw, axis=-1)
        return jnp.sum(jnp.sin(jnp.where(mask.any(axis=-1), lse, 0.0)))

    gradients = (jax.jit(jax.grad(f, argnums=(0, 1)))(rows(q), context_k) for f in (ours, plain))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("index", [1, 3])
def test_lookahead_equals_the_reference_and_its_gradients(index):
    rng = np.random.default_rng(0)
    shapes = [(2, 70, 4), (2, 70, 2), (2, 70, 2), (2, 70, 3, 2), (2, 70, 3, 2), (2, 70, 4)]
    *arrays, d_out = (jnp.asarray(rng.normal(size=(*shape, 64)), jnp.float32) for shape in shapes)
    lengths = jnp.asarray([70, 33])

    def run(function):
        out, back = jax.vjp(lambda *xs: function(*xs, index, lengths), *arrays)
        return out, *back(d_out)

    expected = jax.jit(functools.partial(run, reference.lookahead_attention))()
    with api.use_implementation("tpu", interpret=True):
        got = jax.jit(functools.partial(run, api.lookahead_attention))()
    agree(got, expected, 1e-5)


def test_a_selection_holds_inside_its_block_only_and_names_are_checked():
    arrays, _ = draw(6, *SHAPE)
    anchors, keep, *masks = mask_case("plain")
    arguments = (*arrays, anchors, keep, *masks)
    run = jax.jit(lambda: api.anchor_attention(*arguments))
    expected = run()
    with api.use_implementation("tpu", interpret=True):
        kernel = run()  # the same function object: a stale program would give the reference again
    assert np.abs(np.asarray(kernel - expected)).max() < 1e-5
    assert (np.asarray(kernel) != np.asarray(expected)).any()
    np.testing.assert_array_equal(run(), expected)
    with (
        pytest.raises(ValueError, match="'fast', expected one of auto, reference, tpu, gpu"),
        api.use_implementation("fast"),
    ):
        pass


def test_auto_names_what_it_chose_once(caplog):
    arrays, _ = draw(6, *SHAPE)
    anchors, keep, *masks = mask_case("plain")
    api._say.cache_clear()
    with caplog.at_level("INFO", logger=api.__name__):
        for _ in range(2):
            out = api.anchor_attention(*arrays, anchors, keep, *masks, implementation="auto")
    np.testing.assert_array_equal(out, api.anchor_attention(*arrays, anchors, keep, *masks))
    assert [record.message for record in caplog.records] == ["anchor_attention: auto chose reference (on cpu)"]


@pytest.mark.parametrize(
    ("kernels", "dtype", "dim", "message"),
    [
        (TpuKernels(), "float16", 64, "tpu: found dtypes float16"),
        (GpuKernels(), "float32", 64, "gpu: found dtypes float32"),
        (GpuKernels(), "bfloat16", 256, "gpu: found head dim 256, expected at most 128"),
        (TpuKernels(), "float32", 300, "head dim: found 300, expected at most 256"),
    ],
)
def test_operands_that_a_kernel_does_not_take_are_named(kernels, dtype, dim, message):
    arrays, _ = draw(0, 16, 2, 3, 2, 1, dim, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: apply(kernels, arrays, np.asarray([[2, 5]]), np.ones((1, 2), bool)))


def test_heads_that_cannot_be_grouped_are_an_error():
    arrays, _ = draw(0, 16, 2, 3, 3, 2, 64)
    with pytest.raises(ValueError, match="found 3 query heads over 2 K/V heads"):
        jax.eval_shape(lambda: apply(TpuKernels(), arrays, np.asarray([[2, 5]]), np.ones((1, 2), bool)))


def test_a_visit_list_that_no_scalar_memory_holds_is_an_error():
    arrays, _ = draw(0, 4096, 512, 16, 4, 1, 64)
    shapes = [jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype) for x in arrays]
    masks = [jax.ShapeDtypeStruct((64, 512), dtype) for dtype in (jnp.int32, jnp.bool_)]
    with pytest.raises(ValueError, match=r"visit list takes .* bytes of scalar memory, expected at most 524288"):
        jax.eval_shape(functools.partial(apply, TpuKernels()), shapes, *masks)


def test_a_gpu_without_wgmma_is_an_error_and_auto_says_so(monkeypatch, caplog):
    arrays, _ = draw(0, *SHAPE, dtype="bfloat16")
    anchors, keep, *_ = mask_case("plain")
    old = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(api.jax, "devices", lambda: [old])
    monkeypatch.setattr(api.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"found compute capability 8\.0, expected 9\.0"):
        api.anchor_attention(*arrays, anchors, keep, implementation="gpu")
    api._say.cache_clear()
    with caplog.at_level("INFO", logger=api.__name__):
        jax.eval_shape(functools.partial(api.anchor_attention, implementation="auto"), *arrays, anchors, keep)
    assert "auto chose reference" in caplog.text and "compute capability 8.0" in caplog.text


@pytest.mark.parametrize("shape", [(512, 16, 16, 4, 1, 128, 1), (259, 5, 7, 3, 1, 64, 2), (200, 3, 5, 2, 2, 80, 1)])
def test_B65_the_gpu_kernels_lower_without_a_gpu(shape):
    """Layouts, shared memory and barriers are checked there; what they compute, on a GPU only."""
    arrays, d_out = jax.eval_shape(lambda: draw(0, *shape, dtype="bfloat16"))
    masks = [jax.ShapeDtypeStruct((shape[-1], shape[1]), dtype) for dtype in (jnp.int32, jnp.bool_)]
    text = both.trace(GpuKernels(), arrays, d_out, *masks).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_B65_the_gpu_kernels_equal_the_reference(name, dim):
    arrays, d_out = draw(0, *SHAPE[:-1], dim, dtype="bfloat16")
    case = mask_case(name)
    wide = [x.astype(jnp.float32) for x in arrays]
    expected = both(None, wide, d_out.astype(jnp.float32), *case)
    agree(both(GpuKernels(), arrays, d_out, *case), expected, 2e-2)
