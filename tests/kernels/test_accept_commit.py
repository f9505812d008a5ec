"""Accept + commit: every implementation against loops over single requests, ids and rows, over poisoned operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.accept_commit import api
from pallas_kernels.accept_commit.rows import CommitRows
from tests.helpers.kernels import interpreted

pytestmark = pytest.mark.ci

R, DRAFTS, PAGE, PAGES, KV, DIM, LAYERS = 4, 3, 4, 3, 2, 8, 2
TOTAL = 24  # rows of the bucket; R x (DRAFTS + 1) at most are owned
VOCAB = 300
KINDS = ("greedy", "point", "dense")


def draw(seed, kind, vocab=VOCAB, dtype=np.float32):
    """Operands of one round. Rows, drafts and q that nobody may read hold NaN, pools are numbered."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, DRAFTS + 1, R)
    live = rng.random(R) < 0.85
    gaps = rng.integers(0, 3, R)
    starts = np.cumsum(gaps + np.concatenate([[0], lengths[:-1] + 1]))
    first = rng.integers(0, PAGE * PAGES, R)  # rows past the end must not be written
    target = np.full((TOTAL, vocab), np.nan, dtype)
    drafts = rng.integers(0, vocab, (R, DRAFTS))
    q = np.full((R, DRAFTS, vocab), np.nan, np.float32)
    for r in range(R):
        for k in range(lengths[r] + 1):
            if kind == "greedy":
                line = rng.integers(-8, 8, vocab).astype(np.float32)  # ties are common
                if k < DRAFTS and rng.random() < 0.7:
                    drafts[r, k] = np.argmax(line)
            else:
                line = rng.dirichlet(np.full(vocab, 0.05)) * (rng.random(vocab) < 0.9)
                line = line / line.sum()
                if k < DRAFTS:
                    guess = 0.5 * line + 0.5 * rng.dirichlet(np.full(vocab, 0.05))
                    guess = [guess, line][int(rng.random() < 0.2)]  # q = p: the residual is empty
                    q[r, k] = guess
                    drafts[r, k] = rng.choice(vocab, p=guess / guess.sum())
                    if rng.random() < 0.1:
                        q[r, k, drafts[r, k]] = [np.nan, 0.0, 1.5][rng.integers(3)]
            target[starts[r] + k] = line.astype(dtype)
    pools = [rng.normal(size=(2 + R * PAGES, PAGE, 2 * KV, DIM)).astype(np.float32) for _ in range(LAYERS)]
    values = [rng.normal(size=(TOTAL, 2 * KV, DIM)).astype(np.float32) for _ in range(LAYERS)]
    u = rng.random((R, DRAFTS)).astype(np.float32)
    return {
        "target": target, "drafts": drafts.astype(np.int32), "starts": starts.astype(np.int32),
        "lengths": lengths.astype(np.int32), "live": live, "first": first.astype(np.int32),
        "table": (1 + rng.permutation(R * PAGES).reshape(R, PAGES)).astype(np.int32), "q": q, "u": u,
        "u_last": rng.random(R).astype(np.float32), "pools": pools, "values": values,
    }  # fmt: skip


@functools.cache
def compiled(name, kind):
    options = interpreted(name)

    def run(d):
        rows = CommitRows(d["starts"], d["lengths"], d["live"], d["first"], d["table"])
        return api.accept_commit(
            d["target"], d["drafts"], rows, d["pools"], d["values"], "greedy" if kind == "greedy" else "ratio",
            d["q"] if kind == "dense" else None, d["u"], d["u_last"], implementation=name, **options,
        )  # fmt: skip

    return jax.jit(run)


def admissible(weights, u, slack=1e-6):
    """Ids whose share of the cumulative weight holds u, up to rounding."""
    weights = np.asarray(weights, np.float64)
    after = np.cumsum(weights)
    bound, slack = u * after[-1], slack * after[-1]
    return {
        int(v) for v in np.flatnonzero((weights > 0) & (after - weights - slack <= bound) & (bound <= after + slack))
    }


def oracle(d, kind):
    """(accepted, admissible last tokens) of each request."""
    answers = []
    for r in range(R):
        length = int(d["lengths"][r])
        tests = min(length + 1, DRAFTS)
        line = lambda k, r=r: np.asarray(d["target"][d["starts"][r] + k], np.float64)  # noqa: E731
        raw = 0
        while raw < tests:
            token, p = d["drafts"][r, raw], line(raw)
            if kind == "greedy":
                stands = token == np.argmax(p)
            else:
                chance = np.float32(1.0) if kind == "point" else d["q"][r, raw, token]
                stands = bool(0 < chance <= 1) and d["u"][r, raw] * chance < np.float32(p[token])
            if not stands:
                break
            raw += 1
        if raw > length:
            answers.append((length, {int(d["drafts"][r, length])}))
            continue
        p = line(raw)
        if kind == "greedy":
            answers.append((raw, {int(np.argmax(p))}))
            continue
        weights = p
        if raw < tests:
            taken = (
                np.nan_to_num(d["q"][r, raw].astype(np.float64))
                if kind == "dense"
                else np.eye(p.size)[d["drafts"][r, raw]]
            )
            residual = np.maximum(p - np.maximum(taken, 0), 0)
            weights = residual if residual.sum() > 1e-8 else p
        answers.append((raw, admissible(weights, float(d["u_last"][r]))))
    return answers


def check(name, d, kind):
    accepted, token, pools = compiled(name, kind)(d)
    expected = [pool.copy() for pool in d["pools"]]
    for r, (count, tokens) in enumerate(oracle(d, kind)):
        if not d["live"][r]:
            assert (accepted[r], token[r]) == (0, 0)
            continue
        assert int(accepted[r]) == count, (name, kind, r)
        assert int(token[r]) in tokens, (name, kind, r)
        for k in range(count + 1):
            slot = d["first"][r] + k
            if slot < PAGE * PAGES:
                for pool, value in zip(expected, d["values"], strict=True):
                    pool[d["table"][r, slot // PAGE], slot % PAGE] = value[d["starts"][r] + k]
    for pool, right in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(pool)[1:], right[1:])  # page 0 is trash


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_B62_B63_B64_rounds_equal_the_oracle_and_touch_no_other_slot(name, kind):
    """Padding rows, rejected rows and rows past the context's limit leave every page but trash as it was."""
    for seed in range(12):
        check(name, draw(seed, kind), kind)


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_a_vocabulary_of_several_tiles(name):
    for kind in ("greedy", "dense"):
        check(name, draw(100, kind, 17000), kind)


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_B69_bfloat16_ties_go_to_the_lowest_id(name):
    check(name, draw(101, "greedy", dtype=jnp.bfloat16), "greedy")


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
@pytest.mark.parametrize("live", [False, True])
def test_nobody_alive_and_drafts_that_are_all_accepted(name, live):
    d = draw(102, "point")
    d["live"] = np.full(R, live)
    d["lengths"] = np.full(R, DRAFTS, np.int32)
    d["starts"] = np.arange(R, dtype=np.int32) * (DRAFTS + 1)
    d["target"] = np.full((TOTAL, VOCAB), 1e-9, np.float32)
    for r in range(R):
        for k in range(DRAFTS):
            d["target"][r * (DRAFTS + 1) + k, d["drafts"][r, k]] = 1.0
        d["target"][r * (DRAFTS + 1) + DRAFTS, 7 + r] = 1.0
    d["u"], d["u_last"] = np.full((R, DRAFTS), 0.99, np.float32), np.full(R, 0.5, np.float32)
    check(name, d, "point")
    accepted, token, _ = compiled(name, "point")(d)
    assert accepted.tolist() == [DRAFTS * live] * R
    assert token.tolist() == [live * (7 + r) for r in range(R)]


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_no_drafts_at_all_gives_the_targets_own_token(name):
    d = draw(103, "greedy")
    d |= {"drafts": d["drafts"][:, :0], "u": d["u"][:, :0], "lengths": np.zeros(R, np.int32)}
    accepted, token, _ = compiled(name, "greedy")(d)
    assert not np.asarray(accepted).any()
    best = [int(np.argmax(d["target"][start])) for start in d["starts"]]
    assert token.tolist() == [b * int(alive) for b, alive in zip(best, d["live"], strict=True)]


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_an_empty_residual_leaves_the_targets_own_law(name):
    """q = p, and a draft that neither would give: rejected, with nothing left of p - q."""
    d = draw(105, "dense")
    d["live"][:] = True
    for r, start in enumerate(d["starts"]):
        d["q"][r, 0] = d["target"][start]
        d["drafts"][r, 0] = np.argmin(d["target"][start])
        assert d["q"][r, 0, d["drafts"][r, 0]] == 0
    check(name, d, "dense")
    assert not np.asarray(compiled(name, "dense")(d)[0]).any()


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-24])
def test_the_ends_of_the_uniform_never_give_an_id_without_weight(name, u):
    d = draw(104, "dense")
    d["u"][:] = 0.999
    d["u_last"][:] = u
    check(name, d, "dense")


def test_wrong_arguments_are_named():
    d = draw(0, "dense")
    rows = CommitRows(d["starts"], d["lengths"], d["live"], d["first"], d["table"])
    given = d["target"], d["drafts"], rows, [jnp.asarray(pool) for pool in d["pools"]], d["values"]
    with pytest.raises(ValueError, match="'block'"):
        api.accept_commit(*given, "block")
    with pytest.raises(ValueError, match="u, u_last"):
        api.accept_commit(*given, "ratio")
    with pytest.raises(ValueError, match="q: found"):
        api.accept_commit(*given, "ratio", d["q"][:, :1], d["u"], d["u_last"])
    with pytest.raises(ValueError, match="values: found"):
        api.accept_commit(*given[:4], [v[:, :1] for v in d["values"]])
    with pytest.raises(ValueError, match="'turbo'"):
        api.accept_commit(*given, implementation="turbo")
    assert api.accept_commit(*given, implementation="auto")[0].shape == (R,)
