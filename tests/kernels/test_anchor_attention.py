"""Anchor-block attention: every implementation against loops over single elements, and its gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.anchor_attention.api import anchor_attention
from pallas_kernels.anchor_attention.reference import block_mask, context_mask

S, BLOCK, DIM = 9, 3, 4
IMPLEMENTATIONS = ("reference",)  # the kernels: test_anchor_attention_kernels.py

# name -> (anchors [B, N], keep [B, N], window, causal, inner window, heads, kv heads)
CASES = {
    "single-block": ([[4]], [[1]], 0, False, 0, 2, 2),
    "multi-block": ([[2, 5, 7]], [[1, 1, 1]], 0, False, 0, 2, 1),
    "multi-batch": ([[2, 5], [1, 8]], [[1, 1], [1, 1]], 0, False, 0, 4, 2),
    "dropped-blocks": ([[3, 0], [6, 7]], [[1, 0], [0, 1]], 0, False, 0, 2, 1),
    "all-dropped": ([[0, 0]], [[0, 0]], 0, True, 0, 2, 1),
    "anchor-0": ([[0, 3]], [[1, 1]], 0, False, 0, 2, 2),
    "anchor-last": ([[S - 1]], [[1]], 0, False, 0, 2, 2),
    "equal-anchors": ([[4, 4, 4]], [[1, 1, 1]], 0, False, 0, 2, 2),
    "consecutive-anchors": ([[3, 4, 5, 6]], [[1, 1, 1, 1]], 0, False, 0, 4, 1),
    "causal": ([[2, 6]], [[1, 1]], 0, True, 0, 2, 2),
    "window-moves-with-the-row": ([[5, 8]], [[1, 1]], 4, True, 0, 2, 1),
    "window-symmetric-inside": ([[5, 8]], [[1, 1]], 3, False, 2, 2, 1),
    "window-causal-inside": ([[5, 8]], [[1, 1]], 3, True, 2, 2, 1),
    "window-1-no-context": ([[5]], [[1]], 1, True, 1, 2, 1),
    "window-wider-than-all": ([[0, 5]], [[1, 1]], 64, True, 64, 2, 1),
}


def random_case(seed):
    rng = np.random.default_rng(seed)
    batch, count = 2, 3  # one shape: masks and anchors are data, so one compilation serves all seeds
    anchors = np.sort(rng.integers(0, S, (batch, count)), axis=1)
    window, kv = int(rng.integers(0, 5)), int(rng.integers(1, 3))
    inner = int(rng.choice([0, window]))
    return (
        anchors,
        rng.random((batch, count)) < 0.8,
        window,
        bool(rng.integers(2)),
        inner,
        kv * int(rng.integers(1, 4)),
        kv,
    )


CASES |= {f"random-{seed}": random_case(seed) for seed in range(12)}


@functools.cache
def compiled(implementation):
    return jax.jit(functools.partial(anchor_attention, implementation=implementation))


def sees_context(anchor, row, t, window):
    return t < anchor and (window == 0 or anchor + row - t < window)


def sees_block(row, other, causal, inner):
    return (not causal or other <= row) and (inner == 0 or abs(row - other) < inner)


def draw(case, seed=0, block=BLOCK):
    anchors, keep, *_, heads, kv = CASES[case]
    batch, count = np.shape(anchors)
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, count, block, heads),
        (batch, S, kv),
        (batch, S, kv),
        (batch, count, block, kv),
        (batch, count, block, kv),
    ]
    arrays = [rng.normal(size=(*shape, DIM)).astype(np.float32) for shape in shapes]
    return arrays, np.asarray(anchors), np.asarray(keep, bool)


def oracle(arrays, anchors, keep, window, causal, inner):
    q, context_k, context_v, block_k, block_v = (x.astype(np.float64) for x in arrays)
    out = np.zeros_like(q)
    batch, count, block, heads, _ = q.shape
    group = heads // context_k.shape[2]
    for b, n, row, head in np.ndindex(batch, count, block, heads):
        if not keep[b, n]:
            continue
        kv = head // group
        pairs = [
            (context_k[b, t, kv], context_v[b, t, kv]) for t in range(S) if sees_context(anchors[b, n], row, t, window)
        ]
        pairs += [
            (block_k[b, n, o, kv], block_v[b, n, o, kv]) for o in range(block) if sees_block(row, o, causal, inner)
        ]
        weights = np.exp(np.array([q[b, n, row, head] @ k for k, _ in pairs]) / np.sqrt(DIM))
        out[b, n, row, head] = sum(w * v for w, (_, v) in zip(weights, pairs, strict=True)) / weights.sum()
    return out


def dense(arrays, anchors, keep, window, causal, inner):
    """The same attention with one explicit mask over [context, all blocks]: what autodiff is checked against."""
    q, context_k, context_v, block_k, block_v = arrays
    batch, count, block, heads, dim = q.shape
    group = heads // context_k.shape[2]
    mask = np.zeros((batch, count * block, S + count * block), bool)
    for b, n, row in np.ndindex(batch, count, block):
        if keep[b, n]:
            mask[b, n * block + row, :S] = [sees_context(anchors[b, n], row, t, window) for t in range(S)]
            for other in range(block):
                mask[b, n * block + row, S + n * block + other] = sees_block(row, other, causal, inner)
    flat = lambda x: x.reshape(batch, count * block, -1, dim)  # noqa: E731
    keys = jnp.repeat(jnp.concatenate([context_k, flat(block_k)], axis=1), group, axis=2)
    values = jnp.repeat(jnp.concatenate([context_v, flat(block_v)], axis=1), group, axis=2)
    raw = jnp.einsum("bqhd,bkhd->bhqk", flat(q), keys) / np.sqrt(dim)
    weights = jnp.where(mask[:, None], jnp.exp(raw), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(q.shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_B64_forward_equals_the_element_by_element_oracle(case, implementation):
    arrays, anchors, keep = draw(case)
    masks = CASES[case][2:5]
    out = compiled(implementation)(*arrays, anchors, keep, *masks)
    np.testing.assert_allclose(out, oracle(arrays, anchors, keep, *masks), atol=2e-6)
    np.testing.assert_array_equal(np.asarray(out)[~keep], 0.0)


GRADIENT_CASES = [
    "dropped-blocks",
    "all-dropped",
    "anchor-0",
    "equal-anchors",
    "window-1-no-context",
    "window-symmetric-inside",
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_B64_gradients_equal_a_dense_masks_and_vanish_for_dropped_blocks(case, implementation):
    arrays, anchors, keep = draw(case)
    masks = CASES[case][2:5]
    weight = np.random.default_rng(1).normal(size=arrays[0].shape).astype(np.float32)
    fast = jax.jit(
        jax.grad(
            lambda xs: jnp.sum(weight * anchor_attention(*xs, anchors, keep, *masks, implementation=implementation))
        )
    )
    slow = jax.jit(jax.grad(lambda xs: jnp.sum(weight * dense(xs, anchors, keep, *masks))))
    ours = fast(list(map(jnp.asarray, arrays)))
    for one, other in zip(ours, slow(list(map(jnp.asarray, arrays))), strict=True):
        assert np.isfinite(np.asarray(one)).all()
        np.testing.assert_allclose(one, other, atol=3e-6)
    for one in (ours[0], ours[3], ours[4]):
        np.testing.assert_array_equal(np.asarray(one)[~keep], 0.0)
    unseen = np.array([[not np.any(keep[b] & (t < anchors[b])) for t in range(S)] for b in range(len(anchors))])
    for one in ours[1:3]:
        np.testing.assert_array_equal(np.asarray(one)[unseen], 0.0)


def test_gradient_agrees_with_finite_differences():
    arrays, anchors, keep = draw("window-moves-with-the-row")
    masks = CASES["window-moves-with-the-row"][2:5]
    rng = np.random.default_rng(2)
    step = [rng.normal(size=x.shape).astype(np.float32) for x in arrays]
    weight = rng.normal(size=arrays[0].shape)
    value = lambda e: np.sum(  # noqa: E731
        weight
        * oracle([x.astype(np.float64) + e * d for x, d in zip(arrays, step, strict=True)], anchors, keep, *masks)
    )
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    grads = jax.jit(jax.grad(lambda xs: jnp.sum(weight * anchor_attention(*xs, anchors, keep, *masks))))(arrays)
    assert sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(grads, step, strict=True)) == pytest.approx(
        slope, rel=1e-4
    )


def test_B50_equal_anchors_of_different_blocks_do_not_see_each_other():
    arrays, anchors, keep = draw("equal-anchors")
    run = lambda *xs: compiled("reference")(*xs, anchors, keep, 0, False, 0)  # noqa: E731
    before = np.asarray(run(*arrays))
    changed = [x.copy() for x in arrays]
    changed[3][0, 1] += 5.0
    changed[4][0, 1] += 5.0
    after = np.asarray(run(*changed))
    np.testing.assert_array_equal(after[0, [0, 2]], before[0, [0, 2]])
    assert np.abs(after[0, 1] - before[0, 1]).min() > 0


def test_B50_context_from_the_anchor_on_is_invisible_whatever_it_holds():
    arrays, anchors, keep = draw("consecutive-anchors")
    run = lambda *xs: compiled("reference")(*xs, anchors, keep, 0, False, 0)  # noqa: E731
    before = np.asarray(run(*arrays))
    for position in range(S):
        changed = [x.copy() for x in arrays]
        changed[1][0, position] += 5.0
        changed[2][0, position] -= 5.0
        moved = np.abs(np.asarray(run(*changed)) - before).max(axis=(2, 3, 4))[0] > 0
        assert moved.tolist() == [bool(position < anchor) for anchor in anchors[0]]


@pytest.mark.parametrize(("anchor", "row", "first"), [(8, 0, 5), (8, 1, 6), (8, 2, 7), (2, 0, 0)])
def test_window_of_the_context_moves_with_the_row(anchor, row, first):
    """W = 4 counts the row itself: row j at position p = a + j sees p - 3 … a - 1."""
    seen = context_mask(jnp.asarray([[anchor]]), jnp.ones((1, 1), bool), 3, 10, 4)[0, 0, row]
    assert np.flatnonzero(seen).tolist() == list(range(first, anchor))


def test_block_mask_tri_state():
    full, lower = np.ones((3, 3), bool), np.tril(np.ones((3, 3), bool))
    np.testing.assert_array_equal(block_mask(3, False, 0), full)
    np.testing.assert_array_equal(block_mask(3, True, 0), lower)  # legacy sliding: causal, no window inside
    np.testing.assert_array_equal(
        block_mask(3, False, 2), full & ~np.eye(3, k=2, dtype=bool) & ~np.eye(3, k=-2, dtype=bool)
    )
    np.testing.assert_array_equal(block_mask(3, True, 2), lower & ~np.eye(3, k=-2, dtype=bool))


def test_B70_bfloat16_inputs_are_mixed_in_float32():
    arrays, anchors, keep = draw("multi-batch")
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    wide = [np.asarray(x, np.float32) for x in narrow]
    out = compiled("reference")(*narrow, anchors, keep)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), oracle(wide, anchors, keep, 0, False, 0), atol=2e-2)


def test_an_implementation_that_does_not_exist_is_named():
    arrays, anchors, keep = draw("single-block")
    with pytest.raises(ValueError, match="'turbo'"):
        anchor_attention(*arrays, anchors, keep, implementation="turbo")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_B65_operands_computed_in_the_same_program_and_odd_shapes(dtype):
    """A kernel that is right on its own inputs may be wrong on operands that its own program makes."""
    rng = np.random.default_rng(3)
    shapes = [(1, 3, 5, 6), (1, 13, 2), (1, 13, 2), (1, 3, 5, 2), (1, 3, 5, 2)]
    arrays = [jnp.asarray(rng.normal(size=(*shape, 10)), dtype) for shape in shapes]
    anchors, keep = jnp.asarray([[0, 5, 12]]), jnp.asarray([[True, False, True]])

    def run(scale, operands):
        return anchor_attention(*(x * scale for x in operands), anchors + 0, keep & True, 4, True, 0)

    together = jax.jit(run)(jnp.asarray(0.5, dtype), arrays)
    apart = anchor_attention(*(x * jnp.asarray(0.5, dtype) for x in arrays), anchors, keep, 4, True, 0)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(together, np.float32), np.asarray(apart, np.float32), atol=tolerance)
    assert not np.asarray(together[0, 1], np.float32).any()  # the dropped block
