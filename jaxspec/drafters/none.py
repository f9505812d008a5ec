"""No drafter: m = 0. Plain decoding is the round without proposals, which makes it the oracle of every method."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxspec.drafters.base import Batch, DraftSampling, Point, Proposal, Rows, Shared, Slots, Terms
from jaxspec.errors import ConfigError
from jaxspec.models.decoder import Tap
from jaxspec.models.layout import RaggedLayout


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Reads nothing, keeps nothing, proposes nothing."""

    vocab_size: int
    method: str = "none"
    taps: tuple[Tap, ...] = ()
    num_proposals: int = 0
    tree_nodes: int = 0
    tree_acceptance: str = "rejection"
    needs_teacher: bool = False

    def abstract_params(self, dtype: Any) -> dict[str, Any]:
        """No parameters."""
        return {}

    def init(self, key: Key[Array, ""], dtype: Any) -> dict[str, Any]:
        """No parameters."""
        return {}

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> tuple[()]:
        """No state."""
        return ()

    def commit(self, params: Any, shared: Shared, state: tuple[()], rows: Rows, layout: RaggedLayout) -> tuple[()]:
        """Nothing to write."""
        return state

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """Zero slots."""
        empty = jnp.zeros((slots.anchors.shape[0], 0), jnp.int32)
        return Proposal(empty, Point(empty, self.vocab_size))

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Raises ConfigError: there is nothing to train."""
        raise ConfigError("drafter.method: found 'none', expected a method with parameters to train")

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """Raises ConfigError: there is nothing to train."""
        raise ConfigError("drafter.method: found 'none', expected a method with parameters to train")

    def to_hf(self) -> dict[str, Any]:
        """Raises ConfigError: there is nothing to export."""
        raise ConfigError("drafter.method: found 'none', expected a method with a checkpoint")
