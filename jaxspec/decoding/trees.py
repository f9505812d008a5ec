"""Tree proposals: who descends from whom, which path stands, and moving the accepted path's K/V into place.

Row 0 of a tree is the root (the anchor); node i is row i + 1. A parent's row comes before its children's. A chain is
the tree whose every row's parent is the row before it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Tree
from jaxspec.drafters.draws import inverse_cdf
from jaxspec.models.cache import KVPool, read_rows, write_rows
from jaxspec.models.layout import RaggedLayout, uniform_layout
from jaxspec.parallel.rules import anywhere

TREE_MODES = ("rejection", "match")


def accept_tree(
    logits: Float[Array, "R n1 V"],
    tokens: Int[Array, "R n"],
    tree: Tree,
    sampling: SlotSampling,
    u: Float[Array, "R n1"],
    u_last: Float[Array, "R"],
    limit: Int[Array, "R"],
    mode: str = "rejection",
) -> Acceptance:
    """Walks from the root. Greedy requests follow the child that equals the argmax.

    Sampled requests: "rejection" tries a row's children in order against what is left of its p (the proposals are
    fixed, so each has q = 1; a refused one is removed and p renormalised), "match" draws one token a row from p and
    follows the child that equals it. Both leave the target's law untouched. At most `limit` nodes are kept: the node
    behind them, if it was accepted, becomes the last token.
    """
    best = jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)
    greedy = _follow(tokens, tree, best)

    def sampled(_: None) -> tuple[Array, Array]:
        p = sampling.probabilities(logits)
        if mode == "match":
            drawn = inverse_cdf(p, u)
            node = _follow(tokens, tree, drawn)
            return node, jnp.take_along_axis(drawn, node[:, None], axis=1)[:, 0]
        node, left = _reject(p, tokens, tree, u)
        return node, inverse_cdf(left, u_last)

    at_greedy = jnp.take_along_axis(best, greedy[:, None], axis=1)[:, 0]
    drawn = jax.lax.cond(anywhere(jnp.any(~sampling.greedy)), sampled, lambda _: (greedy, at_greedy), None)
    node = jnp.where(sampling.greedy, greedy, drawn[0])
    token = jnp.where(sampling.greedy, at_greedy, drawn[1])
    path, length = _path(node, tree)
    kept = jnp.minimum(length, limit)
    behind = jnp.take_along_axis(path, jnp.minimum(kept, path.shape[1] - 1)[:, None], axis=1)[:, 0]
    behind_token = jnp.take_along_axis(tokens, jnp.maximum(behind - 1, 0)[:, None], axis=1)[:, 0]
    token = jnp.where(length > limit, behind_token, token)
    path = jnp.where(jnp.arange(path.shape[1]) < kept[:, None], path, 0)
    return Acceptance(kept.astype(jnp.int32), token.astype(jnp.int32), length.astype(jnp.int32), path=path)


def _follow(tokens: Int[Array, "R n"], tree: Tree, wanted: Int[Array, "R n1"]) -> Int[Array, "R"]:
    """Row of the deepest node reached by following, from the root, the first child that equals its row's wanted
    token.
    """

    def visit(index: Int[Array, ""], row: Int[Array, "R"]) -> Int[Array, "R"]:
        here = jnp.take_along_axis(wanted, row[:, None], axis=1)[:, 0]
        child = (tree.parents[:, index] == row) & tree.valid[:, index] & (tokens[:, index] == here)
        return jnp.where(child, index + 1, row)

    return jax.lax.fori_loop(0, tokens.shape[1], visit, jnp.zeros(tokens.shape[0], jnp.int32))


def _reject(
    p: Float[Array, "R n1 V"], tokens: Int[Array, "R n"], tree: Tree, u: Float[Array, "R n1"]
) -> tuple[Int[Array, "R"], Float[Array, "R V"]]:
    """Multi-round rejection: the last accepted row, and what is left of its p once its refused children are removed."""
    request = jnp.arange(tokens.shape[0])

    def visit(index: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        row, left = carry
        token = tokens[:, index]
        child = (tree.parents[:, index] == row) & tree.valid[:, index]
        mass = jnp.sum(left, axis=-1)
        accepted = child & (u[:, index] * mass < left[request, token])
        refused = child & ~accepted
        left = left.at[request, token].multiply(jnp.where(refused, 0.0, 1.0))
        left = jnp.where(accepted[:, None], p[:, index + 1], left)
        return jnp.where(accepted, index + 1, row), left

    start = (jnp.zeros(tokens.shape[0], jnp.int32), p[:, 0])
    row, left = jax.lax.fori_loop(0, tokens.shape[1], visit, start)
    empty = jnp.sum(left, axis=-1, keepdims=True) <= 0
    return row, jnp.where(empty, jnp.take_along_axis(p, row[:, None, None], axis=1)[:, 0], left)


def _path(node: Int[Array, "R"], tree: Tree) -> tuple[Int[Array, "R D"], Int[Array, "R"]]:
    """Rows from depth 1 down to `node`, zero-padded, and their number."""
    depths = jnp.pad(tree.depths, ((0, 0), (1, 0)))
    parents = jnp.pad(tree.parents, ((0, 0), (1, 0)))
    length = jnp.take_along_axis(depths, node[:, None], axis=1)[:, 0]

    def climb(carry: Int[Array, "R"], depth: Int[Array, ""]) -> tuple[Array, Array]:
        here = jnp.where(depth <= length, carry, 0)
        above = jnp.take_along_axis(parents, carry[:, None], axis=1)[:, 0]
        return jnp.where(depth <= length, above, carry), here

    _, rows = jax.lax.scan(climb, node, jnp.arange(tree.max_depth, 0, -1))
    return jnp.flip(rows.T, axis=1), length


def tree_layout(
    first: Int[Array, "R"], live: Bool[Array, "R"], tree: Tree, page_table: Int[Array, "R P"]
) -> RaggedLayout:
    """Rows of one verification: root and nodes at consecutive cache slots, positions by depth."""
    rows = tree.parents.shape[1] + 1
    layout = uniform_layout(first, jnp.where(live, rows, 0), page_table, rows)
    depths = jnp.pad(tree.depths, ((0, 0), (1, 0)))
    exists = jnp.pad(tree.valid, ((0, 0), (1, 0)), constant_values=True)
    parents = jnp.pad(tree.parents, ((0, 0), (1, 0)), constant_values=-1)
    absolute = jnp.where(parents < 0, -1, parents + layout.starts[:, None])
    positions = jnp.where(layout.valid.reshape(depths.shape), first[:, None] + depths, 0)
    return dataclasses.replace(
        layout,
        positions=positions.reshape(-1).astype(jnp.int32),
        parents=absolute.reshape(-1).astype(jnp.int32),
        valid=layout.valid & exists.reshape(-1),
        tree=True,
    )


def compact(pool: KVPool, path: Int[Array, "R D1"], committed: RaggedLayout) -> KVPool:
    """Copies the K/V of the accepted path (rows, root first) behind the root, so that the history is contiguous again.

    `committed` is the layout of those rows at their final slots. All rows are read before any is written.
    """
    first = committed.slots.reshape(path.shape)[:, :1]
    keys, values = read_rows(pool, committed.page_table, first + path)
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    return write_rows(pool, flat(keys), flat(values), committed)
