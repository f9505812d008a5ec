"""Log probabilities for a client: of the chosen ids, and of the best ids beside them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.parallel.rules import rows_apart, top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logarithms. `rank` of the chosen id is 1 for the best; `ids` are the k best, lowest id first on ties."""

    chosen: Float[Array, "*rows"]
    rank: Int[Array, "*rows"]
    ids: Int[Array, "*rows k"]
    values: Float[Array, "*rows k"]


def logprobs(logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"], top: int) -> Logprobs:
    """Of given ids, in float32. The logits are the raw ones unless a client asked otherwise.

    Rows of a verified block take the tokens that were emitted after them. Rows of a prompt take the prompt's next
    token: row i says what the prompt's token i + 1 was worth, and its first token has none.
    """
    logits = rows_apart(logits.astype(jnp.float32))
    logits = jnp.where(logits == 0, 0.0, logits)  # top_k puts 0 before -0, which are a tie
    total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    values, ids = top_k(logits, top)
    earlier = jnp.arange(logits.shape[-1]) < tokens[..., None]
    rank = 1 + jnp.sum((logits > picked) | ((logits == picked) & earlier), axis=-1)
    return Logprobs(picked[..., 0] - total, rank.astype(jnp.int32), ids.astype(jnp.int32), values - total[..., None])
