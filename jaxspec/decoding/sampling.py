"""Logit processors: what turns a row of logits into the distribution that a request asked for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.parallel.rules import anywhere, rows_apart

GREEDY_BELOW = 1e-5  # logits over a smaller temperature overflow float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of every slot. Anything but a positive temperature is greedy, so padding rows may hold
    junk. `top_k` and `top_p` are both None where nobody asks for either: then there is no sort in the program.
    """

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"] | None
    top_p: Float[Array, "R"] | None
    min_p: Float[Array, "R"]

    @classmethod
    def zeros(cls, slots: int) -> SlotSampling:
        """All greedy."""
        ones, zeros = jnp.ones(slots, jnp.float32), jnp.zeros(slots, jnp.float32)
        return cls(zeros, jnp.zeros(slots, jnp.int32), ones, zeros)

    @property
    def greedy(self) -> Bool[Array, "R"]:
        """Rows that take the argmax."""
        return jnp.logical_not(self.temperature >= GREEDY_BELOW)

    def draft_probs(self, logits: Float[Array, "R *slots V"]) -> Float[Array, "R *slots V"]:
        """The same processing for a drafter's rows: a q shaped like p is accepted more often."""
        return self.probabilities(logits)

    def probabilities(self, logits: Float[Array, "R *slots V"]) -> Float[Array, "R *slots V"]:
        """p in float32: temperature, top-k, top-p, min-p in this order; one-hot argmax (lowest id) for greedy requests.

        The sort that top-k and top-p need runs only when a sampled row asks for either.
        """
        logits = rows_apart(logits.astype(jnp.float32))
        greedy, temperature, min_p = (_over(x, logits.ndim) for x in (self.greedy, self.temperature, self.min_p))
        scaled = jnp.where(greedy, 0.0, logits / jnp.where(greedy, 1.0, temperature))
        if self.top_k is not None and self.top_p is not None:
            asked = jnp.any(~self.greedy & ((self.top_k > 0) | (self.top_p < 1)))
            everything = lambda rows, *_: jnp.ones(rows.shape, bool)  # noqa: E731
            kept = jax.lax.cond(anywhere(asked), _top_k_top_p, everything, scaled, self.top_k, self.top_p)
            scaled = jnp.where(kept, scaled, -jnp.inf)
        probs = jax.nn.softmax(scaled, axis=-1)
        peak = jnp.max(probs, axis=-1, keepdims=True)
        probs = jnp.where((min_p > 0) & (probs < min_p * peak), 0.0, probs)
        probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
        best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
        return jnp.where(greedy, best, probs)


def _top_k_top_p(
    logits: Float[Array, "R *slots V"], top_k: Int[Array, "R"], top_p: Float[Array, "R"]
) -> Bool[Array, "R *slots V"]:
    """Ranks are exact: ties are broken towards the lowest id, so top_k = 1 keeps one id."""
    top_k, top_p = _over(top_k, logits.ndim), _over(top_p, logits.ndim)
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    kept = (top_k <= 0) | (rank < top_k)
    probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept &= (rank == 0) | (top_p >= 1) | (before < top_p)
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, kept, axis=-1, inplace=False)


def _over(values: Array, dimensions: int) -> Array:
    """[R] -> [R, 1, …]."""
    return values.reshape(-1, *[1] * (dimensions - 1))
