"""Random draws that are a function of (seed, sample index, anchor position, token position, purpose) and nothing else.

Neither the slot, the step nor the neighbours enter a key, so a request's draws do not depend on its company, and each
(anchor, position) pair occurs once, so no uniform is ever used twice.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class Purpose(enum.IntEnum):
    """What a uniform decides."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2  # the round's last token: residual, bonus, or the first token after prefill


def round_keys(keys: Key[Array, "R"], samples: Int[Array, "R"], anchors: Int[Array, "R"]) -> Key[Array, "R"]:
    """Keys of one round: the request's key folded with its sample index and the anchor's position."""
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(keys, samples), anchors)


def uniforms(keys: Key[Array, "R"], positions: Int[Array, "R n"], purpose: Purpose) -> Float[Array, "R n"]:
    """One uniform in [0, 1) for each token position of each request."""

    def one(key: Key[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), int(purpose)), (), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


def inverse_cdf(weights: Float[Array, "*rows V"], u: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Smallest id whose cumulative weight exceeds u times the total (weights need not be normalised).

    Only ids of positive weight are ever returned: a parallel cumulative sum may rise by a rounding error over a zero
    weight, and u times the total may round up to the total.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    beyond = positive & (cumulative > u[..., None] * cumulative[..., -1:])
    last = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(positive, axis=-1), axis=-1)
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last).astype(jnp.int32)
