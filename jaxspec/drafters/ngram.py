"""Prompt lookup: the longest suffix of the text that occurred before, and what followed it then.

Nothing is trained and nothing is loaded: the drafter is made by its name, `ngram`. It keeps the committed tokens of
every slot. Its proposals are chosen, not drawn, so q is a point and sampled requests stay lossless.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters.base import Batch, DraftSampling, Point, PrefixUse, Proposal, Rows, Shared, Slots, Terms
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Tap
from jaxspec.models.layout import RaggedLayout


@dataclasses.dataclass(frozen=True)
class NGram:
    """Suffixes of `min_ngram` to `max_ngram` tokens are looked up; longer ones win, then later ones."""

    vocab_size: int
    num_proposals: int = 8
    min_ngram: int = 1
    max_ngram: int = 3
    method: str = "ngram"
    taps: tuple[Tap, ...] = ()
    tree_nodes: int = 0
    tree_acceptance: str = "rejection"
    needs_teacher: bool = False

    def __post_init__(self) -> None:
        if self.num_proposals < 1:
            raise ConfigError(f"engine.num_proposals: found {self.num_proposals}, expected at least 1")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"engine.ngram_min and engine.ngram_max: found {self.min_ngram} and {self.max_ngram}, "
                "expected 1 <= ngram_min <= ngram_max"
            )

    @classmethod
    def without_checkpoint(cls, target: ModelConfig) -> NGram:
        """The drafter for a target."""
        return cls(target.vocab_size)

    def abstract_params(self, dtype: Any = jnp.float32) -> dict[str, Any]:
        """No parameters."""
        return {}

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> dict[str, Any]:
        """No parameters."""
        return {}

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> Int[Array, "slots L1"]:
        """Tokens by slot and position, and a last column that padding rows are written to."""
        room = (num_pages - 1) // max(num_slots, 1) * page_size  # page 0 belongs to nobody
        return jnp.zeros((num_slots, room + 1), jnp.int32)

    def prefix_use(self, num_pages: int, page_size: int, num_slots: int) -> PrefixUse:
        """The text is kept by slot: all of it must pass by."""
        return PrefixUse(in_pages=False)

    def commit(
        self, params: Any, shared: Shared, state: Int[Array, "slots L1"], rows: Rows, layout: RaggedLayout
    ) -> Int[Array, "slots L1"]:
        """Writes committed tokens at their positions."""
        owners = layout.requests if layout.owners is None else layout.owners[layout.requests]
        column = jnp.where(layout.valid, layout.positions, state.shape[1] - 1)
        return state.at[owners, column].set(rows.tokens.astype(jnp.int32))

    def propose(
        self,
        params: Any,
        shared: Shared,
        state: Int[Array, "slots L1"],
        slots: Slots,
        keys: Key[Array, "R"],
        sampling: DraftSampling,
    ) -> Proposal:
        """m tokens a request. Its confidence is 1 where the suffix was found, 0 where the proposal is a filler."""
        text = state[: slots.anchors.shape[0]]
        tokens, found = continuation(
            text, slots.anchors, slots.positions, self.num_proposals, self.min_ngram, self.max_ngram
        )
        confidence = jnp.broadcast_to(found[:, None], tokens.shape).astype(jnp.float32)
        return Proposal(tokens, Point(tokens, self.vocab_size), confidence)

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Raises ConfigError: there is nothing to train."""
        raise ConfigError("drafter.method: found 'ngram', expected a method with parameters to train")

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """Raises ConfigError: there is nothing to train."""
        raise ConfigError("drafter.method: found 'ngram', expected a method with parameters to train")

    def to_hf(self) -> dict[str, Any]:
        """Raises ConfigError: there is nothing to export."""
        raise ConfigError("drafter.method: found 'ngram', expected a method with a checkpoint")


def continuation(
    state: Int[Array, "R L1"],
    anchors: Int[Array, "R"],
    positions: Int[Array, "R"],
    count: int,
    shortest: int,
    longest: int,
) -> tuple[Int[Array, "R m"], Array]:
    """What followed the best earlier occurrence of the text's suffix, and whether there is one.

    The text is state[r, :position] and the anchor. Where the occurrence's continuation runs into the end of the text,
    it goes on periodically: a text that repeats itself is continued as such. Without an occurrence the anchor is
    repeated.
    """
    requests, room = state.shape[0], state.shape[1] - 1
    index = jnp.arange(room)
    text = jnp.where(index < positions[:, None], state[:, :room], -1)  # whatever is beyond the text matches nothing
    text = jnp.where(index == positions[:, None], anchors[:, None], text)
    matched = jnp.zeros((requests, room), jnp.int32)
    running = index < positions[:, None]  # an occurrence ends before the anchor
    for back in range(longest):
        suffix = jnp.take_along_axis(text, jnp.maximum(positions - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :room]
        running &= (earlier == suffix) & (earlier >= 0) & (positions >= back)[:, None]
        matched += running
    score = jnp.where(matched >= shortest, matched * room + index, -1)
    end = jnp.argmax(score, axis=1)
    found = jnp.take_along_axis(score, end[:, None], axis=1)[:, 0] >= 0
    period = jnp.where(found, positions - end, 1)
    start = jnp.where(found, end + 1, positions)
    where = start[:, None] + jnp.arange(count) % period[:, None]
    tokens = jnp.take_along_axis(text, jnp.minimum(where, room - 1), axis=1)
    return jnp.maximum(tokens, 0).astype(jnp.int32), found
