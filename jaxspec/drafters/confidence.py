"""Confidence of methods without a confidence head: the mass on the mode of the distribution that a slot draws from.

max_v q_k(v | d_<k) looks at the tokens before slot k and at nothing else, so a planner that cuts a proposal by it
decides on slot k without knowing token k, which is what keeps a cut lossless (RECIPES B12). The probability of the
token that was drawn would not do: it is a function of the very token that it decides on.

The nodes of a tree are chosen, not drawn: given the tokens before the round, every one of them is known, so the
probability of the node's own token is as innocent as the mode's mass, and says which sibling is worth a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafters.base import DraftSampling
from jaxspec.parallel.rules import anywhere


def survival(logits: Float[Array, "R m V"], sampling: DraftSampling) -> Float[Array, "R m"]:
    """Mass of each slot's mode, in (0, 1].

    Sampled requests: of the distribution that the drafter draws from, after temperature and filters. Greedy requests:
    of the plain softmax, since their one-hot distribution says nothing.
    """
    plain = jnp.max(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), axis=-1)

    def drawn(_: None) -> Float[Array, "R m"]:
        return jnp.where(sampling.greedy[:, None], plain, jnp.max(sampling.draft_probs(logits), axis=-1))

    return jax.lax.cond(anywhere(jnp.any(~sampling.greedy)), drawn, lambda _: plain, None)
