"""Grouped-query scores, a softmax that survives empty rows, and the weighted sum: shared by every reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def scores(q: Float[Array, "*b Q heads D"], k: Float[Array, "*b K kv D"]) -> Float[Array, "*b kv group Q K"]:
    """q.k / sqrt(D) in float32, query heads grouped under their K/V head."""
    *batch, rows, heads, dim = q.shape
    kv = k.shape[-2]
    grouped = q.reshape(*batch, rows, kv, heads // kv, dim)
    return jnp.einsum("...qkgd,...skd->...kgqs", grouped, k, preferred_element_type=jnp.float32) * dim**-0.5


def masked_softmax(raw: Float[Array, "*b Q K"], mask: Bool[Array, "*m Q K"]) -> Float[Array, "*b Q K"]:
    """Softmax over the allowed keys, zero where a row has none; gradients stay finite there."""
    peak = jax.lax.stop_gradient(jnp.max(raw, axis=-1, keepdims=True, where=mask, initial=-1e30))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, raw - peak, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def mix(weights: Float[Array, "*b kv group Q K"], v: Float[Array, "*b K kv D"]) -> Float[Array, "*b Q heads D"]:
    """Weighted values in float32, heads flattened."""
    out = jnp.einsum("...kgqs,...skd->...qkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])
