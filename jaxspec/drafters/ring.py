"""Context K/V of sliding layers: a ring of rows a slot, so that their memory does not grow with the context.

The target's full layers and the drafter's keep every page, and one page id stands for the same page of every pool; a
sliding layer's rows behind its window could be given back only if no pool needed the page. So such a layer has no
pages: the row of position t stands at t modulo the ring's size. What a prefix hit skips is not in a ring; the engine
runs the last window of every prompt (`recomputed`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.cache import KVPool, init_pool, write_rows
from jaxspec.models.layout import RaggedLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """Slot i's rows are page i + 1 of `rows`, a pool whose pages are as long as the ring; page 0 is trash."""

    rows: KVPool

    @property
    def size(self) -> int:
        """Rows that are kept of a slot."""
        return self.rows.shape[1]

    def write(self, keys: Float[Array, "M kv D"], values: Float[Array, "M kv D"], layout: RaggedLayout) -> Ring:
        """Writes committed rows, of each request the last `size` ones."""
        slots = self.rows.shape[0] - 1
        owners = jnp.arange(layout.starts.shape[0]) if layout.owners is None else layout.owners
        first = layout.slots[jnp.clip(layout.starts, 0, layout.slots.shape[0] - 1)]
        kept = layout.slots >= (first + layout.lengths)[layout.requests] - self.size
        ringed = dataclasses.replace(
            layout,
            slots=layout.slots % self.size,
            valid=layout.valid & kept,
            page_table=1 + jnp.minimum(owners, slots - 1)[:, None],
        )
        return Ring(write_rows(self.rows, keys, values, ringed))

    def read(
        self, ends: Int[Array, "R"], window: int
    ) -> tuple[Float[Array, "R L kv D"], Float[Array, "R L kv D"], Int[Array, "R"]]:
        """K and V of the first R slots' last L = `size` rows before `ends`, zero outside the window, and the position
        of the first of them."""
        first = jnp.maximum(ends - self.size, 0)
        positions = first[:, None] + jnp.arange(self.size)
        page = 1 + jnp.arange(ends.shape[0])
        rows = self.rows[page[:, None], positions % self.size]
        # The rest may never have been written, and a masked score times a NaN value would still be NaN.
        known = (positions < ends[:, None]) & (positions >= ends[:, None] - (window - 1))
        rows = jnp.where(known[:, :, None, None], rows, 0)
        return rows[:, :, 0::2], rows[:, :, 1::2], first


def ring_size(window: int | None, proposals: int, num_pages: int, page_size: int, num_slots: int) -> int | None:
    """Rows of a ring for a layer of this window; None where it has none, or where its pages take no more memory."""
    size = (window or 0) + proposals + 1
    return size if window and 0 < num_slots * size < (num_pages - 1) * page_size else None


def init_context(
    ring: int | None, num_pages: int, page_size: int, num_slots: int, kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> KVPool | Ring:
    """A layer's empty context."""
    if ring is None:
        return init_pool(num_pages, page_size, kv_heads, head_dim, dtype)
    return Ring(init_pool(1 + num_slots, ring, kv_heads, head_dim, dtype))
