"""Rotary position embeddings (rotate-half form), always computed in float32."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [D/2] in float32 and the factor that multiplies cos and sin.

    Kinds default, linear, yarn (arXiv 2309.00071) and llama3 as the Hugging Face configs mean them.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    slow = wavelength > rope.original_max_position / low
    fast = wavelength < rope.original_max_position / high
    return np.where(slow, base / rope.factor, np.where(fast, base, blended)).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotary(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """cos and sin [*rows, D/2] in float32 of absolute `positions`."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "*rows heads dim"], cos: Float[Array, "*rows half"], sin: Float[Array, "*rows half"]
) -> Float[Array, "*rows heads dim"]:
    """Applies the rotation to the head vectors; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
