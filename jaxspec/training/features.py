"""A step's features: the target's forward inside the training program, or what was stored of it.

Sequences are padded on the right and attention is causal, so padding cannot reach a real row. Online the rows of
padding are what the target makes of them, stored ones are zero: nothing reads either.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import Drafter
from jaxspec.models.decoder import Decoder
from jaxspec.training.featurestore.codec import dequantise
from pallas_kernels.anchor_attention.api import anchor_attention

__all__ = ["capture", "step_features"]


@dataclasses.dataclass(frozen=True)
class Causal:
    """Causal attention [B, S] by the kernels of the drafter's blocks: a row is a block of its own, anchored at itself.
    No array of S x S exists where a kernel runs."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, window: Any) -> tuple[jax.Array, Any]:
        places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        rows, keys, values = (x[:, :, None] for x in (q, k, v))
        out = anchor_attention(rows, k, v, keys, values, places, jnp.ones_like(places, bool), window)
        return out[:, :, 0], cache


def capture(
    model: Decoder, drafter: Drafter, target_params: Any, input_ids: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The drafter's training inputs.

    Args:
      target_params: stacked layers (scanned; compile time does not grow with depth).
      input_ids: int32 [B, S].
      dtype: the drafter's compute dtype.

    Returns:
      features [B, S, T*H], raw residual stream at the drafter's taps; teacher_hidden [B, S, H] after the final norm,
      in the target's dtype, or None when the drafter's loss reads none. No gradient reaches the target.
    """
    output = model.forward_sequences(target_params, input_ids, drafter.taps, attention=Causal())
    features = jax.lax.stop_gradient(output.features).astype(dtype)
    teacher = jax.lax.stop_gradient(output.hidden) if drafter.needs_teacher else None
    return features, teacher


def step_features(
    model: Decoder, drafter: Drafter, target_params: Any, batch: dict[str, jax.Array], dtype: Any, teacher_dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """`capture` of a batch, or the stored features that it brings (see `featurestore.codec.Layout.fields`).

    Args:
      batch: arrays [B, ...].
      teacher_dtype: the target's, which a stored teacher is given back in.
    """
    if "features" in batch:
        features = batch["features"].astype(dtype)
    elif "codes" in batch:
        features = dequantise(batch["codes"], batch["scales"], batch["first"]).astype(dtype)
    else:
        return capture(model, drafter, target_params, batch["input_ids"], dtype)
    return features, batch["teacher"].astype(teacher_dtype) if drafter.needs_teacher else None
