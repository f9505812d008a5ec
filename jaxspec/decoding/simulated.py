"""A round whose proposals stand at given rates: for measurements of speed, where the weights say nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.decoding.acceptance import Acceptance, simulated_accept
from jaxspec.decoding.ragged import RaggedProgram
from jaxspec.decoding.round import DecodeState, Weights
from jaxspec.drafters.base import Proposal
from jaxspec.drafters.draws import Purpose, uniforms
from jaxspec.errors import ConfigError, problem


@dataclasses.dataclass(frozen=True)
class SimulatedProgram(RaggedProgram):
    """`RaggedProgram` where slot k of m stands with probability `rates[k]` once the slots before it do, and where a
    drafter that has a confidence says `confidence[k]`. Its output is nobody's law. Raises ConfigError for numbers that
    are no m probabilities, and for a drafter of trees.
    """

    rates: tuple[float, ...] = ()
    confidence: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.drafter.tree_nodes:
            raise ConfigError(problem("simulated acceptance", "a drafter of trees", "one of chains"))
        for name in ("rates", "confidence"):
            found = getattr(self, name)
            if len(found) != self.proposals or not all(math.isfinite(x) and 0 <= x <= 1 for x in found):
                expected = f"{self.proposals} probabilities, one a proposal"
                raise ConfigError(problem(f"simulated acceptance: {name}", repr(found), expected))

    def propose(self, weights: Weights, state: DecodeState, keys: Key[Array, "R"]) -> Proposal:
        """The drafter's own work, under another confidence."""
        proposal = super().propose(weights, state, keys)
        own = proposal.confidence
        if own is None:
            return proposal
        # depends on the head's own number, so that the compiler keeps what makes it
        said = jnp.where(jnp.isnan(own), 0.0, jnp.asarray(self.confidence, own.dtype))
        return dataclasses.replace(proposal, confidence=said)

    def accept(
        self,
        state: DecodeState,
        proposal: Proposal,
        logits: Float[Array, "R m1 V"],
        lengths: Int[Array, "R"],
        keys: Key[Array, "R"],
    ) -> Acceptance:
        """Who stays is drawn; the last token is the target's argmax."""
        likely: Any = jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)
        positions = state.slots.positions[:, None] + 1 + jnp.arange(proposal.tokens.shape[1])
        u = uniforms(keys, positions, Purpose.ACCEPT)
        return simulated_accept(jnp.asarray(self.rates[: u.shape[1]]), likely, u, lengths)
