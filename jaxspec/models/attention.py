"""Attention that a model is given: each object knows its mask, its cache and its kernel.

An attention is called as `attend(q, k, v, cache, window) -> (out, cache)` with q [*rows, heads, D] and k, v
[*rows, kv heads, D]; `window` is the layer's window (own row counted), 0 for full attention. Scores and softmax are
float32; a row that may see nothing gets zeros, never NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.cache import gather, write_rows
from jaxspec.models.layout import RaggedLayout
from pallas_kernels.softmax import masked_softmax, mix, scores

Window = int | Int[Array, ""]


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Window) -> tuple[Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class DenseCausal:
    """Whole sequences without a cache: q, k, v [B, S, heads, D]. Rows at or past `lengths` [B] are padding."""

    lengths: Int[Array, "B"] | None = None

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Window) -> tuple[Array, Any]:
        index = jnp.arange(q.shape[1])
        distance = index[:, None] - index
        mask = (distance >= 0) & ((window == 0) | (distance < window))
        mask = mask[None, None, None]
        if self.lengths is not None:
            mask = mask & (index < self.lengths[:, None])[:, None, None, None, :]
        return mix(masked_softmax(scores(q, k), mask), v).astype(q.dtype), cache


@dataclasses.dataclass(frozen=True)
class PagedCausal:
    """Rows of a RaggedLayout over paged K/V: rows write first, then attend every slot up to their own."""

    layout: RaggedLayout

    def __call__(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> tuple[Array, Array]:
        layout = self.layout
        cache = write_rows(cache, k, v, layout)
        rows, exists = layout.grid()
        last = jnp.max(jnp.where(exists, layout.slots[rows], -1), axis=1)
        keys, values = gather(cache, layout.page_table, last + 1)
        distance = layout.slots[rows][:, :, None] - jnp.arange(keys.shape[1])
        mask = exists[:, :, None] & (distance >= 0) & ((window == 0) | (distance < window))
        out = mix(masked_softmax(scores(q[rows], keys), mask[:, None, None]), values)
        offset = jnp.arange(q.shape[0]) - layout.starts[layout.requests]
        return out[layout.requests, jnp.clip(offset, 0, layout.max_rows - 1)].astype(q.dtype), cache
