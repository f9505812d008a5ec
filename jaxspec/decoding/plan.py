"""How many of each request's proposals are verified this round."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def verify_lengths(
    positions: Int[Array, "R"],
    num_proposals: int,
    limit: int,
    confidence: Float[Array, "R m"] | None = None,
    threshold: float = 0.0,
) -> Int[Array, "R"]:
    """Proposals kept a request (the anchor not counted): all of them, or those before the first whose confidence is
    below `threshold`; never more than fit, so that the round's last token still has a position below `limit`.

    Whether slot k is kept depends on tokens before k only, since its confidence does.
    """
    lengths = jnp.full(positions.shape, num_proposals, jnp.int32)
    if threshold > 0 and confidence is not None:
        lengths = jnp.sum(jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1), axis=1)
    return jnp.clip(jnp.minimum(lengths, limit - 2 - positions), 0).astype(jnp.int32)
