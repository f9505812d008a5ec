"""Losslessness of scheduled verification, as an equality: the shipped planner and acceptance, enumerated.

A batch of two requests is enumerated jointly: the law of both outputs must be the product of the targets'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxspec.decoding.plan import Schedule, allocate
from jaxspec.serving.budget import BudgetPlanner, search
from jaxspec.serving.confidence_ring import ConfidenceRelay
from jaxspec.serving.cost import StepsTable
from tests.decoding.enumeration import AcceptFn, Case, path_law, random_case, target_law
from tests.decoding.test_enumeration import through_jaxspec
from tests.drafters.test_confidence import drawing_at_the_cut

pytestmark = pytest.mark.ci

# one cut (proposals kept) for each request, from everybody's draft paths
Planner = Callable[[list[tuple[int, ...]]], list[int]]
NOT_MONOTONE = StepsTable((1, 2, 3, 4, 5, 6), (1.0, 0.5, 0.45, 0.44, 0.2, 0.19), 6)
place = functools.partial(jax.jit, static_argnames="schedule")(allocate)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A request: its tables, and the confidence c_k(d_<k) [V] * k of each slot."""

    case: Case
    confidence: tuple[np.ndarray, ...]

    def row(self, path: tuple[int, ...]) -> list[float]:
        return [float(table[path[:k]]) for k, table in enumerate(self.confidence)]


def independent(p: list[float], q: list[float], m: int) -> Case:
    """The same p and q at every slot."""
    tables = lambda row, count: tuple(np.broadcast_to(row, (len(row),) * k + (len(row),)) for k in range(count))  # noqa: E731
    return Case(tables(p, m + 1), tables(q, m))


def random_drafted(rng: np.random.Generator, m: int) -> Drafted:
    case = random_case(rng, 2, m, zeros=0.1)
    tables = (rng.choice([0.05, 0.4, 0.55, 0.9, 1.0], (2,) * k) for k in range(m))
    return Drafted(case, tuple(np.asarray(table) for table in tables))


def joint_law(requests: list[Drafted], accept: AcceptFn, planner: Planner) -> np.ndarray:
    """Law of all outputs, for cuts that depend on all draft paths."""
    laws = [[path_law(one.case, accept, cut) for cut in range(one.case.m + 1)] for one in requests]
    vocab, m = requests[0].case.vocab, requests[0].case.m
    paths = list(itertools.product(range(vocab), repeat=m))
    total: np.ndarray = np.zeros(())
    for chosen in itertools.product(range(len(paths)), repeat=len(requests)):
        cuts = planner([paths[index] for index in chosen])
        part: np.ndarray = np.ones(())
        for law, cut, index in zip(laws, cuts, chosen, strict=True):
            part = np.multiply.outer(part, law[cut][index])
        total = total + part
    return total


def product(requests: list[Drafted]) -> np.ndarray:
    return functools.reduce(np.multiply.outer, [target_law(one.case) for one in requests])


def confidences(requests: list[Drafted], paths: list[tuple[int, ...]]) -> np.ndarray:
    return np.array([one.row(path) for one, path in zip(requests, paths, strict=True)], np.float32)


def spread(confidence: np.ndarray, budget: int) -> list[int]:
    return (np.asarray(place(confidence, np.int32(budget), schedule=Schedule(confidence.shape[1]))) - 1).tolist()


def with_budget(requests: list[Drafted], budget: int) -> Planner:
    """The shipped device allocation of a budget that was chosen before."""
    return lambda paths: spread(confidences(requests, paths), budget)


def with_present_confidences(requests: list[Drafted], table: StepsTable) -> Planner:
    """What must not be done: the budget search over this very round's confidences."""

    def plan(paths: list[tuple[int, ...]]) -> list[int]:
        confidence = confidences(requests, paths)
        survival = np.cumprod(confidence, axis=1)
        return spread(confidence, search(survival, table, Schedule(confidence.shape[1])).budget)

    return plan


def first_token(law: np.ndarray) -> np.ndarray:
    return law.sum(axis=tuple(range(1, law.ndim)))


@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B12_the_planner_with_lag_leaves_the_law_of_a_batch_alone(mode: str) -> None:
    """Two rounds of history for each draft path that the older one may have had; every budget they lead to."""
    rng = np.random.default_rng(11)
    budgets = set()
    for trial in range(6):
        requests = [random_drafted(rng, 2) for _ in range(2)]
        slots, current = np.arange(2), np.array([1, 1])
        for path in itertools.product(range(2), repeat=2):
            relay, planner = ConfidenceRelay(), BudgetPlanner(NOT_MONOTONE, Schedule(2), 2)
            relay.publish(confidences(requests, [path, path[::-1]]), current)
            assert planner.plan(relay.resolve(), slots, current) is None  # no history yet: verify everything
            relay.publish(np.zeros((2, 2)), current)  # one round old, never read for this round
            decision = planner.plan(relay.resolve(), slots, current)
            budgets.add(decision.budget)
            law = joint_law(requests, through_jaxspec(mode), with_budget(requests, decision.budget))
            assert np.abs(law - product(requests)).max() < 1e-6, (trial, path)
    assert len(budgets) >= 3, budgets


def test_B12_every_budget_is_lossless_for_longer_blocks() -> None:
    rng = np.random.default_rng(12)
    for _ in range(3):
        requests = [random_drafted(rng, 3)]
        for budget in range(4):
            law = joint_law(requests, through_jaxspec("ratio"), with_budget(requests, budget))
            assert np.abs(law - product(requests)).max() < 1e-6


def appendix_a() -> list[Drafted]:
    """p(A) = .7, a_1 = .8, and a_2 high after A, low after B."""
    case = independent([0.7, 0.3], [0.5, 0.5], 2)
    return [Drafted(case, (np.array(0.8), np.array([0.9, 0.1])))]


def test_B12_control_present_confidences_give_085_instead_of_070() -> None:
    """Paper, appendix A: SPS(1, 2, 3) = 1, 0.5, 0.45 without early stop, and p drawn from at the cut."""
    table = StepsTable((1, 2, 3), (1.0, 0.5, 0.45), 3)
    requests = appendix_a()
    law = first_token(joint_law(requests, drawing_at_the_cut, with_present_confidences(requests, table)))
    np.testing.assert_allclose(law, [0.85, 0.15], atol=1e-6)
    for budget in range(3):
        law = first_token(joint_law(requests, drawing_at_the_cut, with_budget(requests, budget)))
        np.testing.assert_allclose(law, [0.7, 0.3], atol=1e-6)


def test_B12_control_two_slots_or_none_gives_06_instead_of_05() -> None:
    case = independent([0.5, 0.5], [0.8, 0.2], 2)
    requests = [Drafted(case, (np.array(0.7), np.array([1.0, 0.0])))]
    look = lambda paths: [2 if paths[0][0] == 0 else 0]  # noqa: E731
    law = first_token(joint_law(requests, drawing_at_the_cut, look))
    np.testing.assert_allclose(law, [0.6, 0.4], atol=1e-6)
    keep_one = lambda paths: [2 if paths[0][0] == 0 else 1]  # noqa: E731
    law = first_token(joint_law(requests, drawing_at_the_cut, keep_one))
    np.testing.assert_allclose(law, [0.5, 0.5], atol=1e-6)
    # the shipped rule tests the slot behind the cut too, so that this very planner is harmless under it
    law = joint_law(requests, through_jaxspec("ratio"), look)
    assert np.abs(law - product(requests)).max() < 1e-6


@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B12_control_an_admission_that_peeks_one_token_ahead_biases_the_shipped_rule(mode: str) -> None:
    requests = [Drafted(independent([0.5, 0.5], [0.8, 0.2], 2), ())]
    law = joint_law(requests, through_jaxspec(mode), lambda paths: [2 if paths[0][1] == 0 else 0])
    assert np.abs(law - product(requests)).max() > 0.01
    if mode == "ratio":
        np.testing.assert_allclose(law.sum(axis=(0, 2)), [0.57, 0.43], atol=5e-3)


def test_B12_control_present_confidences_bias_the_shipped_rule_in_blocks_of_three() -> None:
    """c_3 knows d_2; a budget of 3 or 0 that hangs on it admits slot 2 by its own token."""
    table = StepsTable((1, 2, 3, 4), (1.0, 0.5, 0.4, 0.4), 4)
    case = independent([0.5, 0.5], [0.8, 0.2], 3)
    confident = (np.array(0.8), np.array([0.7, 0.7]), np.array([[0.9, 0.0], [0.9, 0.0]]))
    requests = [Drafted(case, confident)]
    law = joint_law(requests, through_jaxspec("ratio"), with_present_confidences(requests, table))
    assert np.abs(law - product(requests)).max() > 0.01
