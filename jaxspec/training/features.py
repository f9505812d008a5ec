"""Online features: the target's forward inside the training program. Nothing is stored.

Sequences are padded on the right and attention is causal, so padding cannot reach a real row.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.drafters.base import Drafter
from jaxspec.models.decoder import Decoder

__all__ = ["capture"]


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
