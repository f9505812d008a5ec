"""A step's features: the target's forward inside the training program, or what was stored of it.

Sequences are padded on the right and attention is causal, so padding cannot reach a real row. Online the rows of
padding are what the target makes of them, stored ones are zero: nothing reads either.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.drafters.base import Drafter
from jaxspec.models.decoder import Decoder
from jaxspec.training.featurestore.codec import dequantise

__all__ = ["capture", "step_features"]


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
    output = model.forward_sequences(target_params, input_ids, drafter.taps)
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
