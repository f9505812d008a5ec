"""Exact law of a round's output: every draft path, every acceptance branch, every interval of the last draw.

Nothing is sampled. Each uniform is integrated over its break points: the decision is constant between two of them, so
one midpoint an interval, weighed by the interval's length, covers it. The break points come from float64 formulas of
their own, never from the code under test; a wrong one would make the law come out wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

# accept(p_rows [n, m+1, V], drafts [n, m], q_rows [n, m, V], u [n, m], u_last [n], cut [n]) -> (accepted [n], last [n])
AcceptFn = Callable[..., tuple[np.ndarray, np.ndarray]]
TINY = 1e-9


@dataclasses.dataclass(frozen=True)
class Case:
    """A target and a drafter as tables over prefixes: p[k] has shape [V] * k + [V] for k = 0 … m, q[k] for k < m."""

    p: tuple[np.ndarray, ...]
    q: tuple[np.ndarray, ...]
    argmax: bool = False  # proposals are the argmax of q, not draws

    @property
    def vocab(self) -> int:
        return self.p[0].shape[-1]

    @property
    def m(self) -> int:
        return len(self.q)


def random_case(rng: np.random.Generator, vocab: int, m: int, *, zeros: float = 0.3, one_hot: bool = False) -> Case:
    """Random tables; a share of the entries is exactly zero."""

    def table(depth: int, point: bool) -> np.ndarray:
        shape = (vocab,) * (depth + 1)
        raw = rng.dirichlet(np.ones(vocab) * 0.7, shape[:-1]) if depth else rng.dirichlet(np.ones(vocab) * 0.7)
        raw = np.where(rng.random(shape) < zeros, 0.0, raw) + 1e-3 * np.eye(vocab)[rng.integers(0, vocab, shape[:-1])]
        raw = raw / raw.sum(-1, keepdims=True)
        return np.eye(vocab)[raw.argmax(-1)] if point else raw

    # The code computes in float32: tables that float32 holds exactly keep the comparison about the rule.
    exact = lambda x: x.astype(np.float32).astype(np.float64)  # noqa: E731
    return Case(tuple(exact(table(k, False)) for k in range(m + 1)), tuple(exact(table(k, one_hot)) for k in range(m)))


def target_law(case: Case) -> np.ndarray:
    """P(x_1 … x_{m+1}) of the target alone."""
    law = case.p[0]
    for table in case.p[1:]:
        law = law[..., None] * table
    return law / law.sum()


def output_law(case: Case, accept: AcceptFn, cut: int) -> np.ndarray:
    """Law of the first m + 1 tokens when a round with `cut` kept drafts is followed by plain decoding."""
    return path_law(case, accept, cut).sum(axis=0)


def path_law(case: Case, accept: AcceptFn, cut: int) -> np.ndarray:
    """The same together with the draft path: [V^m, V, …, V], paths numbered by their digits. The entries of a path add
    up to its probability under q."""
    rows = _branches(case)
    accepted, _ = accept(
        rows.p, rows.drafts, rows.q, rows.u, np.full(len(rows.weight), 0.5), np.full(len(rows.weight), cut)
    )
    rows = _last_intervals(rows, accepted, case)
    accepted, last = accept(rows.p, rows.drafts, rows.q, rows.u, rows.u_last, np.full(len(rows.weight), cut))
    paths = np.ravel_multi_index(tuple(rows.drafts.T), (case.vocab,) * case.m)
    law = np.zeros((case.vocab**case.m, *(case.vocab,) * (case.m + 1)))
    for r in range(case.m + 1):
        here = accepted == r
        if not here.any():
            continue
        path = np.concatenate([rows.drafts[here, :r], last[here, None]], axis=1)
        joint = np.zeros((len(law), *(case.vocab,) * (r + 1)))
        np.add.at(joint, (paths[here], *path.T), rows.weight[here])
        for table in case.p[r + 1 :]:
            joint = joint[..., None] * table
        law += joint
    return law


@dataclasses.dataclass(frozen=True)
class _Rows:
    p: np.ndarray
    q: np.ndarray
    drafts: np.ndarray
    u: np.ndarray
    weight: np.ndarray
    u_last: np.ndarray


def _branches(case: Case) -> _Rows:
    """One row for each draft path and each choice of intervals for its acceptance uniforms."""
    rows: list[tuple[np.ndarray, ...]] = []
    for path in itertools.product(range(case.vocab), repeat=case.m):
        q_rows = np.stack([case.q[k][path[:k]] for k in range(case.m)])
        p_rows = np.stack([case.p[k][path[:k]] for k in range(case.m + 1)])
        chance = 1.0
        for k, token in enumerate(path):
            chance *= float(q_rows[k].argmax() == token) if case.argmax else q_rows[k][token]
        if chance <= 0:
            continue
        points = _accept_points(p_rows, q_rows, path)
        if case.argmax:  # the honest q of an argmax proposal is a point on it
            point = np.eye(case.vocab)[list(path)]
            points = [a | b for a, b in zip(points, _accept_points(p_rows, point, path), strict=True)]
        choices = [_intervals(found) for found in points]
        for combination in itertools.product(*choices):
            weight = chance * np.prod([length for _, length in combination])
            rows.append((p_rows, q_rows, np.array(path), np.array([middle for middle, _ in combination]), weight))
    p, q, drafts, u, weight = (np.stack(column) for column in zip(*rows, strict=True))
    return _Rows(p, q, drafts, u.astype(np.float32), weight, np.zeros(len(weight), np.float32))


def _accept_points(p: np.ndarray, q: np.ndarray, path: tuple[int, ...]) -> list[set[float]]:
    """Where a uniform of slot k may change the outcome: token-wise p / q, and block verification's h."""
    points: list[set[float]] = []
    w = 1.0
    for k, token in enumerate(path):
        ratio = p[k][token] / q[k][token] if q[k][token] > 0 else 0.0
        w = min(1.0, w * ratio)
        found = {ratio, w}
        if k + 1 < len(path):
            excess = np.maximum(w * p[k + 1] - q[k + 1], 0).sum()
            if excess + 1 - w > 0:
                found.add(excess / (excess + 1 - w))
        points.append(found)
    return points


def _intervals(points: set[float]) -> list[tuple[float, float]]:
    edges = sorted({0.0, 1.0, *(x for x in points if 0 < x < 1)})
    pairs = itertools.pairwise(edges)
    return [((low + high) / 2, high - low) for low, high in pairs if high - low > TINY]


def _last_intervals(rows: _Rows, accepted: np.ndarray, case: Case) -> _Rows:
    """Splits every row at the cumulative sums that its last draw may cross."""
    parts: list[tuple[int, float, float]] = []
    for index, r in enumerate(accepted):
        points = set(_cumulative(rows.p[index, r]))
        if r < case.m:
            honest = np.eye(case.vocab)[rows.drafts[index]]
            for q in (rows.q[index], honest) if case.argmax else (rows.q[index],):
                for scale in (1.0, _weight(rows.p[index], q, rows.drafts[index, :r])):
                    points |= set(_cumulative(np.maximum(scale * rows.p[index, r] - q[r], 0)))
        parts += [(index, middle, length) for middle, length in _intervals(points)]
    index = np.array([part[0] for part in parts])
    middle = np.array([part[1] for part in parts], np.float32)
    length = np.array([part[2] for part in parts])
    return _Rows(rows.p[index], rows.q[index], rows.drafts[index], rows.u[index], rows.weight[index] * length, middle)


def _weight(p: np.ndarray, q: np.ndarray, path: np.ndarray) -> float:
    """Block verification's w after the path's tokens."""
    w = 1.0
    for k, token in enumerate(path):
        w = min(1.0, w * (p[k, token] / q[k, token] if q[k, token] > 0 else 0.0))
    return w


def _cumulative(weights: np.ndarray) -> np.ndarray:
    total = weights.sum()
    return np.cumsum(weights) / total if total > 0 else np.zeros(0)


def wrong_accept(*, strict: bool = True, renormalise: bool = True) -> AcceptFn:
    """Token-wise rejection in plain numpy, with two classical faults to switch on (negative controls)."""

    def accept(p, drafts, q, u, u_last, cut):
        accepted, last = np.zeros(len(u), int), np.zeros(len(u), int)
        for i in range(len(u)):
            m = drafts.shape[1]
            r = 0
            while r < m:
                token = drafts[i, r]
                left, right = np.float64(u[i, r]) * q[i, r, token], p[i, r, token]
                if not (left < right if strict else left <= right):
                    break
                r += 1
            weights = p[i, r] if r == m else np.maximum(p[i, r] - q[i, r], 0)
            if weights.sum() <= 0:
                weights = p[i, r]
            total = weights.sum() if renormalise else 1.0
            token = min(int(np.searchsorted(np.cumsum(weights), u_last[i] * total, side="right")), p.shape[-1] - 1)
            accepted[i], last[i] = (r, token) if r <= cut[i] else (cut[i], drafts[i, cut[i]])
        return accepted, last

    return accept
