"""How many of each request's proposals are verified this round."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafters.base import Tree


def confident_nodes(tree: Tree, confidence: Float[Array, "R n"], threshold: float) -> Tree:
    """The tree without the nodes whose confidence, or that of a node on their way, is below `threshold`."""

    def below(_: int, kept: Array) -> Array:
        rows = jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)
        return kept & jnp.take_along_axis(rows, tree.parents, axis=1)

    kept = tree.valid & (confidence >= threshold)
    return dataclasses.replace(tree, valid=jax.lax.fori_loop(1, tree.max_depth, below, kept))


def verify_lengths(
    positions: Int[Array, "R"],
    num_proposals: int | Int[Array, "R"],
    limit: int,
    confidence: Float[Array, "R m"] | None = None,
    threshold: float = 0.0,
) -> Int[Array, "R"]:
    """Proposals kept a request (the anchor not counted): all of them, or those before the first whose confidence is
    below `threshold`; never more than fit, so that the round's last token still has a position below `limit`.

    Whether slot k is kept depends on tokens before k only, since its confidence does.
    """
    lengths = jnp.broadcast_to(jnp.asarray(num_proposals, jnp.int32), positions.shape)
    if threshold > 0 and confidence is not None:
        lengths = jnp.sum(jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1), axis=1)
    return jnp.clip(jnp.minimum(lengths, limit - 2 - positions), 0).astype(jnp.int32)
