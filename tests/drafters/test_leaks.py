"""What a block may know: features strictly before its anchor, and nothing of any other block (B50, B55)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafters import tiny

pytestmark = pytest.mark.ci

LENGTH = 12
ANCHORS = [0, 3, 4, 4, 9, LENGTH - 1]
DRAFTERS = {
    "dflash": tiny.dflash,
    "dspark": tiny.dspark,
    "dflash-sliding": lambda: tiny.dflash(layer_types=("sliding_attention", "full_attention"), sliding_window=3),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_B50_a_feature_moves_exactly_the_blocks_whose_anchor_lies_behind_it(name):
    drafter = DRAFTERS[name]()
    params, shared, batch = tiny.random_params(drafter), tiny.shared(), tiny.batch(ANCHORS, LENGTH)
    run = jax.jit(
        lambda features: drafter.training_hidden(params, shared, dataclasses.replace(batch, features=features))
    )
    before = np.asarray(run(batch.features))[0]
    for position in range(LENGTH):
        after = np.asarray(run(batch.features.at[0, position].add(3.0)))[0]
        moved = [bool(np.any(one != other)) for one, other in zip(after, before, strict=True)]
        expected = [position < anchor for anchor in ANCHORS]
        assert moved == expected, f"feature {position} moved {moved}"


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_B50_another_blocks_anchor_token_and_labels_are_invisible(name):
    drafter = DRAFTERS[name]()
    params, shared, batch = tiny.random_params(drafter), tiny.shared(), tiny.batch(ANCHORS, LENGTH)
    run = jax.jit(lambda ids: drafter.training_hidden(params, shared, dataclasses.replace(batch, input_ids=ids)))
    before = np.asarray(run(batch.input_ids))[0]
    for position in range(LENGTH):
        after = np.asarray(run(batch.input_ids.at[0, position].set((batch.input_ids[0, position] + 7) % tiny.VOCAB)))[0]
        moved = [bool(np.any(one != other)) for one, other in zip(after, before, strict=True)]
        assert moved == [anchor == position for anchor in ANCHORS]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.ci
def test_B50_one_anchor_weighs_the_same_alone_and_64_times(name):
    drafter = DRAFTERS[name]()
    params, shared = tiny.random_params(drafter), tiny.shared()
    run = jax.jit(
        jax.value_and_grad(lambda p, batch: drafter.objective(drafter.loss(p, shared, batch, jax.random.key(0))))
    )
    for anchor in (0, 5):
        one, many = (run(params, tiny.batch([anchor] * count, LENGTH)) for count in (1, 64))
        assert float(one[0]) == pytest.approx(float(many[0]), rel=2e-5)
        for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(many[1]), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_B55_short_sequences_and_edges_are_finite_and_count_supervised_tokens_only(name):
    """b = 4: lengths 1, b - 1, b, b + 1, 2b - 1, a span shorter than the block, anchor at the last token, no anchor."""
    drafter = DRAFTERS[name]()
    params, shared = tiny.random_params(drafter), tiny.shared()
    proposals = drafter.num_proposals
    run = jax.jit(jax.value_and_grad(lambda p, batch: _objective(drafter, p, shared, batch), has_aux=True))
    size = 7
    for length in (1, 3, 4, 5, 7):
        for anchor in sorted({0, length // 2, length - 1}):
            for span in (length, 2):
                mask = np.zeros(size, bool)  # rows from `length` on are padding of the batch
                mask[max(0, length - span) : length] = True
                batch = tiny.batch([anchor, 0], size, keep=[True, False], loss_mask=mask)
                (value, terms), grads = run(params, batch)
                expected = 0
                for slot in range(1, proposals + 1):
                    inside = anchor + slot < size and mask[anchor + slot]
                    if not inside and name == "dspark":
                        break
                    expected += inside
                assert np.isfinite(float(value))
                assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))
                assert float(terms["metric/accuracy"][1]) == expected
                if not expected:
                    assert float(value) == 0.0 and all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def _objective(drafter, params, shared, batch):
    terms = drafter.loss(params, shared, batch, jax.random.key(0))
    return drafter.objective(terms), terms


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_B55_labels_past_the_end_are_clamped_in_range_and_weigh_nothing(name):
    drafter = DRAFTERS[name]()
    batch = tiny.batch([5, 6], 7)
    labels, *_ = drafter.labels(batch)
    ids = np.asarray(batch.input_ids[0])
    offsets = np.arange(labels.shape[-1]) + (name == "dspark")
    expected = ids[np.minimum(np.array([[5], [6]]) + offsets, 6)]
    np.testing.assert_array_equal(labels[0], expected)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("junk", [1e3, 1e30])
def test_B64_features_of_padding_may_hold_any_number(name, junk):
    """Rows behind a sequence are nobody's context, also where their squares overflow."""
    drafter = DRAFTERS[name]()
    params, shared = tiny.random_params(drafter), tiny.shared()
    mask = np.arange(LENGTH) < 9
    batch = tiny.batch([2, 4], LENGTH, loss_mask=mask)
    run = jax.jit(lambda p, b: drafter.objective(drafter.loss(p, shared, b, jax.random.key(0))))
    clean = run(params, dataclasses.replace(batch, features=batch.features.at[:, 9:].set(0.0)))
    wild = run(params, dataclasses.replace(batch, features=batch.features.at[:, 9:].set(junk)))
    assert float(clean) == float(wild)
    assert jnp.isfinite(clean)
