"""Weights and rows of the projection, as plain arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pages import TRASH_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One draft layer's projections, [out, in] as checkpoints store them; `k_norm` None: the method has none."""

    k_proj: Float[Array, "kvD H"]
    v_proj: Float[Array, "kvD H"]
    k_norm: Float[Array, "D"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextRows:
    """Where M rows go: row i to slot slots[i] of its request's pages; rows that are not `valid` are padding.
    No two valid rows have one place."""

    valid: Bool[Array, "M"]
    requests: Int[Array, "M"]
    slots: Int[Array, "M"]
    page_table: Int[Array, "R P"]

    def places(self, page: int) -> tuple[Int[Array, "M"], Int[Array, "M"]]:
        """(page, offset) of each row; (trash page, 0) for padding and for a slot past the context's limit."""
        held = self.valid & (self.slots >= 0) & (self.slots < self.page_table.shape[1] * page)
        slot = jnp.where(held, self.slots, 0)
        entry = self.page_table[jnp.where(held, self.requests, 0), slot // page]
        return jnp.where(held, entry, TRASH_PAGE), slot % page
