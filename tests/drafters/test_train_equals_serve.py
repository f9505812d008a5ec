"""The central promise: the block that was trained is the block that is served."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Rows
from jaxspec.drafters.ring import Ring
from jaxspec.models.layout import keep_rows, uniform_layout
from tests.drafters import tiny

LENGTH, PAGE, PAGES = 14, 4, 4

LAYERS = {
    "full": {"num_layers": 2},
    "full-causal": {"num_layers": 2, "is_causal": True},
    "sliding-legacy": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "sliding-bidirectional": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "is_causal": False},
    "sliding-causal": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3, "is_causal": True},
    "window-1": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 1, "is_causal": True},
}
METHODS = {"dflash": tiny.dflash, "dspark": tiny.dspark}


def serve(drafter, params, shared, batch, anchors, fill=0.0, chunk=3, rings=False):
    """Hidden states of one block a request; the contexts come in through `commit` in ragged chunks. With `rings` the
    sliding layers keep their last rows alone."""
    requests = len(anchors)
    table = tiny.page_tables(requests, PAGES)
    slots = requests if rings else 0
    state = jax.eval_shape(lambda: drafter.init_state(1 + requests * PAGES, PAGE, jnp.float32, slots))
    sliding = [bool(window) for window, *_ in drafter.config.layer_masks]
    assert [isinstance(pool, Ring) for pool in state] == (sliding if rings else [False] * len(sliding))
    state = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, fill, x.dtype)), state)
    anchors = jnp.asarray(anchors, jnp.int32)

    @jax.jit
    def commit(params, state, features, tokens, following, first, lengths):
        layout = uniform_layout(first, jnp.full_like(lengths, chunk), table, chunk)
        rows = Rows(features.reshape(requests * chunk, -1), tokens.reshape(-1), following.reshape(-1))
        return drafter.commit(params, shared, state, rows, keep_rows(layout, lengths))

    pad = lambda x: np.pad(x, [(0, chunk + 1)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    features, tokens = pad(np.asarray(batch.features[0])), pad(np.asarray(batch.input_ids[0]))
    for start in range(0, LENGTH, chunk):
        lengths = np.clip(np.asarray(anchors) - start, 0, chunk).astype(np.int32)
        repeat = lambda x, at: np.repeat(x[None, at : at + chunk], requests, axis=0)  # noqa: E731
        first = np.full(requests, start, np.int32)
        state = commit(
            params, state, repeat(features, start), repeat(tokens, start), repeat(tokens, start + 1), first, lengths
        )
    slots = tiny.slots(batch.input_ids[0][anchors], anchors, table)
    return jax.jit(lambda p, s: drafter.block_hidden(p, shared, s, slots))(params, state)


# DSpark shares the backbone; one quick case of it shows that it does, the others run with the long tests.
CASES = [
    pytest.param(method, layers, marks=[pytest.mark.ci] if method == "dspark" and layers != "sliding-legacy" else [])
    for method in METHODS
    for layers in LAYERS
]


@pytest.mark.parametrize(("method", "layers"), CASES)
def test_B51_training_forward_equals_serving_forward(method, layers):
    drafter = METHODS[method](**LAYERS[layers])
    params, shared = tiny.random_params(drafter), tiny.shared()
    anchors = [0, 1, 5, 6, 9, LENGTH - 1]
    batch = tiny.batch(anchors, LENGTH)
    trained = jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params)[0]
    served = serve(drafter, params, shared, batch, anchors)
    np.testing.assert_allclose(served, trained, atol=1e-5, rtol=1e-5)
    assert np.abs(np.asarray(trained[2] - trained[3])).max() > 1e-2  # a block that ignored its context would pass, too


@pytest.mark.parametrize(
    ("layers", "chunk"),
    [("sliding-legacy", 3), ("sliding-bidirectional", LENGTH), ("sliding-causal", 5), ("window-1", LENGTH)],
)
def test_B51_B64_rings_of_sliding_layers_serve_what_was_trained(layers, chunk):
    """Contexts longer than the ring, chunks longer than the ring, and rows that were never written."""
    drafter = tiny.dflash(**LAYERS[layers])
    params, shared = tiny.random_params(drafter), tiny.shared()
    anchors = [0, 1, 5, 9, LENGTH - 1]
    batch = tiny.batch(anchors, LENGTH)
    trained = jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params)[0]
    served = serve(drafter, params, shared, batch, anchors, np.nan, chunk, rings=True)
    np.testing.assert_allclose(served, trained, atol=1e-5, rtol=1e-5)


def test_memory_of_a_ring_depends_on_the_window_alone():
    drafter = tiny.dflash(**LAYERS["sliding-legacy"])
    short, long = (jax.eval_shape(lambda n=n: drafter.init_state(n, PAGE, jnp.float32, 3)) for n in (100, 10_000))
    assert short[0].rows.shape == long[0].rows.shape == (4, 5 + 3 + 1, 4, 6)
    assert short[1].shape[0] == 100 and long[1].shape[0] == 10_000  # a full layer keeps every row
    assert drafter.prefix_use(100, PAGE, 3).recomputed == 4
    few = 1 + 27 // PAGE  # pages that take no more than the rings would
    assert not any(isinstance(pool, Ring) for pool in drafter.init_state(few, PAGE, jnp.float32, 3))
    assert drafter.prefix_use(few, PAGE, 3).recomputed == 1


@pytest.mark.parametrize("fill", [np.nan, 1e30])
def test_B64_block_over_a_poisoned_context_pool(fill):
    """Anchor 0 has no context at all; the others have holes behind their length."""
    drafter = tiny.dflash(**LAYERS["sliding-legacy"])
    params, shared, anchors = tiny.random_params(drafter), tiny.shared(), [0, 1, 6]
    batch = tiny.batch(anchors, LENGTH)
    clean, poisoned = (serve(drafter, params, shared, batch, anchors, one) for one in (0.0, fill))
    np.testing.assert_array_equal(poisoned, clean)


def test_layer_masks_tri_state():
    """Absent: full layers see their block, sliding ones are causal in it without a window inside. Else: as it says."""
    kinds = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
    masks = {causal: tiny.block_config(is_causal=causal, **kinds).layer_masks for causal in (None, True, False)}
    assert masks[None] == ((5, True, 0), (0, False, 0))
    assert masks[True] == ((5, True, 5), (0, True, 0))
    assert masks[False] == ((5, False, 5), (0, False, 0))


def test_B51_embedding_scale_multiplier_and_softcap_are_applied_in_both_forwards():
    plain = tiny.dflash()
    config = dataclasses.replace(
        plain.config, input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
    )
    scaled = dataclasses.replace(plain, config=config)
    params, shared = tiny.random_params(plain), tiny.shared()
    batch = tiny.batch([5], LENGTH)
    trained = jax.jit(lambda p: scaled.training_hidden(p, shared, batch))(params)[0]
    np.testing.assert_allclose(serve(scaled, params, shared, batch, [5]), trained, atol=1e-5)
    bigger = dataclasses.replace(shared, embedding=3.0 * shared.embedding)
    np.testing.assert_allclose(serve(plain, params, bigger, batch, [5]), trained, atol=1e-5)
    logits = np.asarray(scaled.block_logits(shared, trained))
    np.testing.assert_allclose(
        logits, 2 * np.tanh(0.5 * np.asarray(trained) @ np.asarray(shared.head).T / 2), atol=1e-5
    )
