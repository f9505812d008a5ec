"""Anchor sampling against the golden case, the old rule and the recipes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.training.anchors import anchor_uniforms, sample_anchors, trim_width

GOLDEN = Path(__file__).parents[1] / "golden" / "04_anchor_sampler"


def test_golden_anchor_sampler():
    case = json.loads((GOLDEN / "case.json").read_text())
    inputs, expected = load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "expected.safetensors")
    for width in case["config"]["num_anchors"]:
        anchors, keep = sample_anchors(jnp.asarray(inputs["rand"]), jnp.asarray(inputs["loss_mask"]), width)
        np.testing.assert_array_equal(anchors, expected[f"deepspec_anchors_{width}"])
        np.testing.assert_array_equal(keep, expected[f"deepspec_keep_{width}"])
        trimmed, kept = trim_width(anchors, keep)
        np.testing.assert_array_equal(trimmed, expected[f"specforge_anchors_{width}"])
        np.testing.assert_array_equal(kept, expected[f"specforge_keep_{width}"])


def _legacy_by_hand(uniforms, mask, num_anchors, block):
    """The old rule, transcribed with a Python loop."""
    rows, counts = [], []
    for row, numbers in zip(mask, uniforms, strict=True):
        last = max(len(row) - block, 0)
        valid = [a for a in range(min(last + 1, len(numbers))) if row[a]]
        rows.append(sorted(valid, key=lambda a: numbers[a]))
        counts.append(len(valid))
    width = max(min(num_anchors, max(counts) - 1), 0)
    return [sorted(row[:width]) for row in rows]


@pytest.mark.parametrize("block", [2, 4, 7])
def test_legacy_rule_matches_the_loop(block):
    rng = np.random.default_rng(block)
    mask, uniforms = rng.random((5, 20)) < 0.6, rng.random((5, 19)).astype(np.float32)
    for num_anchors in (1, 3, 40):
        anchors, keep = sample_anchors(jnp.asarray(uniforms), jnp.asarray(mask), num_anchors, "legacy", block)
        found = [a[k].tolist() for a, k in zip(np.asarray(anchors), np.asarray(keep), strict=True)]
        assert found == _legacy_by_hand(uniforms, mask, num_anchors, block)


def test_legacy_rule_with_at_most_one_candidate_keeps_nothing():
    mask = jnp.zeros((2, 8), bool).at[0, 3].set(True)
    _, keep = sample_anchors(jnp.full((2, 7), 0.5), mask, 4, "legacy", 2)
    assert not bool(keep.any())


def test_unknown_rule_is_named():
    with pytest.raises(ValueError, match="anchor_rule"):
        sample_anchors(jnp.zeros((1, 3)), jnp.ones((1, 4)), 2, "newest")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
def test_B55_short_sequences_and_last_token_anchor(length):
    """Lengths 1, b-1, b, b+1, 2b-1, 2b with b = 4: nothing past S-2, and no anchor where a pair is missing."""
    mask = jnp.ones((2, length), bool).at[1].set(False)
    numbers = anchor_uniforms(jax.random.key(0), jnp.arange(2), jnp.int32(0), length)
    anchors, keep = sample_anchors(numbers, mask, 6, "adjacent", 4)
    assert anchors.shape == keep.shape == (2, 6)
    assert int(keep[0].sum()) == min(6, length - 1) and not bool(keep[1].any())
    assert bool((anchors[0][keep[0]] <= length - 2).all()) and bool((anchors[~keep] == 0).all())


def test_draws_are_uniform_without_replacement():
    mask = jnp.zeros((400, 12), bool).at[:, 2:11].set(True)  # 8 candidates: 2 .. 9
    numbers = anchor_uniforms(jax.random.key(3), jnp.arange(400), jnp.int32(0), 12)
    anchors, keep = jax.tree.map(np.asarray, sample_anchors(numbers, mask, 4))
    assert keep.all() and (np.diff(anchors, axis=1) > 0).all()
    counts = np.bincount(anchors.ravel(), minlength=12)
    assert counts[[0, 1, 10, 11]].sum() == 0
    assert abs(counts[2:10] / 400 - 0.5).max() < 0.12


def test_B68_keyed_by_example_and_epoch_not_by_place():
    key, ids = jax.random.key(7), jnp.array([5, 9, 11, 2])
    mask = jnp.ones((4, 16), bool)
    whole = sample_anchors(anchor_uniforms(key, ids, jnp.int32(1), 16), mask, 5)[0]
    for place, example in enumerate(ids):
        alone = sample_anchors(anchor_uniforms(key, example[None], jnp.int32(1), 16), mask[:1], 5)[0]
        np.testing.assert_array_equal(alone[0], whole[place])
    again = anchor_uniforms(key, ids, jnp.array([1, 1, 2, 1]), 16)
    first = anchor_uniforms(key, ids, jnp.int32(1), 16)
    assert (np.asarray(again == first).all(axis=1) == [True, True, False, True]).all()
