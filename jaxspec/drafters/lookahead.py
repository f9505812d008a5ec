"""Attention of EAGLE-3's training-time test: one pass over the sequence for each step that serving would draft."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.anchor_attention.api import lookahead_attention


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Attention of one training step over whole sequences. Step 0 is causal and hands its K/V on; step i > 0 sees the
    keys of step 0 up to its row and, of the steps since, its own row's only."""

    first: Any  # DenseCausal at step 0, else (keys, values, lengths) of step 0
    own: tuple[Array, Array] | None  # K and V of steps 1 … n - 1 [n - 1, B, S, kv, D]
    index: Any  # i of this step, traced

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Any) -> tuple[Array, Any]:
        if self.own is None:
            return self.first(q, k, v, None, 0)[0], (k, v)
        keys, values, lengths = self.first
        own_keys, own_values = (
            jax.lax.dynamic_update_index_in_dim(old, new, self.index - 1, 0)
            for old, new in zip(self.own, (k, v), strict=True)
        )
        # one row's own keys are a sequence of `steps` keys for that row alone
        mine = jnp.moveaxis(own_keys, 0, 2), jnp.moveaxis(own_values, 0, 2)  # [B, S, steps, kv, D]
        return lookahead_attention(q, keys, values, *mine, self.index, lengths), (own_keys, own_values)
