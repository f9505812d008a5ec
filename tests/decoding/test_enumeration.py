"""Losslessness as an equality: the law of the served round's own jitted acceptance, enumerated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.acceptance import accept
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Point, Proposal, Sparse
from tests.decoding.enumeration import Case, output_law, random_case, target_law, wrong_accept

TOLERANCE = 1e-6
VOCAB = 8  # tables of smaller vocabularies are padded with probability 0, so that few shapes are compiled
CHUNK = 1024


@functools.partial(jax.jit, static_argnames=("mode", "kind"))
def served_accept(p, drafts, q, u, u_last, cut, temperature, *, mode, kind):
    rows = p.shape[0]
    if kind == "point":
        law = Point(drafts, p.shape[-1])
    elif kind == "sparse":
        order = jnp.argsort(-q, axis=-1)
        law = Sparse(order, jnp.take_along_axis(q, order, axis=-1), p.shape[-1])
    else:
        law = Dense(q)
    ones = jnp.ones(rows)
    sampling = SlotSampling(temperature * ones, jnp.zeros(rows, jnp.int32), ones, 0 * ones)
    logits = jnp.log(p) * jnp.where(temperature > 0, temperature, 1.0)  # so that p is what the request's law comes to
    out = accept(logits, Proposal(drafts, law), sampling, u, u_last, cut, mode)
    return out.accepted, out.token


def through_jaxspec(mode: str, kind: str = "dense", temperature: float = 1.0):
    def run(p, drafts, q, u, u_last, cut):
        pad = lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, VOCAB - x.shape[-1])])  # noqa: E731
        accepted, last = [], []
        for start in range(0, len(u), CHUNK):
            piece = [x[start : start + CHUNK] for x in (pad(p), drafts, pad(q), u, u_last, cut)]
            count = len(piece[3])
            piece = [np.concatenate([x, np.repeat(x[:1], CHUNK - count, axis=0)]) for x in piece]
            types = (np.float32, np.int32, np.float32, np.float32, np.float32, np.int32)
            arrays = [x.astype(t) for x, t in zip(piece, types, strict=True)]
            r, token = served_accept(*arrays, np.float32(temperature), mode=mode, kind=kind)
            accepted.append(np.asarray(r)[:count])
            last.append(np.asarray(token)[:count])
        return np.concatenate(accepted), np.concatenate(last)

    return run


def cases(count: int, seed: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        m = 1 + index % 3
        vocab = int(rng.integers(2, 9 if m < 3 else 5))
        made.append(random_case(rng, vocab, m, zeros=(0.0, 0.3, 0.6)[index % 3], one_hot=index % 7 == 6))
    return made


def error(case: Case, law: np.ndarray) -> float:
    return float(np.abs(law - target_law(case)).max())


@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B02_B03_law_is_the_targets_at_every_cut(mode: str) -> None:
    """200 random pairs, V 2 to 8, m 1 to 3, zeros in p and q, one-hot q, every number of verified drafts."""
    worst = 0.0
    for case in cases(200, seed=1):
        for cut in range(case.m + 1):
            worst = max(worst, error(case, output_law(case, through_jaxspec(mode), cut)))
    assert worst < TOLERANCE, worst


@pytest.mark.parametrize("mode", ["ratio", "block"])
@pytest.mark.parametrize("kind", ["sparse", "point"])
def test_law_with_sparse_and_point_q(mode: str, kind: str) -> None:
    for case in cases(24, seed=2):
        if kind == "point":
            case = Case(case.p, case.q, argmax=True)
        for cut in range(case.m + 1):
            assert error(case, output_law(case, through_jaxspec(mode, kind), cut)) < TOLERANCE


def test_large_vocabulary_and_block() -> None:
    """V = 8 with m = 3 at every cut, both modes: the corner that the random draw above leaves out."""
    case = random_case(np.random.default_rng(5), 6, 3)
    for mode in ("ratio", "block"):
        for cut in (0, 3):
            assert error(case, output_law(case, through_jaxspec(mode), cut)) < TOLERANCE


def test_B01_softmax_q_claimed_for_argmax_proposals_is_biased() -> None:
    """p = (.5, .5), q = (.6, .4), proposal = argmax: exact with a point q, (.833, .167) with the softmax."""
    p, q = np.array([0.5, 0.5]), np.array([0.6, 0.4])
    case = Case((p, np.stack([p, p])), (q,), argmax=True)
    honest = output_law(case, through_jaxspec("ratio", "point"), 1).sum(axis=1)
    np.testing.assert_allclose(honest, p, atol=TOLERANCE)
    claimed = output_law(case, through_jaxspec("ratio", "dense"), 1).sum(axis=1)
    np.testing.assert_allclose(claimed, [5 / 6, 1 / 6], atol=1e-6)


def test_negative_controls_are_caught() -> None:
    """The harness accepts the textbook rule and rejects its two classical faults."""
    several = cases(12, seed=3)
    for case in several:
        assert error(case, output_law(case, wrong_accept(), case.m)) < TOLERANCE
    assert max(error(case, output_law(case, wrong_accept(renormalise=False), case.m)) for case in several) > 1e-3
    # u = 0 has measure zero, so the fault shows where it happens: p(d) = 0 must be rejected at u = 0.
    p, q = np.array([[[0.0, 1.0], [0.5, 0.5]]]), np.array([[[0.5, 0.5]]])
    at_zero = (p, np.array([[0]]), q, np.zeros((1, 1)), np.array([0.5]), np.array([1]))
    assert wrong_accept()(*at_zero)[0][0] == 0
    assert wrong_accept(strict=False)(*at_zero)[0][0] == 1


@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B03_extreme_uniforms(mode: str) -> None:
    run = through_jaxspec(mode)
    one = lambda *rows: np.array([rows])  # noqa: E731
    bonus = [0.5, 0.5]
    # u = 0 with p(d) = 0: rejected, whatever q says.
    accepted, last = run(
        one([0.0, 1.0], bonus), np.array([[0]]), one([0.5, 0.5]), np.zeros((1, 1)), np.array([0.5]), np.array([1])
    )
    assert (accepted[0], last[0]) == (0, 1)
    # u just below 1 with p = q: accepted.
    almost = np.full((1, 1), np.nextafter(np.float32(1), np.float32(0)))
    accepted, _ = run(one([0.5, 0.5], bonus), np.array([[0]]), one([0.5, 0.5]), almost, np.array([0.5]), np.array([1]))
    assert accepted[0] == 1
    # A drafter that emits an id of q = 0, or a NaN q: rejected, and the last token is one that p allows.
    for q in ([0.0, 1.0], [np.nan, np.nan]):
        accepted, last = run(
            one([0.0, 1.0], bonus), np.array([[0]]), one(q), np.full((1, 1), 0.3), np.array([0.3]), np.array([1])
        )
        assert (accepted[0], last[0]) == (0, 1)


def test_expected_acceptance_of_ratio_is_the_overlap() -> None:
    """E[accepted] = sum min(p, q) for one proposal."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        case = random_case(rng, 5, 1)
        overlap = np.minimum(case.p[0], case.q[0]).sum()
        assert abs(_acceptance(case) - overlap) < TOLERANCE


def _acceptance(case: Case) -> float:
    from tests.decoding import enumeration

    rows = enumeration._branches(case)
    accepted, _ = through_jaxspec("ratio")(
        rows.p, rows.drafts, rows.q, rows.u, np.full(len(rows.weight), 0.5), np.full(len(rows.weight), case.m)
    )
    return float((accepted * rows.weight).sum())
