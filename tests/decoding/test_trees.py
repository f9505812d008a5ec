"""Tree verification: who attends whom, which path stands (enumerated, not sampled), and where its K/V end up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.acceptance import accept
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.decoding.trees import accept_tree, compact, tree_layout
from jaxspec.drafters.base import Point, Proposal, Tree
from jaxspec.models.attention import PagedCausal
from jaxspec.models.cache import gather, init_pool, write_rows
from jaxspec.models.layout import uniform_layout
from tests.decoding.enumeration import TINY, _cumulative, _intervals
from tests.helpers import worlds

pytestmark = pytest.mark.ci

# two children of the root, two of each of them; row 0 is the root
BINARY = np.array([0, 0, 1, 1, 2, 2])


def tree_of(parents: Any, requests: int = 1, valid: Any = None) -> Tree:
    parents = np.broadcast_to(np.asarray(parents, np.int32), (requests, np.shape(parents)[-1]))
    depths = np.zeros_like(parents)
    for node in range(parents.shape[1]):
        above = parents[:, node]
        depths[:, node] = 1 + np.where(
            above > 0, np.take_along_axis(depths, np.maximum(above - 1, 0)[:, None], 1)[:, 0], 0
        )
    valid = np.ones(parents.shape, bool) if valid is None else np.broadcast_to(valid, parents.shape)
    return Tree(jnp.asarray(parents), jnp.asarray(depths), jnp.asarray(valid), int(depths.max()))


def line(parents: np.ndarray, row: int) -> list[int]:
    """Rows from the root down to `row`."""
    rows = [row]
    while rows[-1]:
        rows.append(int(parents[rows[-1] - 1]))
    return rows[::-1]


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    return np.array([rng.integers(0, node + 1) for node in range(nodes)])


# -- acceptance, enumerated -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """p[k] [V] * k + [V] for k = 0 … 2, and a tree of distinct siblings over it."""

    p: tuple[np.ndarray, ...]
    parents: np.ndarray
    tokens: np.ndarray
    valid: np.ndarray

    @property
    def vocab(self) -> int:
        return self.p[0].shape[-1]

    def path(self, row: int) -> tuple[int, ...]:
        return tuple(int(self.tokens[one - 1]) for one in line(self.parents, row)[1:])

    def rows(self) -> np.ndarray:
        """The target's distribution at every row [n + 1, V]."""
        return np.stack([self.p[len(self.path(row))][self.path(row)] for row in range(len(self.parents) + 1)])

    def law(self) -> np.ndarray:
        law = self.p[0]
        for table in self.p[1:]:
            law = law[..., None] * table
        return law / law.sum()


def random_world(rng: np.random.Generator, vocab: int, zeros: float, drop: float = 0.0) -> World:
    def table(depth: int) -> np.ndarray:
        raw = rng.dirichlet(np.ones(vocab) * 0.7, (vocab,) * depth)
        raw = (
            np.where(rng.random(raw.shape) < zeros, 0.0, raw)
            + 1e-3 * np.eye(vocab)[rng.integers(0, vocab, raw.shape[:-1])]
        )
        raw = (raw / raw.sum(-1, keepdims=True)).astype(np.float32).astype(np.float64)
        return raw

    tokens = np.concatenate([rng.choice(vocab, 2, replace=False) for _ in range(3)])
    valid = rng.random(6) >= drop
    valid[2:4] &= valid[0]
    valid[4:6] &= valid[1]
    return World(tuple(table(depth) for depth in range(3)), BINARY, tokens, valid)


@functools.partial(jax.jit, static_argnames=("mode", "max_depth"))
def served(logits, tokens, parents, depths, valid, temperature, u, u_last, limit, *, mode, max_depth):
    requests = tokens.shape[0]
    ones = jnp.ones(requests)
    sampling = SlotSampling(temperature * ones, jnp.zeros(requests, jnp.int32), ones, 0 * ones)
    tree = Tree(parents, depths, valid, max_depth)
    out = accept_tree(logits, tokens, tree, sampling, u, u_last, limit, mode)
    return out.accepted, out.token, out.path, out.tokens(Proposal(tokens, Point(tokens, logits.shape[-1]), tree=tree))


def run(world: World, u: np.ndarray, u_last: np.ndarray, limit: int, temperature: float, mode: str) -> Any:
    """Everything padded to one size: V 4 and a fixed number of rows, so that few programs are compiled."""
    found, size = [], 4096
    rows = np.pad(world.rows(), ((0, 0), (0, 4 - world.vocab)))
    with np.errstate(divide="ignore"):
        logits = (np.log(rows) * max(temperature, 1.0) if temperature == 0 else np.log(rows) * temperature).astype(
            np.float32
        )
    tree = tree_of(world.parents, size, world.valid)
    for start in range(0, len(u), size):
        piece, last = u[start : start + size], u_last[start : start + size]
        pad = size - len(piece)
        piece = np.pad(piece, ((0, pad), (0, 0))).astype(np.float32)
        out = served(
            np.broadcast_to(logits, (size, *logits.shape)), np.broadcast_to(world.tokens.astype(np.int32), (size, 6)),
            tree.parents, tree.depths, tree.valid, np.float32(temperature), piece,
            np.pad(last, (0, pad)).astype(np.float32), np.full(size, limit, np.int32), mode=mode, max_depth=2,
        )  # fmt: skip
        found.append([np.asarray(x)[: size - pad] for x in out])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def output_law(world: World, limit: int, temperature: float, mode: str) -> np.ndarray:
    """Law of the first three tokens when a round is followed by plain decoding. The break points of every uniform come
    from float64 formulas of their own."""
    rows = world.rows()
    if mode == "match":
        points = [set(_cumulative(row)) for row in rows]
    else:
        points = [{x} for x in _chances(world, rows)] + [set()]
    combos = list(itertools.product(*(_intervals(found) for found in points)))
    u = np.array([[middle for middle, _ in one] for one in combos])
    weight = np.array([np.prod([length for _, length in one]) for one in combos])
    # any u_last tells which row was reached; its break points follow from that row
    reached = run(world, u, np.full(len(u), 0.5), 2, temperature, mode)
    index, middles, weights = [], [], []
    for one, (accepted, path) in enumerate(zip(reached[0], reached[2], strict=True)):
        row = int(path[accepted - 1]) if accepted else 0
        last = [(0.5, 1.0)] if mode == "match" else _intervals(set(_cumulative(_left(world, rows, row))))
        for middle, length in last:
            index.append(one)
            middles.append(middle)
            weights.append(weight[one] * length)
    accepted, token, path, tokens = run(world, u[index], np.array(middles), limit, temperature, mode)
    law = np.zeros((world.vocab,) * 3)
    for r in range(3):
        here = accepted == r
        if not here.any():
            continue
        joint = np.zeros((world.vocab,) * (r + 1))
        assert (tokens[here, r] == token[here]).all()
        np.add.at(joint, tuple(tokens[here, : r + 1].T), np.array(weights)[here])
        for table in world.p[r + 1 :]:
            joint = joint[..., None] * table
        law += joint
    return law


def _chances(world: World, rows: np.ndarray) -> list[float]:
    """The acceptance probability of each node once its earlier siblings were refused."""
    found = []
    for node, parent in enumerate(world.parents):
        left = rows[parent].copy()
        for other in range(node):
            if world.parents[other] == parent and world.valid[other]:
                left[world.tokens[other]] = 0.0
        total = left.sum()
        found.append(float(left[world.tokens[node]] / total) if total > TINY else 0.0)
    return found


def _left(world: World, rows: np.ndarray, row: int) -> np.ndarray:
    left = rows[row].copy()
    for node, parent in enumerate(world.parents):
        if parent == row and world.valid[node]:
            left[world.tokens[node]] = 0.0
    return left if left.sum() > 0 else rows[row]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mode", ["rejection", "match"])
def test_B02_law_of_a_tree_is_the_targets_at_every_limit(mode: str, temperature: float) -> None:
    rng = np.random.default_rng(11)
    count = 24 if mode == "rejection" else 6
    for index in range(count):
        world = random_world(rng, (2, 3, 4)[index % 3], (0.0, 0.4)[index % 2], drop=(0.0, 0.0, 0.5)[index % 3])
        if mode == "match" and world.vocab == 4:
            continue  # 4 ** 7 rows say no more than 3 ** 7
        for limit in (0, 1, 2):
            law = output_law(world, limit, temperature, mode)
            np.testing.assert_allclose(law, world.law(), atol=2e-6)


def test_the_enumeration_notices_an_acceptance_that_forgets_to_renormalise() -> None:
    """Negative control: a wrong break point, or a wrong rule, moves the law."""
    world = random_world(np.random.default_rng(2), 3, 0.0)
    rows = world.rows()
    combos = list(itertools.product(*(_intervals({x}) for x in [rows[0][world.tokens[0]], rows[0][world.tokens[1]]])))
    law = np.zeros(3)
    for (u0, w0), (u1, w1) in combos:
        first = u0 < rows[0][world.tokens[0]]
        second = not first and u1 < rows[0][world.tokens[1]]  # not divided by what is left
        if first or second:
            law[world.tokens[0] if first else world.tokens[1]] += w0 * w1
        else:
            left = _left(world, rows, 0)
            law += w0 * w1 * left / left.sum()
    assert np.abs(law - world.p[0]).max() > 1e-2


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_B14_greedy_requests_follow_the_argmax_at_every_limit(limit: int) -> None:
    rng = np.random.default_rng(4)
    lengths = set()
    for index in range(30):
        world = random_world(rng, (2, 3, 4)[index % 3], 0.0, drop=0.2)
        accepted, token, _, tokens = run(world, np.zeros((1, 7)), np.zeros(1), limit, 0.0, "rejection")
        walk: list[int] = []
        for table in world.p:
            walk.append(int(np.argmax(table[tuple(walk)])))
        r = int(accepted[0])
        assert r <= limit and tokens[0, : r + 1].tolist() == walk[: r + 1] and token[0] == walk[r]
        paths = {world.path(row) for row in range(1, 7) if world.valid[row - 1]}
        expected = max([0, *(length for length in (1, 2) if tuple(walk[:length]) in paths)])
        assert r == min(expected, limit)
        lengths.add(r)
    assert lengths == set(range(limit + 1))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_chain_given_as_a_tree_is_the_chain(temperature: float) -> None:
    """The same uniforms give the same accepted tokens, whatever the limit."""
    rng = np.random.default_rng(7)
    requests, m, vocab = 256, 4, 8
    logits = rng.normal(size=(requests, m + 1, vocab)).astype(np.float32) * 1.5
    drafts = np.where(
        rng.random((requests, m)) < 0.7, logits[:, :-1].argmax(-1), rng.integers(0, vocab, (requests, m))
    ).astype(np.int32)
    u, u_last = rng.random((requests, m + 1)).astype(np.float32), rng.random(requests).astype(np.float32)
    tree = tree_of(np.arange(m), requests)
    ones = jnp.ones(requests)
    sampling = SlotSampling(temperature * ones, jnp.zeros(requests, jnp.int32), ones, 0 * ones)
    for limit in range(m + 1):
        limits = jnp.full(requests, limit, jnp.int32)
        chain = Proposal(jnp.asarray(drafts), Point(jnp.asarray(drafts), vocab))
        one = jax.jit(accept, static_argnames="mode")(logits, chain, sampling, u[:, :m], u_last, limits, mode="ratio")
        other = jax.jit(accept_tree, static_argnames="mode")(
            logits, drafts, tree, sampling, u, u_last, limits, mode="rejection"
        )
        np.testing.assert_array_equal(one.accepted, other.accepted)
        np.testing.assert_array_equal(one.tokens(chain), other.tokens(chain))
        assert {0, limit} <= set(np.asarray(one.accepted).tolist())


# -- layout, attention, compaction ------------------------------------------------------------------------------------


def test_rows_of_a_tree_stand_at_their_depth_and_know_their_ancestors() -> None:
    rng = np.random.default_rng(0)
    parents = np.stack([random_parents(rng, 9) for _ in range(4)])
    first, live = jnp.array([5, 0, 17, 3]), jnp.array([True, True, False, True])
    layout = tree_layout(first, live, tree_of(parents, 4), jnp.arange(1, 13).reshape(4, 3))
    known = np.asarray(layout.ancestors())
    for request in range(4):
        if not live[request]:
            assert not layout.valid[request * 10 : request * 10 + 10].any()
            continue
        for row in range(10):
            path = line(parents[request], row)
            assert np.flatnonzero(known[request, row]).tolist() == path if path == sorted(path) else sorted(path)
            assert set(np.flatnonzero(known[request, row])) == set(path)
            assert layout.positions[request * 10 + row] == first[request] + len(path) - 1
            assert layout.slots[request * 10 + row] == first[request] + row


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("page", [4, 16])
def test_B64_a_tree_row_attends_history_and_ancestors_as_its_path_alone_would(page: int, window: int) -> None:
    """Against plain attention over history + path, row by row; unwritten rows and dead nodes hold NaN."""
    rng = np.random.default_rng(1)
    first, nodes, heads, kv, dim = np.array([6, 0, 11, 9]), 8, 4, 2, 8
    live = np.array([True, True, True, False])
    parents = np.stack([random_parents(rng, nodes) for _ in first])
    valid = np.ones(parents.shape, bool)
    valid[2, 5:] = False
    pages = -(-(int(first.max()) + nodes + 1) // page)
    table = np.asarray(1 + rng.permutation(4 * pages), np.int32).reshape(4, pages)
    pool = jnp.full(init_pool(1 + 4 * pages, page, kv, dim, jnp.float32).shape, jnp.nan)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    past_k, past_v = draw(4, 12, kv, dim), draw(4, 12, kv, dim)
    history = uniform_layout(jnp.zeros(4, jnp.int32), jnp.asarray(first), table, 12)
    pool = write_rows(pool, past_k.reshape(-1, kv, dim), past_v.reshape(-1, kv, dim), history)
    q, k, v = draw(4, nodes + 1, heads, dim), draw(4, nodes + 1, kv, dim), draw(4, nodes + 1, kv, dim)
    k[2, 6:], v[2, 6:] = np.nan, np.nan
    layout = tree_layout(jnp.asarray(first), jnp.asarray(live), tree_of(parents, 4, valid), jnp.asarray(table))
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    out, _ = jax.jit(lambda q, k, v, pool: PagedCausal(layout)(q, k, v, pool, window))(flat(q), flat(k), flat(v), pool)
    out = np.asarray(out).reshape(4, nodes + 1, heads, dim)
    for request, row in itertools.product(range(4), range(nodes + 1)):
        if not live[request] or (row and not valid[request, row - 1]):
            continue
        path = line(parents[request], row)
        keys = np.concatenate([past_k[request, : first[request]], k[request, path]])
        values = np.concatenate([past_v[request, : first[request]], v[request, path]])
        np.testing.assert_allclose(
            out[request, row], alone(q[request, row], keys, values, window), atol=1e-5, rtol=1e-5
        )


def alone(q: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """One query [heads, D] over its whole past, its own row last."""
    keys, values = (x[-window:] if window else x for x in (keys, values))
    group = q.shape[0] // keys.shape[1]
    out = []
    for head, query in enumerate(q):
        raw = keys[:, head // group] @ query / np.sqrt(len(query))
        weights = np.exp(raw - raw.max())
        out.append(weights / weights.sum() @ values[:, head // group])
    return np.stack(out)


def test_a_chain_given_as_a_tree_attends_as_the_chain() -> None:
    rng = np.random.default_rng(3)
    first, rows = jnp.array([3, 7]), 5
    table = jnp.array([[1, 2, 3], [4, 5, 6]])
    pool = jnp.asarray(rng.normal(size=(7, 4, 4, 8)), jnp.float32)
    q, k, v = (jnp.asarray(rng.normal(size=(2 * rows, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    chain = uniform_layout(first, jnp.full(2, rows), table, rows)
    tree = tree_layout(first, jnp.ones(2, bool), tree_of(np.arange(rows - 1), 2), table)
    for name in ("positions", "slots", "parents", "valid", "lengths"):
        np.testing.assert_array_equal(getattr(chain, name), getattr(tree, name))
    for window in (0, 2):
        one, two = (
            jax.jit(lambda q, k, v, pool, a=PagedCausal(layout), w=window: a(q, k, v, pool, w))(q, k, v, pool)
            for layout in (chain, tree)
        )
        np.testing.assert_allclose(one[0], two[0], atol=1e-6)
        np.testing.assert_array_equal(one[1], two[1])


def test_compaction_moves_each_requests_path_and_nothing_else() -> None:
    """Paths of different lengths, crossing pages; reading before writing (a path may step on its own targets)."""
    rng = np.random.default_rng(5)
    first, table = np.array([3, 6, 0]), jnp.asarray(1 + rng.permutation(12).reshape(3, 4))
    pool = jnp.asarray(rng.normal(size=(13, 4, 2, 3)), jnp.float32)
    path = jnp.array([[0, 2, 3, 7], [0, 5, 0, 0], [0, 0, 0, 0]])
    counts = jnp.array([4, 2, 0])
    layout = uniform_layout(jnp.asarray(first), counts, table, 4)
    after = jax.jit(compact)(pool, path, layout)
    full = jnp.full(3, 16)
    old, new = (np.concatenate(gather(x, table, full), axis=-1) for x in (pool, after))
    expected = old.copy()
    for request in range(3):
        for step in range(int(counts[request])):
            expected[request, first[request] + step] = old[request, first[request] + int(path[request, step])]
    np.testing.assert_array_equal(new, expected)
    others = np.setdiff1d(np.arange(13), [0])
    assert (np.asarray(after)[others] == np.asarray(pool)[others]).mean() > 0.5


# -- the whole round over a table -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScriptedTree(worlds.ScriptedDrafter):
    """A binary tree whose tokens are params["tokens"][anchor, position]; everything else is the scripted chain's."""

    parents: tuple[int, ...] = tuple(BINARY.tolist())

    def propose(self, params, shared, state, slots, keys, sampling):
        tokens = params["tokens"][slots.anchors, slots.positions]
        tree = tree_of(np.asarray(self.parents), tokens.shape[0])
        return Proposal(tokens, Point(tokens, self.vocab_size), tree=tree)


POSITIONS, PAGE = 40, 5
TABLE = worlds.random_table(4, POSITIONS + 2, seed=21)  # nodes may stand two positions past the context
# which rows continue the target's answer: the left line, a right turn, only one level, none
SCRIPTS = {0: [1, 3], 1: [2, 6], 2: [1], 3: []}
PROMPTS = ([1, 2, 3], [9, 8, 9, 10, 11], [16] * 7, [31])


def tree_script(table: np.ndarray) -> dict[str, jax.Array]:
    """Tokens [V, P, 6]: each lane's line of rows says what the target will say, all other rows something else."""
    vocab, positions, _ = table.shape
    lane = np.arange(vocab) // worlds.LANE
    wrong = lambda token: (token // worlds.LANE) * worlds.LANE + (token + 1) % worlds.LANE  # noqa: E731
    best = table.argmax(-1)
    tokens = np.zeros((vocab, positions, 6), np.int32)
    for token, position in itertools.product(range(vocab), range(positions)):
        last = min(position + 1, positions - 1)
        said = [best[token, position]]
        said.append(best[said[0], last])
        right = SCRIPTS[int(lane[token])]
        made = {0: token}
        for row in range(1, 7):
            parent = int(BINARY[row - 1])
            truth = best[made[parent], position] if parent == 0 else best[made[parent], last]
            taken = [made[other] for other in range(1, row) if BINARY[other - 1] == parent]
            if row in right:
                made[row] = int(truth)
            else:
                made[row] = next(
                    t for t in (wrong(truth), wrong(wrong(truth)), wrong(wrong(wrong(truth)))) if t not in taken
                )
        tokens[token, position] = [made[row] for row in range(1, 7)]
    return {"tokens": jnp.asarray(tokens)}


def tree_runner(debug: bool = False, **changes: Any) -> SlotRunner:
    draft = worlds.Draft(ScriptedTree(TABLE.shape[0], 2, tree_nodes=len(BINARY)), tree_script(TABLE))
    options = {
        "num_slots": 4,
        "max_context": POSITIONS,
        "prefill_chunk": 4,
        "page_size": PAGE,
        "cache_fill": float("nan"),
    }
    return SlotRunner(worlds.table_target(TABLE), draft, debug=debug, **{**options, **changes})


@pytest.fixture(scope="module", params=[False, True], ids=["served", "debug"])
def runner(request: pytest.FixtureRequest) -> SlotRunner:
    made = tree_runner(request.param)
    made.warm_up()
    return made


def test_B30_requests_accept_different_paths_side_by_side_and_the_cache_holds_exactly_them(runner: SlotRunner) -> None:
    """Into the context's end: K/V rows (token, position) are the sequence's, compacted, and nothing reads a NaN."""
    params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    handles = [runner.admit(list(prompt), params) for prompt in PROMPTS]
    slots = [worlds.slot_of(runner, handle) for handle in handles]
    tokens: dict[int, list[int]] = {handle: [] for handle in handles}
    accepted: dict[int, list[int]] = {handle: [] for handle in handles}
    while runner.live:
        for event in runner.step():
            tokens[event.handle] += event.tokens
            accepted[event.handle] += [event.accepted] if event.from_round else []
        for handle, slot, prompt in zip(handles, slots, PROMPTS, strict=True):
            length = worlds.position_of(runner, slot)
            keys, values = worlds.rows_of(runner, runner._state.target[0], slot)
            sequence = np.array([*prompt, *tokens[handle]])
            written = min(length, len(sequence))
            rows = np.stack([sequence[:written], np.arange(written)], axis=1)
            np.testing.assert_array_equal(keys[:written, 0], rows)
            np.testing.assert_array_equal(values[:written, 0], rows)
    for handle, prompt, script in zip(handles, PROMPTS, SCRIPTS.values(), strict=True):
        assert tokens[handle] == worlds.walk(TABLE, prompt, POSITIONS - len(prompt))
        assert accepted[handle][:-2] == [len(script)] * len(accepted[handle][:-2])
        assert all(r <= len(script) for r in accepted[handle])


@pytest.mark.parametrize("length", range(POSITIONS - 9, POSITIONS))
def test_B21_a_tree_near_the_end_of_the_context_stops_at_it(runner: SlotRunner, length: int) -> None:
    """The tree's nodes stand in spare rows behind the context; what is committed never does."""
    prompts = [[lane * worlds.LANE + 1] * length for lane in range(4)]
    for one, prompt in zip(generate(runner, prompts, SamplingParams(max_new_tokens=1000)), prompts, strict=True):
        assert list(one.tokens) == worlds.walk(TABLE, prompt, POSITIONS - length)
        assert one.finish_reason == "length"


def test_B27_sampled_trees_do_not_depend_on_the_company() -> None:
    runner = tree_runner()
    params = [SamplingParams(temperature=0.8, seed=seed, max_new_tokens=20) for seed in range(4)]
    together = [list(one.tokens) for one in generate(runner, [list(p) for p in PROMPTS], params)]
    for prompt, param, row in zip(PROMPTS, params, together, strict=True):
        assert [list(one.tokens) for one in generate(runner, [list(prompt)], [param])] == [row]


def test_plain_decoding_gives_the_same_text() -> None:
    plain = SlotRunner(
        worlds.table_target(TABLE), None, num_slots=2, max_context=POSITIONS, page_size=PAGE, prefill_chunk=4
    )
    params = SamplingParams(max_new_tokens=25)
    expected = [list(one.tokens) for one in generate(plain, [list(p) for p in PROMPTS], params)]
    assert [list(one.tokens) for one in generate(tree_runner(), [list(p) for p in PROMPTS], params)] == expected
