"""Fresh weights, as the published trainers draw them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxspec.models import layers as ly
from jaxspec.models.decoder import random_params


def fresh_params(abstract: ly.Params, key: Key[Array, ""]) -> ly.Params:
    """Normal(0, 0.02) matrices, norms at one, biases at zero."""
    drawn = ly.flatten(random_params(abstract, key, 0.02))
    vectors = {name: leaf for name, leaf in drawn.items() if leaf.ndim == 1}
    fixed = {name: jnp.ones_like(leaf) if "norm" in name else jnp.zeros_like(leaf) for name, leaf in vectors.items()}
    return ly.unflatten(drawn | fixed)
