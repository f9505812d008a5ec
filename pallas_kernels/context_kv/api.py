"""Public entry of the context projection: the implementation is named, or `auto`, which says once what it chose.

There is no GPU kernel: at a decoding round's few rows the products read their weights once, which XLA's do near the
copy rate already (`python -m pallas_kernels.bench --kernel context_kv`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.context_kv import reference, tpu
from pallas_kernels.context_kv.rows import ContextRows, LayerWeights

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {"reference": reference.context_kv, "tpu": tpu.context_kv}


def context_kv(
    features: Float[Array, "M F"],
    fc: Float[Array, "H F"],
    hidden_norm: Float[Array, "H"],
    layers: Sequence[LayerWeights],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    pools: Sequence[Float[Array, "pages page combined D"]],
    rows: ContextRows,
    eps: float = 1e-6,
    implementation: str = "reference",
    **options: Any,
) -> list[Array]:
    """See `reference.context_kv`. Raises ValueError for shapes or an implementation that do not fit."""
    for layer, pool in zip(layers, pools, strict=True):
        expected = (pool.shape[2] // 2 * pool.shape[3], fc.shape[0])
        if layer.k_proj.shape != expected or layer.v_proj.shape != expected:
            raise ValueError(f"k_proj, v_proj: found {layer.k_proj.shape}, {layer.v_proj.shape}, expected {expected}")
    if features.shape[1] != fc.shape[1] or cos.shape != (features.shape[0], pools[0].shape[3] // 2):
        raise ValueError(f"features, fc, cos: found {features.shape}, {fc.shape}, {cos.shape}: they do not fit")
    if implementation == "auto":
        implementation = _chosen(jax.default_backend())
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: found {implementation!r}, expected auto or one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](features, fc, hidden_norm, layers, cos, sin, pools, rows, eps, **options)


@functools.cache
def _chosen(backend: str) -> str:
    """What `auto` means here."""
    name = backend if backend in IMPLEMENTATIONS else "reference"
    log.info("context_kv: auto chose %s on %s", name, backend)
    return name
