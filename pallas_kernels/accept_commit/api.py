"""Public entry of acceptance and commit: the implementation is named, or `auto`, which says once what it chose."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.accept_commit import gpu, reference, tpu
from pallas_kernels.accept_commit.rows import MODES, CommitRows

log = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, Any] = {"reference": reference, "tpu": tpu, "gpu": gpu}


def accept_commit(
    target: Float[Array, "M V"],
    drafts: Int[Array, "R m"],
    rows: CommitRows,
    pools: Sequence[Float[Array, "pages page combined D"]],
    values: Sequence[Float[Array, "M combined D"]],
    mode: str = "greedy",
    q: Float[Array, "R m V"] | None = None,
    u: Float[Array, "R m"] | None = None,
    u_last: Float[Array, "R"] | None = None,
    implementation: str = "reference",
    **options: Any,
) -> tuple[Int[Array, "R"], Int[Array, "R"], list[Array]]:
    """(accepted, last token, pools): `reference.accept`, then `reference.commit`; nothing passes the host between them.

    Raises ValueError for a mode, shape or implementation that does not exist, or uniforms that are missing.
    """
    if mode not in MODES:
        raise ValueError(f"mode: found {mode!r}, expected one of {', '.join(MODES)}")
    if mode == "ratio" and (u is None or u_last is None):
        raise ValueError("u, u_last: found none, expected uniforms for mode ratio")
    if q is not None and q.shape != (*drafts.shape, target.shape[1]):
        raise ValueError(f"q: found {q.shape}, expected {(*drafts.shape, target.shape[1])}")
    for pool, value in zip(pools, values, strict=True):
        if pool.shape[2:] != value.shape[1:] or value.shape[0] != target.shape[0]:
            raise ValueError(f"values: found {value.shape}, expected {(target.shape[0], *pool.shape[2:])}")
    if implementation == "auto":
        implementation = _chosen(jax.default_backend())
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: found {implementation!r}, expected auto or one of {', '.join(IMPLEMENTATIONS)}"
        )
    module = IMPLEMENTATIONS[implementation]
    accepted, token = module.accept(target, drafts, rows, mode, q, u, u_last, **options)
    return accepted, token, module.commit(pools, rows, accepted, values, **options)


@functools.cache
def _chosen(backend: str) -> str:
    """What `auto` means here."""
    name = backend if backend in IMPLEMENTATIONS else "reference"
    log.info("accept_commit: auto chose %s on %s", name, backend)
    return name
