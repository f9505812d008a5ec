"""Public entry of anchor-block attention: the implementation is named, never guessed silently."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from pallas_kernels.anchor_attention.reference import anchor_attention as reference

IMPLEMENTATIONS = {"reference": reference}


def anchor_attention(*operands: Array, implementation: str = "reference", **options: Any) -> Array:
    """See `reference.anchor_attention`. Raises ValueError for an implementation that does not exist."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: found {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[implementation](*operands, **options)
