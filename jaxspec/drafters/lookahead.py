"""Attention of EAGLE-3's training-time test: one pass over the sequence for each step that serving would draft."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.anchor_attention.api import lookahead_attention


@dataclasses.dataclass(frozen=True)
class Causal:
    """Whole sequences [B, S], rows at or past `lengths` [B] padding, by the kernels of the step that has no step
    before it. Hands K and V on."""

    lengths: Int[Array, "B"] | None

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Any) -> tuple[Array, Any]:
        none = jnp.zeros((*k.shape[:2], 1, *k.shape[2:]), k.dtype)
        return lookahead_attention(q, k, v, none, none, 0, self.lengths), (k, v)


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Attention of training step i > 0 over whole sequences: it sees the keys of step 0 (`Causal`) up to its row and,
    of the steps since, its own row's only."""

    first: Any  # (keys, values, lengths) of step 0
    own: tuple[Array, Array]  # K and V of steps 1 … n - 1 [n - 1, B, S, kv, D]
    index: Any  # i of this step, traced

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Any) -> tuple[Array, Any]:
        keys, values, lengths = self.first
        own_keys, own_values = (
            jax.lax.dynamic_update_index_in_dim(old, new, self.index - 1, 0)
            for old, new in zip(self.own, (k, v), strict=True)
        )
        # one row's own keys are a sequence of `steps` keys for that row alone
        mine = jnp.moveaxis(own_keys, 0, 2), jnp.moveaxis(own_values, 0, 2)  # [B, S, steps, kv, D]
        return lookahead_attention(q, keys, values, *mine, self.index, lengths), (own_keys, own_values)
