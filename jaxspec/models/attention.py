"""Attention that a model is given: each object knows its mask, its cache and its kernel.

An attention is called as `attend(q, k, v, cache, window) -> (out, cache)` with q [*rows, heads, D] and k, v
[*rows, kv heads, D]; `window` is the layer's window (own row counted), 0 for full attention. Scores and softmax are
float32; a row that may see nothing gets zeros, never NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.cache import gather, gather_known, places, write_rows
from jaxspec.models.layout import RaggedLayout
from pallas_kernels.rotate_write.api import rotate_write
from pallas_kernels.softmax import masked_softmax, mix, scores
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.rows import VerifyRows, pack_bits

Window = int | Int[Array, ""]


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Window) -> tuple[Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class Joined:
    """A joined product on its way to attention: heads [M, all, D] (the queries', K's, V's), the norm's rows of q and k
    (None: no norm), and the rotation."""

    heads: Array
    norm: Array | None
    eps: float
    cos: Array
    sin: Array


@dataclasses.dataclass(frozen=True)
class Attend:
    """An attention on one layer's cache. `joined` may be asked instead where the attention has a kernel for it."""

    attention: Attention
    cache: Any
    window: Window

    def __call__(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        return self.attention(q, k, v, self.cache, self.window)

    @property
    def joins(self) -> bool:
        """Whether `joined` may be called."""
        return getattr(self.attention, "joins", False)

    def joined(self, joined: Joined) -> tuple[Array, Any]:
        """Norm, rotation, write and attention."""
        attention: Any = self.attention
        return attention.joined(joined, self.cache, self.window)


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
    """Rows of a RaggedLayout over paged K/V: rows write first, then attend every slot up to their own; in a tree, the
    committed slots and their ancestors. `implementation` is the reference below, or a kernel's that reads the pages in
    place (`pallas_kernels.verify_attention`)."""

    layout: RaggedLayout
    implementation: str = "reference"

    def __call__(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> tuple[Array, Array]:
        cache = write_rows(cache, k, v, self.layout)
        return self.written(q, k, v, cache, window), cache

    def written(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> Array:
        """Attention of rows whose K and V are in the cache."""
        layout = self.layout
        if self.implementation != "reference":
            return self._kernel(q, k, v, cache, window)
        rows, exists = layout.grid()
        if layout.tree:
            keys, values, mask, distance = self._tree(cache, rows, exists)
        else:
            last = jnp.max(jnp.where(exists, layout.slots[rows], -1), axis=1)
            keys, values = gather(cache, layout.page_table, last + 1)
            distance = layout.slots[rows][:, :, None] - jnp.arange(keys.shape[1])
            mask = exists[:, :, None] & (distance >= 0)
        mask &= (window == 0) | (distance < window)
        out = mix(masked_softmax(scores(q[rows], keys), mask[:, None, None]), values)
        offset = jnp.arange(q.shape[0]) - layout.starts[layout.requests]
        return out[layout.requests, jnp.clip(offset, 0, layout.max_rows - 1)].astype(q.dtype)

    def _kernel(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> Array:
        layout = self.layout
        rows = VerifyRows(
            layout.starts,
            layout.lengths,
            layout.slots[layout.starts],
            layout.requests,
            layout.page_table,
            layout.max_rows,
            layout.positions if layout.tree else None,
            pack_bits(layout.ancestors()) if layout.tree else None,
        )
        mask = "tree" if layout.tree else "causal"
        out = verify_attention(q, k, v, cache, rows, mask, window, implementation=self.implementation)
        return jnp.where(layout.valid[:, None, None], out, 0) if layout.tree else out  # of a chain padding has no owner

    def _tree(self, cache: Array, rows: Array, exists: Array) -> tuple[Array, Array, Array, Array]:
        """K, V, mask and distance [R, Q, L] of tree rows. A slot of the tree holds a node at its own position; the
        slot of a node that does not exist holds anything."""
        layout = self.layout
        exists = exists & layout.valid[rows]
        slot = jnp.arange(layout.page_table.shape[1] * cache.shape[1])
        offset = slot - layout.slots[rows[:, :1]]
        inside = (offset >= 0) & (offset < layout.max_rows) & (layout.lengths > 0)[:, None]
        offset = jnp.clip(offset, 0, layout.max_rows - 1)
        committed = slot < layout.slots[rows[:, :1]]
        known = committed | (inside & jnp.take_along_axis(exists, offset, axis=1))
        keys, values = gather_known(cache, layout.page_table, known)
        above = jnp.take_along_axis(layout.ancestors(), offset[:, None], axis=2) & inside[:, None]
        positions = layout.positions[rows]
        at = jnp.where(inside, jnp.take_along_axis(positions, offset, axis=1), slot)
        mask = exists[:, :, None] & (committed[:, None] | above) & known[:, None]
        return keys, values, mask, positions[:, :, None] - at[:, None]


@dataclasses.dataclass(frozen=True)
class PagedParts:
    """Groups of rows side by side in one forward, each over paged K/V by its own layout: verification beside prefill,
    whose segments are so much longer that one grid for both would be nearly empty. No request is in two groups."""

    layouts: tuple[RaggedLayout, ...]
    implementation: str = "reference"

    def __call__(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> tuple[Array, Array]:
        for layout, part in self._parts():
            cache = write_rows(cache, k[part], v[part], layout)
        return self._attend(q, k, v, cache, window), cache

    @property
    def joins(self) -> bool:
        """Whether `joined` has a kernel."""
        return self.implementation == "gpu"

    def joined(self, joined: Joined, cache: Array, window: Window) -> tuple[Array, Array]:
        """See `Attend.joined`."""
        found = [places(layout, cache.shape[1]) for layout in self.layouts]
        page, offset = (jnp.concatenate(column) for column in zip(*found, strict=True))
        q, k, v, cache = rotate_write(
            joined.heads, joined.norm, joined.cos, joined.sin, page, offset, cache, joined.eps, self.implementation
        )
        return self._attend(q, k, v, cache, window), cache

    def _attend(self, q: Array, k: Array, v: Array, cache: Array, window: Window) -> Array:
        outs = [
            PagedCausal(layout, self.implementation).written(q[part], k[part], v[part], cache, window)
            for layout, part in self._parts()
        ]
        return jnp.concatenate(outs)

    def _parts(self) -> list[tuple[RaggedLayout, slice]]:
        ends = itertools.accumulate(layout.positions.shape[0] for layout in self.layouts)
        return [
            (layout, slice(end - layout.positions.shape[0], end))
            for layout, end in zip(self.layouts, ends, strict=True)
        ]
