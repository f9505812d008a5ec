"""Public entry of the joined norm, rotation and page write: the implementation is named, or `auto`, which says once
what it chose."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.rotate_write import gpu, reference

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {"reference": reference.rotate_write, "gpu": gpu.rotate_write}


def rotate_write(
    heads: Float[Array, "M all D"],
    norm: Float[Array, "rotated D"] | None,
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    page: Int[Array, "M"],
    offset: Int[Array, "M"],
    pool: Float[Array, "pages page combined D"],
    eps: float,
    implementation: str = "reference",
    **options: Any,
) -> tuple[Float[Array, "M heads D"], Float[Array, "M kv D"], Float[Array, "M kv D"], Float[Array, "pages page c D"]]:
    """See `reference.rotate_write`; `options` are an implementation's own (`interpret`).

    Raises ValueError for shapes that do not belong together and for an implementation that does not exist.
    """
    rotated = heads.shape[1] - pool.shape[2] // 2
    if heads.shape[2] != pool.shape[3] or heads.shape[2] % 2 or rotated <= pool.shape[2] // 2:
        raise ValueError(
            f"heads, pool: found {heads.shape}, {pool.shape}, expected [M, q + 2 kv, D], [.., .., 2 kv, D]"
        )
    if norm is not None and norm.shape != (rotated, heads.shape[2]):
        raise ValueError(f"norm: found {norm.shape}, expected {(rotated, heads.shape[2])}")
    if implementation == "auto":
        implementation = _chosen(jax.default_backend())
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: found {implementation!r}, expected auto or one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](heads, norm, cos, sin, page, offset, pool, eps, **options)


@functools.cache
def _chosen(backend: str) -> str:
    """What `auto` means here."""
    name = backend if backend in IMPLEMENTATIONS else "reference"
    log.info("rotate_write: auto chose %s on %s", name, backend)
    return name
