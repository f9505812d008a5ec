"""Trees of an autoregressive drafter, grown on the device with static shapes.

EAGLE-2 (arXiv 2406.16858) and EAGLE-3 expand the `top_k` most likely paths level by level and keep the best of all
nodes seen; EAGLE-1 (arXiv 2401.15077) has one fixed tree of child ranks. Both return nodes whose parents come first.

Scores are sums of log-probabilities, each at most 0, so no path scores above its own prefix, and equal scores keep the
lower pool index, which a prefix always has: the kept set is closed under ancestors in any precision.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafters.base import Tree
from jaxspec.errors import ConfigError
from jaxspec.parallel.rules import top_k

# `mc_sim_7b_63` of the EAGLE repository: ranks of the children along each path.
DEFAULT_CHOICES = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0, 0), (0, 0, 1),
    (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


class Forward(Protocol):
    """Runs f draft rows a request: the state before each row [R, f, H], its token [R, f], its depth below the root, and
    which of the n rows run so far, its own last, it may see [R, f, n]. Gives log-probabilities and new states."""

    def __call__(
        self, states: Array, tokens: Array, depth: int, visible: Array
    ) -> tuple[Float[Array, "R f V"], Float[Array, "R f H"]]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grown:
    """Node tokens as the drafter numbers them, the log-probability of each behind its parent, the tree, and the
    drafter's states, level by level [R, f, H]."""

    tokens: Int[Array, "R n"]
    log_probs: Float[Array, "R n"]
    tree: Tree
    states: list[Float[Array, "R f H"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Candidates in the order they were made: token, cumulative score, its parent's place in the pool (-1: root), and
    its own log-probability behind that parent."""

    tokens: Int[Array, "R P"]
    scores: Float[Array, "R P"]
    parents: Int[Array, "R P"]
    log_probs: Float[Array, "R P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beam:
    """Candidates that are expanded: their places in the pool and, of the beam before, the row each descends from."""

    places: Int[Array, "R k"]
    origins: Int[Array, "R k"]


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """`nodes` (the root not counted) of at most `depth` levels, `top_k` children a row and `top_k` rows a level.

    SafeAILab's `total_token` is nodes + 1 and its `depth` is one less than here; SGLang's `num_steps` is depth and its
    `num_draft_tokens` nodes + 1.
    """

    top_k: int = 10
    depth: int = 8
    nodes: int = 59

    def __post_init__(self) -> None:
        for name in ("top_k", "depth", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tree.{name}: found {getattr(self, name)}, expected at least 1")
        if self.nodes > self.candidates:
            raise ConfigError(
                f"tree.nodes: found {self.nodes}, expected at most the {self.candidates} candidates that top_k "
                f"{self.top_k} and depth {self.depth} make"
            )

    @property
    def candidates(self) -> int:
        """Size of the pool."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def widest(self) -> int:
        """Children of one row."""
        return self.top_k

    def grow(self, log_probs: Float[Array, "R V"], state: Float[Array, "R H"], forward: Forward) -> Grown:
        """Expands from the root's log-probabilities and the state behind them, then keeps the best nodes."""
        k, requests = self.top_k, log_probs.shape[0]
        pool, beam = first_level(*best(log_probs, k))
        states = jnp.broadcast_to(state[:, None], (requests, k, state.shape[-1]))
        visible = jnp.broadcast_to(jnp.eye(k, dtype=bool), (requests, k, k))
        trace = []
        for depth in range(1, self.depth):
            tokens = jnp.take_along_axis(pool.tokens, beam.places, axis=1)
            log_probs, states = forward(states, tokens, depth, visible)
            trace.append(states)
            pool, beam = next_level(pool, beam, *best(log_probs, k))
            states = jnp.take_along_axis(states, beam.origins[:, :, None], axis=1)
            above = jnp.take_along_axis(visible, beam.origins[:, :, None], axis=1)
            visible = jnp.concatenate([above, jnp.broadcast_to(jnp.eye(k, dtype=bool), (requests, k, k))], axis=2)
        tokens, tree, places = keep_best(pool, self.nodes, self.depth)
        return Grown(tokens, jnp.take_along_axis(pool.log_probs, places, axis=1), tree, trace)


def best(log_probs: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The k most likely tokens, lowest id first on ties. NaN counts as impossible; rounding above 0 is cut off."""
    known = jnp.where(jnp.isnan(log_probs), -jnp.inf, jnp.minimum(log_probs.astype(jnp.float32), 0.0))
    return top_k(known, k)


def first_level(scores: Float[Array, "R k"], tokens: Int[Array, "R k"]) -> tuple[Pool, Beam]:
    """The root's children; all of them are expanded."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Pool(tokens, scores, jnp.full_like(tokens, -1), scores), Beam(places, jnp.zeros_like(places))


def next_level(
    pool: Pool, beam: Beam, log_probs: Float[Array, "R k k"], tokens: Int[Array, "R k k"]
) -> tuple[Pool, Beam]:
    """The beam's children join the pool; the k best of them are the next beam."""
    requests, k, _ = tokens.shape
    scores = jnp.take_along_axis(pool.scores, beam.places, axis=1)[:, :, None] + log_probs
    parents = jnp.broadcast_to(beam.places[:, :, None], tokens.shape)
    flat = Pool(*(x.reshape(requests, -1) for x in (tokens, scores, parents, log_probs)))
    _, chosen = top_k(flat.scores, k)
    places = chosen + pool.tokens.shape[1]
    return jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), pool, flat), Beam(places, chosen // k)


def keep_best(pool: Pool, nodes: int, max_depth: int) -> tuple[Int[Array, "R n"], Tree, Int[Array, "R n"]]:
    """The best nodes in pool order, so that parents come first; also their places in the pool."""
    _, places = top_k(pool.scores, nodes)
    places = jnp.sort(places, axis=1)
    tokens, above = (jnp.take_along_axis(x, places, axis=1) for x in (pool.tokens, pool.parents))
    parents = 1 + jax.vmap(jnp.searchsorted)(places, above)  # row of each parent among the kept ones
    parents = jnp.where(above < 0, 0, parents).astype(jnp.int32)
    depths = depths_of(parents, max_depth)
    return tokens, Tree(parents, depths, jnp.ones(parents.shape, bool), max_depth), places


def depths_of(parents: Int[Array, "R n"], max_depth: int) -> Int[Array, "R n"]:
    """Depth of each node below the root."""
    rows = jnp.pad(parents, ((0, 0), (1, 0)))

    def climb(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        row, depth = carry
        return jnp.take_along_axis(rows, row, axis=1), depth + (row > 0)

    _, depth = jax.lax.fori_loop(0, max_depth, climb, (parents, jnp.ones_like(parents)))
    return depth


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A fixed tree: every path is the tuple of its child ranks (0: the most likely)."""

    choices: tuple[tuple[int, ...], ...] = DEFAULT_CHOICES

    def __post_init__(self) -> None:
        known = set(self.choices)
        if not self.choices or len(known) != len(self.choices):
            raise ConfigError(f"tree.choices: found {len(self.choices)} paths, expected at least one, each once")
        for path in self.choices:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in known):
                raise ConfigError(
                    f"tree.choices: found {list(path)}, expected child ranks whose prefixes are all there"
                )

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes in row order: by length, then by ranks."""
        return tuple(sorted(self.choices, key=lambda path: (len(path), path)))

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """Row of each node's parent."""
        row = {path: index + 1 for index, path in enumerate(self.paths)} | {(): 0}
        return np.asarray([row[path[:-1]] for path in self.paths], np.int32)

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """Rows that have children, the root first: each of them has a table of its `widest` most likely tokens."""
        return tuple(sorted(set(self.parents.tolist())))

    @property
    def depth(self) -> int:
        """Levels."""
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        """Nodes, the root not counted."""
        return len(self.paths)

    @property
    def widest(self) -> int:
        """Children that a row may have: the largest rank and those before it."""
        return 1 + max(path[-1] for path in self.paths)

    def table_slots(self, width: int) -> np.ndarray:
        """Where each row's token stands when the root's token and the tables of `width` follow one another."""
        table = {row: index for index, row in enumerate(self.inner)}
        slots = [
            1 + width * table[int(parent)] + path[-1] for parent, path in zip(self.parents, self.paths, strict=True)
        ]
        return np.asarray([0, *slots], np.int64)

    def tree(self, requests: int) -> Tree:
        """The same shape for every request."""
        depths = np.asarray([len(path) for path in self.paths], np.int32)
        over = lambda x: jnp.broadcast_to(jnp.asarray(x), (requests, self.nodes))  # noqa: E731
        return Tree(over(self.parents), over(depths), over(np.ones(self.nodes, bool)), self.depth)

    def grow(self, log_probs: Float[Array, "R V"], state: Float[Array, "R H"], forward: Forward) -> Grown:
        """Fills the tree level by level; only rows with children are run."""
        requests, width = log_probs.shape[0], self.widest
        scores, tables = best(log_probs[:, None], width)
        states, trace = state[:, None], []
        rows, run = [0], []  # of the level whose tables and states these are; all rows run so far
        tokens: dict[int, Any] = {}
        chances: list[Any] = []
        for depth in range(1, self.depth + 1):
            level = [index + 1 for index, path in enumerate(self.paths) if len(path) == depth]
            for row in level:
                at = (slice(None), rows.index(self.parents[row - 1]), self.paths[row - 1][-1])
                tokens[row] = tables[at]
                chances.append(scores[at])
            below = [row for row in level if row in self.inner]
            if not below:
                continue
            origins = np.asarray([rows.index(self.parents[row - 1]) for row in below])
            run += below
            visible = jnp.broadcast_to(jnp.asarray(self._visible(below, run)), (requests, len(below), len(run)))
            log_probs, states = forward(
                states[:, origins], jnp.stack([tokens[row] for row in below], axis=1), depth, visible
            )
            trace.append(states)
            scores, tables = best(log_probs, width)
            rows = below
        every = jnp.stack([tokens[row + 1] for row in range(self.nodes)], axis=1)
        return Grown(every, jnp.stack(chances, axis=1), self.tree(requests), trace)

    def _visible(self, rows: list[int], run: list[int]) -> Bool[np.ndarray, "f n"]:
        lines = [{self.paths[row - 1][:length] for length in range(1, len(self.paths[row - 1]) + 1)} for row in rows]
        return np.asarray([[self.paths[other - 1] in line for other in run] for line in lines])


DraftTree = DynamicTree | StaticTree
