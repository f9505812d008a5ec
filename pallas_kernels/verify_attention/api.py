"""Public entry of the verify attention: the implementation is named, or `auto`, which says once what it chose."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.verify_attention import gpu, library, reference, tpu
from pallas_kernels.verify_attention.rows import MASKS, Scalar, VerifyRows

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {
    "reference": reference.verify_attention,
    "tpu": tpu.verify_attention,
    "tpu_library": library.verify_attention,
    "gpu": gpu.verify_attention,
}


def verify_attention(
    q: Float[Array, "M heads D"],
    k: Float[Array, "M kv D"],
    v: Float[Array, "M kv D"],
    pool: Float[Array, "pages page combined D"],
    rows: VerifyRows,
    mask: str = "causal",
    window: Scalar = 0,
    inner_window: Scalar | None = None,
    implementation: str = "reference",
    **options: Any,
) -> Float[Array, "M heads D"]:
    """See `reference.verify_attention`. `tpu_library` needs the own rows in the pool, the others do not read them
    there; `options` are an implementation's own (`interpret`).

    Raises ValueError for a shape, mask or implementation that does not exist.
    """
    if mask not in MASKS:
        raise ValueError(f"mask: found {mask!r}, expected one of {', '.join(MASKS)}")
    if pool.shape[2:] != (2 * k.shape[1], k.shape[2]) or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(f"pool, q, k: found {pool.shape}, {q.shape}, {k.shape}, expected [pages, page, 2 kv, D], …")
    if implementation == "auto":
        reason = library.why_not(pool, mask, window, inner_window)
        implementation = _chosen(jax.default_backend(), reason)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: found {implementation!r}, expected auto or one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](q, k, v, pool, rows, mask, window, inner_window, **options)


@functools.cache
def _chosen(backend: str, reason: str | None) -> str:
    """What `auto` means here; the library's kernel wherever it can."""
    name = {"gpu": "gpu", "tpu": "tpu_library" if reason is None else "tpu"}.get(backend, "reference")
    log.info("verify_attention: auto chose %s on %s%s", name, backend, f" ({reason})" if name == "tpu" else "")
    return name
