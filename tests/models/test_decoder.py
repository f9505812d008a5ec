"""The target decoder against a second one in numpy, its taps, its two forms, and the dtypes it computes in."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.attention import DenseCausal
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.rope import inverse_frequencies
from pallas_kernels.softmax import masked_softmax, mix, scores
from tests.models.numpy_decoder import decode, random_weights

BASE = {
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {
    "sliding_window": 3,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 6, "hidden_size": 10},  # head_dim is not hidden / heads
    "qwen3-attention-bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen3-sliding": {"model_type": "qwen3", "head_dim": 6, **SLIDING},
    "qwen2-bias-tied": {"model_type": "qwen2", "hidden_size": 16, "tie_word_embeddings": True},
    "llama-mha": {"model_type": "llama", "hidden_size": 16, "num_key_value_heads": 4},
    "llama-mqa-biases": {
        "model_type": "llama", "hidden_size": 16, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
    },
    "llama-tied-yarn": {"model_type": "llama", "hidden_size": 16, "tie_word_embeddings": True, "rope_scaling": YARN},
}  # fmt: skip
TOKENS = [3, 7, 7, 0, 18, 4, 11]
TAPS = (-1, 0, 1, 2, "final")


def make(case: str):
    hf = {**BASE, **CASES[case]}
    decoder = Decoder(ModelConfig.from_hf(hf))
    return hf, decoder, random_weights(decoder, 0.4)


def sequences(decoder, taps=()):
    """One compiled program: op by op, every new shape would be compiled apart."""
    return jax.jit(lambda params, tokens, lengths=None: decoder.forward_sequences(params, tokens, taps, lengths))


@pytest.mark.parametrize("case", CASES)
def test_B39_decoder_logits_and_every_tap_match_the_numpy_decoder(case):
    hf, decoder, params = make(case)
    frequencies, amplitude = inverse_frequencies(decoder.config.rope, decoder.config.head_dim)
    windows = [3, None, 3] if "layer_types" in hf else [None] * 3
    expected = decode(ly.flatten(params), hf, TOKENS, windows, frequencies.astype(np.float64), amplitude)
    out = sequences(decoder, TAPS)(params, jnp.asarray([TOKENS]))
    np.testing.assert_allclose(out.hidden[0], expected["final"], atol=3e-5, rtol=1e-4)
    np.testing.assert_allclose(decoder.logits(params, out.hidden)[0], expected["logits"], atol=1e-4, rtol=1e-4)
    features = np.split(np.asarray(out.features[0]), len(TAPS), axis=-1)
    for tap, feature in zip(("embedding", 0, 1, 2, "final"), features, strict=True):
        np.testing.assert_allclose(feature, expected[tap], atol=3e-5, rtol=1e-4, err_msg=f"tap {tap}")
    # The last layer's tap is the raw residual: the trap is to read it after the final norm.
    assert not np.allclose(features[3], features[4], atol=1e-2)


def test_decoder_biases_and_heads_are_where_the_family_has_them():
    names = {case: set(ly.flatten(make(case)[1].abstract_params())) for case in CASES}
    bias = {
        case: {n.removeprefix("model.layers.0.") for n in names[case] if ".0." in n and n.endswith("bias")}
        for case in CASES
    }
    qkv = {f"self_attn.{x}_proj.bias" for x in "qkv"}
    assert bias["qwen3"] == bias["llama-mha"] == set()
    assert bias["qwen2-bias-tied"] == qkv
    assert bias["qwen3-attention-bias"] == qkv | {"self_attn.o_proj.bias"}
    mlp = {f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
    assert bias["llama-mqa-biases"] == qkv | {"self_attn.o_proj.bias"} | mlp
    assert "lm_head.weight" not in names["qwen2-bias-tied"] and "lm_head.weight" in names["qwen3"]
    assert "model.layers.0.self_attn.q_norm.weight" in names["qwen3"]
    assert not any("q_norm" in name for name in names["llama-mha"] | names["qwen2-bias-tied"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "model_type.*'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*3"),
        ({"head_dim": 5}, "head_dim.*5"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types.*1"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types.*chunked"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window"),
    ],
)
def test_model_config_refuses_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf({**BASE, "model_type": "qwen3", "head_dim": 6, **changes})


def test_sliding_layers_from_max_window_layers_and_not_from_the_window_alone():
    def windows(**hf):
        base = {**BASE, "model_type": "qwen2", "head_dim": 4, "sliding_window": 4}
        return ModelConfig.from_hf({**base, **hf}).layer_windows

    assert windows(use_sliding_window=False) == (None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=1) == (None, 4, 4)


@pytest.mark.parametrize("case", ["qwen3-sliding", "llama-mqa-biases"])
def test_stacked_form_equals_unrolled_form(case):
    _, decoder, params = make(case)
    tokens = jnp.asarray([TOKENS, TOKENS[::-1]])
    lengths = jnp.asarray([7, 5])
    stacked = ly.stack_layers(params)
    assert isinstance(stacked["model"]["layers"], dict)
    one, other = (sequences(decoder, TAPS)(p, tokens, lengths) for p in (params, stacked))
    np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(one.features, other.features, atol=1e-5, rtol=1e-5)


def test_flatten_unflatten_stack_unstack_round_trips():
    _, decoder, params = make("llama-mqa-biases")
    flat = ly.flatten(params)
    assert set(flat) == set(ly.flatten(decoder.abstract_params()))
    assert "model.layers.2.self_attn.o_proj.bias" in flat
    back = ly.unflatten(flat)
    assert isinstance(back["model"]["layers"], list)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))
    again = ly.unstack_layers(ly.stack_layers(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_unflatten_sorts_more_than_ten_layers_by_number():
    flat = {f"layers.{i}.w": i for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    assert [layer["w"] for layer in ly.unflatten(flat)["layers"]] == list(range(11))


@pytest.mark.parametrize("taps", [(3,), (-2,), ("last",), (0, 7)])
def test_B39_a_tap_that_does_not_exist_is_refused(taps):
    _, decoder, _ = make("qwen3")
    with pytest.raises(ConfigError, match="target_layer_ids"):
        decoder.check_taps(taps)


def test_B39_taps_keep_their_order_and_may_repeat():
    _, decoder, params = make("qwen3")
    run = lambda taps: sequences(decoder, taps)(params, jnp.asarray([TOKENS])).features  # noqa: E731
    zero, two = jnp.split(run((0, 2)), 2, axis=-1)
    np.testing.assert_allclose(run((2, 0, 2)), jnp.concatenate([two, zero, two], axis=-1), atol=1e-5)
    assert jax.eval_shape(lambda: run(())).shape == (1, 7, 0)


def test_padding_behind_a_sequence_changes_nothing_and_stays_finite():
    _, decoder, params = make("qwen3-sliding")
    run = sequences(decoder, TAPS)
    alone = run(params, jnp.asarray([TOKENS[:4]]))
    padded = run(params, jnp.asarray([[*TOKENS[:4], 5, 5, 5]]), jnp.asarray([4]))
    np.testing.assert_allclose(padded.features[:, :4], alone.features, atol=2e-5)
    assert np.isfinite(np.asarray(padded.features)).all()


@pytest.mark.parametrize("window", [0, 2])
def test_B64_fully_masked_rows_are_zero_with_finite_gradients(window):
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    lengths = jnp.asarray([0, 3])

    @jax.jit
    def run(q, k, v):
        return DenseCausal(lengths)(q, k, v, None, window)[0]

    out = run(q, k, v)
    np.testing.assert_array_equal(out[0], 0.0)
    assert np.abs(np.asarray(out[1, :3])).min() > 0
    if window:
        np.testing.assert_array_equal(out[1, 4], 0.0)  # sees 3 and 4 only, both padding
    grads = jax.jit(jax.grad(lambda *xs: jnp.sum(run(*xs) ** 2), (0, 1, 2)))(q, k, v)
    for grad in grads:
        assert np.isfinite(np.asarray(grad)).all()
        np.testing.assert_array_equal(grad[0], 0.0)
    assert np.abs(np.asarray(grads[2][1])).max() > 0


def test_B70_norm_softmax_scores_and_logits_are_float32_under_bfloat16_inputs():
    rng = np.random.default_rng(2)
    x = jnp.asarray(3.0 * rng.normal(size=(4, 512)), jnp.bfloat16)
    graph, _ = ly.abstract_module(ly.RMSNorm, 512, 1e-6)
    out = ly.bind(graph, {"weight": jnp.ones(512, jnp.bfloat16)})(x)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1.001 * 2.0**-8)  # rounded once, at the end
    q, k = (jnp.asarray(rng.normal(size=(1, 3, 2, 64)), jnp.bfloat16) for _ in range(2))
    raw = scores(q, k)
    exact = np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.asarray(k, np.float64)) / 8
    assert raw.dtype == jnp.float32
    np.testing.assert_allclose(raw[:, :, 0], exact, rtol=1e-5, atol=1e-5)
    weights = masked_softmax(raw, jnp.ones(raw.shape, bool))
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(jnp.sum(weights, -1), 1.0, rtol=1e-6)
    v = jnp.ones((1, 3, 2, 64), jnp.bfloat16)
    assert mix(weights, v).dtype == jnp.float32
    head = jnp.asarray(
        [[1.0, 0.0078125], [1.0, 0.01171875]], jnp.bfloat16
    )  # logits 256 + …: one bf16 number, two float32 ones
    logits = ly.unembed(jnp.asarray([256.0, 1.0], jnp.bfloat16), head)
    assert logits.dtype == jnp.float32 and logits[0] < logits[1]


def test_B70_bfloat16_model_keeps_rope_in_float32():
    """At position 60 a bf16 table would be off by whole turns; the model must stay within bf16 rounding of float32."""
    hf = {**BASE, "model_type": "qwen3", "head_dim": 8, "max_position_embeddings": 4096}
    decoder = Decoder(ModelConfig.from_hf(hf))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_weights(decoder, 0.3))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens, positions = jnp.asarray([TOKENS]), 2001 + jnp.arange(7)[None]
    one, other = (
        jax.jit(lambda p: decoder.forward(p, tokens, positions, DenseCausal()).hidden)(p) for p in (params, wide)
    )
    assert one.dtype == jnp.bfloat16
    assert np.abs(np.asarray(one, np.float32) - np.asarray(other)).max() < 0.1


def test_decoder_is_static_and_hashable():
    _, decoder, _ = make("qwen3")
    assert hash(decoder) == hash(dataclasses.replace(decoder)) and decoder == dataclasses.replace(decoder)
