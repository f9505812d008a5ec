"""Attention of EAGLE-3's training-time test: one pass over the sequence for each step that serving would draft."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.softmax import masked_softmax, mix, scores


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
        rows = jnp.arange(q.shape[1])
        causal = (rows[:, None] >= rows)[None, None, None]
        if lengths is not None:
            causal = causal & (rows < lengths[:, None])[:, None, None, None, :]
        steps = own_keys.shape[0]
        # one row's own keys are a sequence of `steps` keys for that row alone
        mine = jnp.moveaxis(own_keys, 0, 2), jnp.moveaxis(own_values, 0, 2)  # [B, S, steps, kv, D]
        near = jnp.moveaxis(scores(q[:, :, None], mine[0])[..., 0, :], 1, 3)  # [B, kv, group, S, steps]
        raw = jnp.concatenate([scores(q, keys), near], axis=-1)
        passed = jnp.broadcast_to(jnp.arange(steps) < self.index, (*causal.shape[:-1], steps))
        weights = masked_softmax(raw, jnp.concatenate([causal, passed], axis=-1))
        out = mix(weights[..., : rows.size], values)
        own_weights = jnp.moveaxis(weights[..., rows.size :], 3, 1)[..., None, :]
        out = out + mix(own_weights, mine[1])[:, :, 0]
        return out.astype(q.dtype), (own_keys, own_values)
