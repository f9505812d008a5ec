"""DFlash 2's candidate selector: it turns K candidates a slot, proposed independently, into one coherent path.

    C_j      = the K largest unary logits U_j of slot j
    S_j(a,b) = U_j(b) + <predecessor[a] * (W h_j), successor[b]>     b in C_j, a the token before

Slots are decided left to right, from the anchor on; a drawn token comes from softmax(S_j(a, .) / T) over the K
candidates, which is the whole of q: top-k, top-p and min-p of the request shape p only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafters.draws import inverse_cdf
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.parallel.rules import top_k

NAME = "candidate_selector"


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """Rank of the codebooks and candidates per slot."""

    rank: int = 256
    top_k: int = 16

    def check(self, vocab: int) -> None:
        """Raises ConfigError for sizes that make no selector."""
        if self.rank < 1:
            raise ConfigError(f"selector_rank: found {self.rank}, expected at least 1")
        if not 1 <= self.top_k <= vocab:
            raise ConfigError(f"selector_top_k: found {self.top_k}, expected 1 to vocab_size = {vocab}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The K best ids of each slot, best first, and their unary logits (float32)."""

    ids: Int[Array, "*b m K"]
    unary: Float[Array, "*b m K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Path:
    """A walk's tokens, the distribution over the candidates that each was drawn from, and the mass of its mode before a
    greedy request's becomes one-hot (a confidence: it depends on the tokens before the slot only)."""

    tokens: Int[Array, "R m"]
    probs: Float[Array, "R m K"]
    modes: Float[Array, "R m"]


def abstract_params(config: SelectorConfig, vocab: int, hidden: int, dtype: Any) -> ly.Params:
    """`candidate_selector.*` of the checkpoint; the codebooks carry no `.weight` there."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return {
        NAME: {
            "hidden_projection": {"weight": leaf(config.rank, hidden)},
            "predecessor_codebook": leaf(vocab, config.rank),
            "successor_codebook": leaf(vocab, config.rank),
        }
    }


def silent(params: ly.Params) -> ly.Params:
    """The selector's parameters with successors of zero: every score is the unary logit."""
    selector = params[NAME]
    return params | {NAME: selector | {"successor_codebook": jnp.zeros_like(selector["successor_codebook"])}}


def top_candidates(logits: Float[Array, "*b m V"], count: int) -> Candidates:
    """The `count` largest logits of each slot; equal ones by lowest id."""
    unary, ids = top_k(logits.astype(jnp.float32), count)
    return Candidates(ids.astype(jnp.int32), unary)


def _pairwise(
    params: ly.Params, previous: Int[Array, "*b m P"], hidden: Float[Array, "*b m H"], ids: Int[Array, "*b m K"]
) -> Float[Array, "*b m P K"]:
    """<predecessor[a] * (W h), successor[b]> in float32, without a matrix unit's rounding."""
    selector = params[NAME]
    wide = lambda name, tokens: ly.embed(selector[name], tokens).astype(jnp.float32)  # noqa: E731
    gate = ly.project(hidden, selector["hidden_projection"]["weight"]).astype(jnp.float32)
    left = wide("predecessor_codebook", previous) * gate[..., None, :]
    return jnp.einsum("...pr,...kr->...pk", left, wide("successor_codebook", ids), precision=jax.lax.Precision.HIGHEST)


def scores(
    params: ly.Params, candidates: Candidates, hidden: Float[Array, "*b m H"], previous: Int[Array, "*b m"]
) -> Float[Array, "*b m K"]:
    """S_j(previous_j, .): the tokens before are known."""
    return candidates.unary + _pairwise(params, previous[..., None], hidden, candidates.ids)[..., 0, :]


def lattice(
    params: ly.Params, candidates: Candidates, hidden: Float[Array, "*b m H"], anchors: Int[Array, "*b"]
) -> Float[Array, "*b m K K"]:
    """S_j(a, b) for every candidate a of the slot before [.., a, b]; before slot 0 stands the anchor, K times."""
    first = jnp.broadcast_to(anchors[..., None, None], (*anchors.shape, 1, candidates.ids.shape[-1]))
    previous = jnp.concatenate([first.astype(jnp.int32), candidates.ids[..., :-1, :]], axis=-2)
    return candidates.unary[..., None, :] + _pairwise(params, previous, hidden, candidates.ids)


def walk(
    table: Float[Array, "R m K K"],
    ids: Int[Array, "R m K"],
    greedy: Bool[Array, "R"],
    temperature: Float[Array, "R"],
    u: Float[Array, "R m"],
) -> Path:
    """Follows the lattice from the anchor: the best candidate of a greedy request (q is one-hot on it), a draw by
    inverse CDF of the others. No request's path depends on another's."""
    scale = jnp.where(greedy, 1.0, temperature)[:, None]

    def slot(taken: Int[Array, "R"], xs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        rows, uniform = xs
        row = jnp.take_along_axis(rows, taken[:, None, None], axis=1)[:, 0]
        best = jnp.argmax(row, axis=-1).astype(jnp.int32)
        drawn_from = jax.nn.softmax(row / scale, axis=-1)
        drawn = jnp.where(greedy, best, inverse_cdf(drawn_from, uniform))
        probs = jnp.where(greedy[:, None], jax.nn.one_hot(best, row.shape[-1]), drawn_from)
        return drawn, (drawn, probs, jnp.max(drawn_from, axis=-1))

    start = jnp.zeros(table.shape[0], jnp.int32)
    _, made = jax.lax.scan(slot, start, (jnp.moveaxis(table, 1, 0), jnp.moveaxis(u, 1, 0)))
    taken, probs, modes = (jnp.moveaxis(x, 0, 1) for x in made)
    return Path(jnp.take_along_axis(ids, taken[..., None], axis=-1)[..., 0], probs, modes)


def greedy_path(table: Float[Array, "R m K K"], ids: Int[Array, "R m K"]) -> Int[Array, "R m"]:
    """The greedy walk's tokens."""
    requests, slots = ids.shape[:2]
    return walk(table, ids, jnp.ones(requests, bool), jnp.ones(requests), jnp.zeros((requests, slots))).tokens
