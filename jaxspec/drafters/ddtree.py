"""DDTree (arXiv 2604.12989): the best tree over the marginals of one DFlash block, under a budget of nodes.

A DFlash block gives one distribution a depth, whatever its parent, so a node is the tuple of its ranks on the way
down and its score the sum of their log-probabilities. Best-first search pops nodes in the order of (score descending,
ranks ascending); that order is reproduced here on the device, with static shapes. Verification draws one token a row
from the target and follows the child that equals it, so no q is needed. Checkpoints and training are DFlash's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.drafters.base import Batch, DraftSampling, Point, PrefixUse, Proposal, Rows, Shared, Slots, Terms, Tree
from jaxspec.drafters.dflash import DFlash
from jaxspec.errors import ConfigError
from jaxspec.models.decoder import Tap
from jaxspec.models.layout import RaggedLayout
from jaxspec.parallel.rules import top_k

_LOWEST = -1e30  # stands for -inf and NaN, so that no sum of scores becomes NaN


@dataclasses.dataclass(frozen=True)
class DDTree:
    """The method: `inner` gives the block, `tree_nodes` is the budget (the root is not counted)."""

    inner: DFlash
    tree_nodes: int
    method: str = "ddtree"
    tree_acceptance: str = "match"

    def __post_init__(self) -> None:
        if self.tree_nodes < 1:
            raise ConfigError(f"engine.tree_nodes: found {self.tree_nodes}, expected a budget of at least 1 node")

    @property
    def taps(self) -> tuple[Tap, ...]:
        """DFlash's."""
        return self.inner.taps

    @property
    def mask_token_id(self) -> int:
        """DFlash's."""
        return self.inner.mask_token_id

    @property
    def num_proposals(self) -> int:
        """Depth of the tree, B - 1."""
        return self.inner.num_proposals

    @property
    def needs_teacher(self) -> bool:
        """DFlash's."""
        return self.inner.needs_teacher

    def abstract_params(self, dtype: Any = jnp.float32) -> Any:
        """DFlash's."""
        return self.inner.abstract_params(dtype)

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> Any:
        """DFlash's."""
        return self.inner.init(key, dtype)

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> Any:
        """DFlash's."""
        return self.inner.init_state(num_pages, page_size, dtype, num_slots)

    def prefix_use(self, num_pages: int, page_size: int, num_slots: int) -> PrefixUse:
        """DFlash's."""
        return self.inner.prefix_use(num_pages, page_size, num_slots)

    def commit(self, params: Any, shared: Shared, state: Any, rows: Rows, layout: RaggedLayout) -> Any:
        """DFlash's: only the accepted path arrives here."""
        return self.inner.commit(params, shared, state, rows, layout)

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """The tree over rows 1 … B - 1 of one block."""
        hidden = self.inner.block_hidden(params, shared, state, slots)
        logits = self.inner.block_logits(shared, hidden[:, 1:])
        tokens, tree = best_first_tree(logits, self.tree_nodes)
        at = (jnp.arange(tokens.shape[0])[:, None], jnp.maximum(tree.depths - 1, 0), tokens)
        confidence = jax.nn.softmax(logits, axis=-1)[at] if self.inner.survival_confidence else None
        return Proposal(tokens, Point(tokens, logits.shape[-1]), confidence, tree, {"draft_hidden": hidden})

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """DFlash's."""
        return self.inner.loss(params, shared, batch, key)

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """DFlash's."""
        return self.inner.objective(terms)

    def to_hf(self) -> dict[str, Any]:
        """DFlash's: the budget is the server's business."""
        return self.inner.to_hf()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Search:
    """Rows 0 (root) … n. A row's next candidate is its child of rank `following`."""

    tokens: Int[Array, "R n1"]
    parents: Int[Array, "R n1"]
    ranks: Int[Array, "R n1 m"]  # ranks on the way from the root, -1 beyond the row's own depth
    depths: Int[Array, "R n1"]
    high: Float[Array, "R n1"]  # score = high + low, exact to about 48 bits
    low: Float[Array, "R n1"]
    following: Int[Array, "R n1"]
    valid: Bool[Array, "R n1"]


def best_first_tree(logits: Float[Array, "R m V"], budget: int) -> tuple[Int[Array, "R n"], Tree]:
    """Tokens and shape of the `budget` best nodes, in the order in which a best-first heap pops them.

    Equal scores pop by rank tuples in lexicographic order, as the reference's heap of tuples does; a rank orders equal
    log-probabilities by id. A tree that is exhausted early leaves its last rows invalid.
    """
    requests, depth, vocab = logits.shape
    width = min(budget, vocab)
    logits = logits.astype(jnp.float32)
    best, ids = top_k(logits, width)
    scores = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    scores = jnp.where(scores > _LOWEST, scores, _LOWEST)  # false for NaN
    rows, request = budget + 1, jnp.arange(requests)
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((requests, *shape), dtype)  # noqa: E731
    start = _Search(
        tokens=zeros(rows),
        parents=zeros(rows),
        ranks=jnp.full((requests, rows, depth), -1, jnp.int32),
        depths=zeros(rows),
        high=zeros(rows, dtype=jnp.float32),
        low=zeros(rows, dtype=jnp.float32),
        following=zeros(rows),
        valid=zeros(rows, dtype=bool).at[:, 0].set(True),
    )

    def pop(index: Int[Array, ""], search: _Search) -> _Search:
        level = jnp.minimum(search.depths, depth - 1)
        rank = jnp.minimum(search.following, width - 1)
        at = (request[:, None], level, rank)
        open_ = search.valid & (search.depths < depth) & (search.following < width)
        high, low = _add(search.high, search.low, scores[at])
        ranks = jnp.where(jnp.arange(depth) == search.depths[..., None], search.following[..., None], search.ranks)
        parent = _first(open_, high, low, ranks)
        pick = lambda x: jnp.take_along_axis(x, parent[:, None], axis=1)[:, 0]  # noqa: E731
        found = pick(open_)
        child = {
            "tokens": pick(ids[at]),
            "parents": parent,
            "ranks": ranks[request, parent],
            "depths": pick(search.depths) + 1,
            "high": pick(high),
            "low": pick(low),
            "following": jnp.zeros_like(parent),
            "valid": found,
        }
        grown = {name: getattr(search, name).at[:, index].set(value) for name, value in child.items()}
        grown["following"] = grown["following"].at[request, parent].add(found.astype(jnp.int32))
        return _Search(**grown)

    made = jax.lax.fori_loop(1, rows, pop, start)
    valid = made.valid[:, 1:]
    keep = lambda x: jnp.where(valid, x[:, 1:], 0).astype(jnp.int32)  # noqa: E731
    return keep(made.tokens), Tree(keep(made.parents), keep(made.depths), valid, depth)


def _add(high: Array, low: Array, value: Array) -> tuple[Array, Array]:
    """(high + low) + value as such a pair again (Knuth's two-sum): float32 sums of one path in another order would
    differ in their last bit, and equal paths would no longer tie."""
    total = high + value
    part = total - high
    error = (high - (total - part)) + (value - part) + low
    renormalised = total + error
    return renormalised, error - (renormalised - total)


def _first(
    open_: Bool[Array, "R n"], high: Float[Array, "R n"], low: Float[Array, "R n"], ranks: Int[Array, "R n m"]
) -> Int[Array, "R"]:
    """Index of the best open candidate: high, then low, then ranks in lexicographic order (a prefix comes first)."""
    left = open_
    for value in (high, low):
        left &= value == jnp.max(value, axis=1, keepdims=True, where=left, initial=-jnp.inf)
    for level in range(ranks.shape[-1]):
        rank = ranks[..., level]
        left &= rank == jnp.min(rank, axis=1, keepdims=True, where=left, initial=jnp.iinfo(jnp.int32).max)
    return jnp.argmax(left, axis=1).astype(jnp.int32)
