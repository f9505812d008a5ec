"""Rotary embeddings: config layouts, and tables against float64 formulas written from the papers and the HF meaning."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.config import RopeConfig
from jaxspec.models.rope import inverse_frequencies, rotary, rotate

DIM, MAX = 16, 4096

LINEAR = {"factor": 4.0}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0}
YARN_PLAIN = {"factor": 4.0, "original_max_position_embeddings": 1024}
YARN_MSCALE = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.3}
YARN_FACTOR = {"factor": 2.0, "original_max_position_embeddings": 256, "attention_factor": 1.7}
YARN_SMOOTH = {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

CASES = {
    "default": ("default", {}, 10000.0),
    "default-theta": ("default", {}, 1e6),
    "linear": ("linear", LINEAR, 10000.0),
    "yarn": ("yarn", YARN, 10000.0),
    "yarn-plain": ("yarn", YARN_PLAIN, 1e6),
    "yarn-mscale": ("yarn", YARN_MSCALE, 10000.0),
    "yarn-attention-factor": ("yarn", YARN_FACTOR, 10000.0),
    "yarn-untruncated": ("yarn", YARN_SMOOTH, 10000.0),
    "llama3": ("llama3", LLAMA3, 500000.0),
}


def oracle(kind: str, keys: dict, theta: float) -> tuple[np.ndarray, float]:
    """Frequencies and amplitude, one pair at a time, in float64."""
    original = keys.get("original_max_position_embeddings", MAX)
    factor = keys.get("factor", 1.0)
    plain = [theta ** (-2 * i / DIM) for i in range(DIM // 2)]
    if kind == "default":
        return np.array(plain), 1.0
    if kind == "linear":
        return np.array([f / factor for f in plain]), 1.0
    if kind == "llama3":
        out = []
        for f in plain:
            turns = original * f / (2 * math.pi)  # rotations within the original context
            if turns < keys["low_freq_factor"]:
                out.append(f / factor)
            elif turns > keys["high_freq_factor"]:
                out.append(f)
            else:
                share = (turns - keys["low_freq_factor"]) / (keys["high_freq_factor"] - keys["low_freq_factor"])
                out.append((1 - share) * f / factor + share * f)
        return np.array(out), 1.0
    # YaRN: pair i turns original * f / 2 pi times; the index where that equals beta bounds the ramp.
    bound = lambda beta: DIM / 2 * math.log(original / (2 * math.pi * beta)) / math.log(theta)  # noqa: E731
    low, high = bound(keys.get("beta_fast", 32.0)), bound(keys.get("beta_slow", 1.0))
    if keys.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    out = []
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        out.append(ramp * f / factor + (1 - ramp) * f)
    magnitude = lambda m: 0.1 * m * math.log(factor) + 1.0  # noqa: E731
    amplitude = keys.get("attention_factor")
    if amplitude is None and "mscale" in keys:
        amplitude = magnitude(keys["mscale"]) / magnitude(keys["mscale_all_dim"])
    return np.array(out), magnitude(1.0) if amplitude is None else amplitude


def new_layout(kind: str, keys: dict, theta: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


def old_layouts(kind: str, keys: dict, theta: float) -> list[dict]:
    if kind == "default":
        return [{"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": None}]
    return [{"rope_theta": theta, "rope_scaling": {name: kind, **keys}} for name in ("type", "rope_type")]


@pytest.mark.parametrize("case", CASES)
def test_B70_rope_values_of_both_layouts_match_the_float64_formula(case):
    kind, keys, theta = CASES[case]
    rope = RopeConfig.from_hf(new_layout(kind, keys, theta), MAX)
    for old in old_layouts(kind, keys, theta):
        assert RopeConfig.from_hf(old, MAX) == rope
    frequencies, amplitude = inverse_frequencies(rope, DIM)
    expected, expected_amplitude = oracle(kind, keys, theta)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=2e-6)
    assert amplitude == pytest.approx(expected_amplitude, rel=1e-12)
    positions = np.array([0, 1, 7, 100, 2000])
    cos, sin = rotary(rope, DIM, jnp.asarray(positions))
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[:, None] * expected
    np.testing.assert_allclose(cos, amplitude * np.cos(angles), atol=2e-3)
    np.testing.assert_allclose(sin, amplitude * np.sin(angles), atol=2e-3)


def test_rope_kinds_really_differ():
    """A test that compares formulas would pass if every kind fell through to the default."""
    tables = [inverse_frequencies(RopeConfig.from_hf(new_layout(*CASES[name]), MAX), DIM)[0] for name in CASES]
    for index, one in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not np.allclose(one, other, rtol=1e-3)


def test_rope_original_length_defaults_to_the_models_own():
    keys = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert RopeConfig.from_hf(keys, 777).original_max_position == 777


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type.*'longrope'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type.*'dynamic'"),
        ({"type": "mrope"}, "rope_type.*'mrope'"),
        ({"rope_type": "linear"}, r"\.factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, r"\.factor"),
        ({"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, r"\.factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
    ],
)
def test_rope_what_is_not_supported_is_refused_by_name(layout, keys, named):
    with pytest.raises(ConfigError, match=named):
        RopeConfig.from_hf({layout: keys}, MAX)


def test_rope_partial_rotary_at_the_top_level_is_refused():
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        RopeConfig.from_hf({"partial_rotary_factor": 0.25}, MAX)
    RopeConfig.from_hf({"partial_rotary_factor": 1.0}, MAX)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_B70_rotate_half_turns_in_float32_and_rounds_once(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 5, 2, DIM)), dtype)
    positions = rng.integers(0, 3000, (3, 5))
    rope = RopeConfig(theta=10000.0)
    cos, sin = rotary(rope, DIM, jnp.asarray(positions))
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    wide, c, s = np.asarray(x, np.float64), np.asarray(cos, np.float64), np.asarray(sin, np.float64)
    expected = np.empty_like(wide)
    for i in range(DIM // 2):  # pair (i, i + D/2): the rotate-half convention, not (2i, 2i + 1)
        a, b = wide[..., i], wide[..., i + DIM // 2]
        expected[..., i] = a * c[..., None, i] - b * s[..., None, i]
        expected[..., i + DIM // 2] = b * c[..., None, i] + a * s[..., None, i]
    half_ulp = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-20
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1.01 * half_ulp, atol=1e-6)
