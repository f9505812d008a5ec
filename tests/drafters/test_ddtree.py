"""The tree that DDTree builds, against a heap; its law, enumerated through the shipped verification."""

from __future__ import annotations

import functools
import heapq
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.runner import SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.decoding.trees import accept_tree
from jaxspec.drafters.base import first_proposals
from jaxspec.drafters.ddtree import DDTree, best_first_tree
from jaxspec.errors import ConfigError
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import tiny_draft, tiny_target

pytestmark = pytest.mark.ci

Node = tuple[int, int, int]  # token, depth, parent (0 = root)
build = jax.jit(best_first_tree, static_argnums=1)


def by_heap(logits: np.ndarray, budget: int) -> list[Node]:
    """The reference's search, from its description: a heap of (-score, ranks, parent, depth, rank), in float64."""
    depths, vocab = logits.shape
    width = min(budget, vocab)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    total = np.asarray(jax.jit(functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True))(logits))
    logp = (np.take_along_axis(logits, ids, axis=1) - total).astype(np.float32).astype(float)
    heap: list[Any] = [(-logp[0, 0], (0,), 0, 1, 0)]
    nodes: list[Node] = []
    while heap and len(nodes) < budget:
        score, ranks, parent, depth, rank = heapq.heappop(heap)
        nodes.append((int(ids[depth - 1, rank]), depth, parent))
        if rank + 1 < width:
            sibling = score - (logp[depth - 1, rank + 1] - logp[depth - 1, rank])
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent, depth, rank + 1))
        if depth < depths:
            heapq.heappush(heap, (score - logp[depth, 0], (*ranks, 0), len(nodes), depth + 1, 0))
    return nodes


def nodes_of(logits: np.ndarray, budget: int) -> list[Node]:
    tokens, tree = build(jnp.asarray(logits[None]), budget)
    rows = zip(*(np.asarray(x)[0].tolist() for x in (tokens, tree.depths, tree.parents, tree.valid)), strict=True)
    return [(token, depth, parent) for token, depth, parent, valid in rows if valid]


@pytest.mark.parametrize("depths, vocab, budget", [(1, 40, 8), (3, 40, 16), (5, 7, 12), (4, 3, 24), (7, 300, 33)])
def test_nodes_and_order_are_the_heaps(depths: int, vocab: int, budget: int) -> None:
    rng = np.random.default_rng(depths * vocab)
    for scale in (0.3, 2.0, 8.0):
        for _ in range(6):
            logits = (scale * rng.normal(size=(depths, vocab))).astype(np.float32)
            assert nodes_of(logits, budget) == by_heap(logits, budget)


def test_ties_are_broken_by_the_ranks_on_the_way_down() -> None:
    """Small integers, rows repeated: sums of one path in another order are equal, so hundreds of scores tie."""
    rng = np.random.default_rng(1)
    for index in range(60):
        logits = rng.integers(-1, 2, (4, 4)).astype(np.float32)
        if index % 2:
            logits = np.repeat(logits[:1], 4, axis=0)
        assert nodes_of(logits, 14) == by_heap(logits, 14)
    for _ in range(60):
        # gaps of 32 make the log-probabilities exact, so paths through different rows tie as well: an older parent
        # may then have the later ranks
        logits = np.float32(-32) * np.sort(np.concatenate([np.zeros((4, 1)), rng.integers(1, 4, (4, 3))], axis=1))
        assert nodes_of(logits.astype(np.float32), 14) == by_heap(logits.astype(np.float32), 14)
    flat = np.zeros((3, 3), np.float32)  # every path of a depth ties
    assert [node[:2] for node in nodes_of(flat, 4)] == [(0, 1), (1, 1), (2, 1), (0, 2)]


def test_order_survives_scores_that_float32_cannot_tell_apart() -> None:
    """Path sums that differ in the 30th bit: a plain float32 sum would call them equal and take the lower rank."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        logits = np.full((6, 8), -1.0, np.float32) + rng.normal(size=(6, 8)).astype(np.float32) * 1e-6
        logits[0] += np.float32(40.0) * np.arange(8)
        assert nodes_of(logits, 30) == by_heap(logits, 30)


def test_a_tree_that_is_exhausted_leaves_invalid_rows() -> None:
    logits = np.log(np.array([[0.7, 0.3], [0.6, 0.4]], np.float32))
    tokens, tree = build(jnp.asarray(logits[None]), 9)
    assert np.asarray(tree.valid).sum() == 6  # 2 + 4 nodes and no more
    assert not np.asarray(tree.valid)[0, 6:].any()
    assert (np.asarray(tokens)[0, 6:] == 0).all() and (np.asarray(tree.parents)[0, 6:] == 0).all()


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_drafter_that_overflows_still_gives_a_sound_tree(fault: float) -> None:
    logits = np.random.default_rng(3).normal(size=(2, 4, 8)).astype(np.float32)
    logits[0, 1, 3] = fault
    tokens, tree = (jax.tree.map(np.asarray, x) for x in build(jnp.asarray(logits), 12))
    assert ((tokens >= 0) & (tokens < 8)).all()
    rows = np.arange(1, 13)
    assert (tree.parents < rows).all() and (tree.depths <= 4).all()
    parents = np.pad(tree.depths, ((0, 0), (1, 0)))
    above = np.take_along_axis(parents, tree.parents, axis=1)
    assert (tree.depths == above + 1)[tree.valid].all()


def law_of(tokens: np.ndarray, tree: Any, table: list[np.ndarray], temperature: float) -> np.ndarray:
    """P(first 3 tokens) when one round over the tree is followed by plain decoding. Each row's uniform is integrated
    over the intervals of its own CDF: the draw is constant between two cumulative sums."""
    depth, vocab, rows = tree.max_depth, table[0].shape[-1], tokens.shape[1] + 1
    soft = lambda x: np.exp(x / temperature) / np.exp(x / temperature).sum(-1, keepdims=True)  # noqa: E731
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, rows):
        paths.append((*paths[int(tree.parents[0, row - 1])], int(tokens[0, row - 1])))
    logits = np.stack([table[len(path)][path] for path in paths])
    p = soft(logits)
    choices = [[(token, p[row, token]) for token in range(vocab)] for row in range(rows)]
    before = np.cumsum(p, axis=1) - p
    combinations = list(itertools.product(*choices))
    drawn = np.array([[token for token, _ in one] for one in combinations])
    weight = np.array([np.prod([chance for _, chance in one]) for one in combinations])
    u = before[np.arange(rows), drawn] + 0.5 * p[np.arange(rows), drawn]
    count = len(combinations)
    out = accept_tree(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, rows, vocab)),
        jnp.broadcast_to(tokens, (count, rows - 1)),
        jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), tree),
        SlotSampling(*(jnp.full(count, x) for x in (temperature, 0, 1.0, 0.0))),
        jnp.asarray(u, jnp.float32),
        jnp.zeros(count),
        jnp.full(count, depth),
        "match",
    )
    accepted, path, last = (np.asarray(x) for x in (out.accepted, out.path, out.token))
    law = np.zeros((vocab,) * (depth + 1))
    for r in range(depth + 1):
        here = np.flatnonzero(accepted == r)
        joint = np.zeros((vocab,) * (r + 1))
        said = np.concatenate([tokens[0][np.maximum(path[here, :r] - 1, 0)], last[here, None]], axis=1)
        np.add.at(joint, tuple(said.T), weight[here])
        for level in range(r + 1, depth + 1):
            joint = joint[..., None] * soft(table[level])
        law += joint
    return law


@pytest.mark.ci
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "vocab, budget", [pytest.param(2, 4, marks=REPEATS), (3, 5), pytest.param(4, 4, marks=REPEATS)]
)
def test_B02_the_law_of_a_round_is_the_targets(temperature: float, vocab: int, budget: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        table = [2 * rng.normal(size=(vocab,) * (level + 1)) for level in range(3)]
        tokens, tree = best_first_tree(jnp.asarray(rng.normal(size=(1, 2, vocab)), jnp.float32), budget)
        wanted = np.exp(table[0] / temperature) / np.exp(table[0] / temperature).sum()
        for level in (1, 2):
            raw = np.exp(table[level] / temperature)
            wanted = wanted[..., None] * raw / raw.sum(-1, keepdims=True)
        np.testing.assert_allclose(law_of(np.asarray(tokens), tree, table, temperature), wanted, atol=1e-6)


def test_a_tree_is_sized_by_its_budget_and_by_nothing_else() -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    tree = DDTree(draft.drafter, 6)
    assert (tree.num_proposals, tree.tree_nodes, tree.tree_acceptance) == (draft.drafter.num_proposals, 6, "match")
    assert tree.to_hf() == draft.drafter.to_hf()
    served = type(draft)(tree, draft.params)
    with pytest.raises(ConfigError, match=r"engine\.num_proposals: found 2, expected null.*engine\.tree_nodes"):
        SlotRunner(target, served, num_slots=1, max_context=64, num_proposals=2)
    with pytest.raises(ConfigError, match=r"engine\.acceptance: found 'block', expected 'ratio'"):
        SlotRunner(target, served, num_slots=1, max_context=64, acceptance="block")
    with pytest.raises(ConfigError, match=r"engine\.tree_nodes: found 0, expected a budget"):
        DDTree(draft.drafter, 0)
    tokens, shape = best_first_tree(jnp.zeros((1, 2, 4)), 3)
    from jaxspec.drafters.base import Point, Proposal

    with pytest.raises(ConfigError, match="expected null for a tree"):
        first_proposals(Proposal(tokens, Point(tokens, 4), tree=shape), 1)
