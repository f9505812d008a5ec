"""Trees grown on the device against plain Python, and the closure that verification relies on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.draft_tree import (
    DEFAULT_CHOICES,
    DynamicTree,
    StaticTree,
    first_level,
    keep_best,
    next_level,
)
from jaxspec.errors import ConfigError

pytestmark = pytest.mark.ci

V = 7


class Language:
    """Log-probabilities after a path, as a function of a state that hashes the path."""

    def __init__(self, seed: int):
        self.table = jax.nn.log_softmax(1.5 * jax.random.normal(jax.random.key(seed), (31, V)), axis=-1)

    def state(self, path: tuple[int, ...], request: int) -> int:
        value = request + 1
        for token in path:
            value = (5 * value + token + 1) % 31
        return value

    def forward(self, states: jax.Array, tokens: jax.Array, depth: int, visible: jax.Array):
        after = (5 * states[..., 0].astype(jnp.int32) + tokens + 1) % 31
        # a row sees exactly its line, as many rows as it is deep: anything else shows in its scores
        told = jnp.where(jnp.sum(visible, axis=-1) == depth, 1.0, jnp.nan)[..., None]
        return told * self.table[after], after[..., None].astype(jnp.float32)

    def log_probs(self, path: tuple[int, ...], request: int) -> np.ndarray:
        return np.asarray(self.table)[self.state(path, request)]


def grow(tree, language: Language, requests: int = 12):
    start = jnp.arange(1, requests + 1)
    return jax.jit(lambda: tree.grow(language.table[start], start[:, None].astype(jnp.float32), language.forward))()


def naive(tree: DynamicTree, language: Language, request: int) -> list[tuple[int, ...]]:
    """EAGLE-2 in plain Python: nodes as paths, in pool order."""

    def top(path: tuple[int, ...], score: float) -> list[tuple[tuple[int, ...], float]]:
        row = language.log_probs(path, request)
        return [((*path, int(t)), score + row[t]) for t in np.argsort(-row, kind="stable")[: tree.top_k]]

    pool = top((), 0.0)
    beam = pool
    for _ in range(tree.depth - 1):
        level = [child for path, score in beam for child in top(path, score)]
        pool = pool + level
        beam = sorted(level, key=lambda node: -node[1])[: tree.top_k]
    best = sorted(range(len(pool)), key=lambda index: -pool[index][1])[: tree.nodes]
    return [pool[index][0] for index in sorted(best)]


def paths_of(grown, request: int) -> list[tuple[int, ...]]:
    tokens, parents = np.asarray(grown.tokens)[request], np.asarray(grown.tree.parents)[request]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent <= len(paths), "a parent's row comes before its children's"
        paths.append((*(paths[parent - 1] if parent else ()), int(token)))
    np.testing.assert_array_equal(np.asarray(grown.tree.depths)[request], [len(path) for path in paths])
    return paths


@pytest.mark.parametrize(
    "tree", [DynamicTree(3, 3, 9), DynamicTree(2, 4, 14), DynamicTree(4, 1, 4), DynamicTree(1, 4, 4)]
)
def test_a_dynamic_tree_is_the_one_of_plain_python(tree: DynamicTree) -> None:
    language = Language(tree.nodes)
    grown = grow(tree, language)
    for request in range(12):
        assert paths_of(grown, request) == naive(tree, language, request)


def test_a_static_tree_takes_the_ranks_of_its_choices() -> None:
    tree, language = StaticTree(tuple(path for path in DEFAULT_CHOICES if len(path) < 5)), Language(9)
    grown = grow(tree, language)
    for request in range(3):
        for path, ranks in zip(paths_of(grown, request), tree.paths, strict=True):
            for depth, rank in enumerate(ranks):
                order = np.argsort(-language.log_probs(path[:depth], request), kind="stable")
                assert path[depth] == order[rank]


@pytest.mark.parametrize("tree", [DynamicTree(3, 3, 9), StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)))])
def test_a_node_knows_its_own_log_probability(tree) -> None:
    language = Language(4)
    grown = grow(tree, language)
    for request in range(12):
        paths = paths_of(grown, request)
        expected = [language.log_probs(path[:-1], request)[path[-1]] for path in paths]
        np.testing.assert_allclose(np.asarray(grown.log_probs)[request], expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["ties", "bf16", "impossible", "nan", "above zero", "certain"])
def test_the_kept_nodes_are_closed_under_ancestors(kind: str) -> None:
    """Equal scores, rounding, -inf, NaN and log-probabilities that rounding put above 0."""
    rng, tree, requests = np.random.default_rng(0), DynamicTree(4, 4, 20), 40
    raw = np.log(rng.dirichlet(np.ones(V) * 0.3, (requests, 13)))
    if kind == "ties":
        raw[:] = -1.0
    elif kind == "bf16":
        raw = np.asarray(jnp.asarray(raw, jnp.bfloat16), np.float32)
    elif kind == "impossible":
        raw[..., 2:] = -np.inf
    elif kind == "nan":
        raw[rng.random(raw.shape) < 0.3] = np.nan
    elif kind == "above zero":
        raw = np.where(rng.random(raw.shape) < 0.5, 1e-6, raw)
    else:
        raw = np.broadcast_to(np.where(np.arange(V) == 1, 0.0, -200.0), raw.shape)
    rows = jnp.asarray(raw, jnp.float32)

    def forward(states: jax.Array, tokens: jax.Array, depth: int, visible: jax.Array):
        return rows[:, 4 * depth - 3 : 4 * depth + 1], states

    grown = jax.jit(lambda: tree.grow(rows[:, 0], jnp.zeros((requests, 1)), forward))()
    for request in range(requests):
        paths = paths_of(grown, request)
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)
        assert len(paths) == 20 and max(map(len, paths)) <= 4


def test_siblings_are_distinct_and_the_order_is_that_of_the_pool() -> None:
    pool, beam = first_level(jnp.log(jnp.array([[0.5, 0.3]])), jnp.array([[4, 2]]))
    pool, beam = next_level(pool, beam, jnp.log(jnp.array([[[0.6, 0.2], [0.9, 0.1]]])), jnp.array([[[1, 3], [5, 0]]]))
    tokens, tree, places = keep_best(pool, 4, 2)
    np.testing.assert_array_equal(places, [[0, 1, 2, 4]])
    np.testing.assert_array_equal(tokens, [[4, 2, 1, 5]])
    np.testing.assert_array_equal(tree.parents, [[0, 0, 1, 2]])
    np.testing.assert_array_equal(beam.places, [[2, 4]])
    np.testing.assert_array_equal(beam.origins, [[0, 1]])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tree\.nodes: found 7, expected at most the 6 candidates"):
        DynamicTree(2, 2, 7)
    with pytest.raises(ConfigError, match=r"tree\.depth: found 0"):
        DynamicTree(2, 0, 1)
    with pytest.raises(ConfigError, match="prefixes"):
        StaticTree(((0,), (1, 0)))
    with pytest.raises(ConfigError, match="each once"):
        StaticTree(((0,), (0,)))
