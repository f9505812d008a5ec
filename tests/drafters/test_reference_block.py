"""One DFlash block written once more in numpy, from its formulas: what training and serving share may be wrong, too."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec.models.layers import flatten
from jaxspec.models.rope import inverse_frequencies
from tests.drafters import tiny
from tests.models.numpy_decoder import rms_norm, softmax, turn

pytestmark = pytest.mark.ci

LENGTH = 9
LAYERS = {
    "full": {"num_layers": 2},
    "sliding-legacy": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    "sliding-false": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3, "is_causal": False},
    "sliding-true": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3, "is_causal": True},
}


def naive_block(drafter, params, shared, features, anchor_token, anchor):
    """Final-normed hidden states of the block at `anchor`; of features [S, T x H] only the rows before it are read."""
    w = {name: np.asarray(leaf, np.float64) for name, leaf in flatten(params).items()}
    model, size, dim = drafter.config.model, drafter.config.block_size, drafter.config.model.head_dim
    frequencies, _ = inverse_frequencies(model.rope, dim)
    eps, group = model.rms_norm_eps, model.num_heads // model.num_kv_heads
    table = np.asarray(shared.embedding, np.float64)
    context = rms_norm(np.asarray(features[:anchor], np.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = table[[anchor_token] + [drafter.mask_token_id] * (size - 1)]
    for layer, window in enumerate(model.layer_windows):
        at = f"layers.{layer}"
        normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)

        def heads(name, rows, at=at):
            weight = w[f"{at}.self_attn.{name}_proj.weight"]
            return (rows @ weight.T).reshape(len(rows), len(weight) // dim, dim)

        q = rms_norm(heads("q", normed), w[f"{at}.self_attn.q_norm.weight"], eps)
        keys = np.concatenate([heads("k", context), heads("k", normed)])
        keys = rms_norm(keys, w[f"{at}.self_attn.k_norm.weight"], eps)
        values = np.concatenate([heads("v", context), heads("v", normed)])
        mixed = np.zeros((size, model.num_heads, dim))
        for row in range(size):
            seen = [t for t in range(anchor) if window is None or anchor + row - t < window]
            for other in range(size):
                causal = drafter.config.is_causal if drafter.config.is_causal is not None else window is not None
                inside = window is None or drafter.config.is_causal is None or abs(row - other) < window
                if (other <= row or not causal) and inside:
                    seen.append(anchor + other)
            for head in range(model.num_heads):
                query = turn(q[row, head], anchor + row, frequencies, 1.0)
                scores = np.array([query @ turn(keys[t, head // group], t, frequencies, 1.0) for t in seen])
                mixed[row, head] = softmax(scores / np.sqrt(dim)) @ values[seen, head // group]
        x = x + mixed.reshape(size, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate = normed @ w[f"{at}.mlp.gate_proj.weight"].T
        up = normed @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"], eps)


@pytest.mark.parametrize("layers", LAYERS)
def test_B51_block_equals_its_formulas(layers):
    drafter = tiny.dflash(**LAYERS[layers])
    params, shared, anchors = tiny.random_params(drafter), tiny.shared(), [0, 1, 6, LENGTH - 1]
    batch = tiny.batch(anchors, LENGTH)
    ours = jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params)[0]
    for block, anchor in zip(ours, anchors, strict=True):
        expected = naive_block(drafter, params, shared, batch.features[0], int(batch.input_ids[0, anchor]), anchor)
        np.testing.assert_allclose(block, expected, atol=5e-5, rtol=1e-4)
