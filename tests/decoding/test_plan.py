"""The device allocation: its order, its limits, and that admission looks at earlier slots only (CONTRACTS.md §6.5)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.acceptance import accept, simulated_accept
from jaxspec.decoding.plan import Schedule, allocate, forward_rows, survival_of
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Proposal
from jaxspec.errors import ConfigError

pytestmark = pytest.mark.ci


@functools.partial(jax.jit, static_argnames="schedule")
def served(confidence, budget, schedule, live=None, room=None, pinned=None):
    return allocate(confidence, budget, schedule, live, room, pinned)


def lengths(confidence, budget, schedule=None, **limits) -> list[int]:
    confidence = np.asarray(confidence, np.float32)
    limits = {name: np.asarray(value) for name, value in limits.items()}
    return np.asarray(
        served(confidence, np.int32(budget), schedule or Schedule(confidence.shape[1]), **limits)
    ).tolist()


def from_survival(survival) -> np.ndarray:
    survival = np.asarray(survival, np.float64)
    return survival / np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)


def oracle(survival: np.ndarray, budget: int, schedule: Schedule) -> list[int]:
    """By the words: sort (survival desc, position, request), take the first `budget`, count."""
    requests, m = survival.shape
    wanted = [
        (-float(survival[r, k]), k, r)
        for r in range(requests)
        for k in range(min(schedule.most_rows, m))
        if survival[r, k] >= np.float32(schedule.survival_eps)
    ]
    extra = [0] * requests
    for _, _, request in sorted(wanted)[:budget]:
        extra[request] += 1
    least = max(schedule.min_rows, 1)
    return [min(max(schedule.min_rows + e, least), schedule.most_rows) for e in extra]


def test_published_examples() -> None:
    assert lengths(from_survival([[0.95, 0.90, 0.85], [0.70, 0.30, 0.10]]), 4) == [4, 2]
    ties = [[0.8, 1.0, 1.0], [0.8, 1.0, 1.0]]  # survivals .8 everywhere: positions first, then requests
    assert lengths(ties, 3) == [3, 2]
    assert lengths(ties, 2) == [2, 2]
    assert lengths(ties, 1) == [2, 1]
    assert lengths(ties, 0, Schedule(3, min_rows=0)) == [1, 1]
    assert lengths([[0.9, 0.9, 0.9]], 1000) == [4]
    assert lengths([[0.9, 0.9, 0.9]], 1000, Schedule(3, max_rows=3)) == [3]
    assert lengths([[0.9, 0.9, 0.9]] * 2, 0, Schedule(3, min_rows=2)) == [2, 2]


def test_allocation_equals_a_plain_sort() -> None:
    rng = np.random.default_rng(1)
    for trial in range(400):
        m = 5
        schedule = [Schedule(m), Schedule(m, 2, 4), Schedule(m, 0, 3), Schedule(m, 1, 6, 0.3)][trial % 4]
        confidence = rng.choice([0.0, 0.5, 0.9, 1.0], (4, m)).astype(np.float32)  # ties abound
        budget = int(rng.integers(0, 24))
        assert lengths(confidence, budget, schedule) == oracle(
            np.cumprod(confidence, axis=1, dtype=np.float32), budget, schedule
        ), trial


def test_non_anticipation_in_4000_random_trials() -> None:
    """Other survivals from slot `cut` of a request on change nothing about its first `cut` slots, nor about slots of
    other requests that rank above every one of them."""
    rng = np.random.default_rng(2)
    requests, m, trials = 5, 7, 4000
    confidence = rng.uniform(0.3, 1.0, (trials, requests, m)).astype(np.float32)
    confidence[::3] = np.round(confidence[::3], 1)  # ties
    confidence[1::3] = 1 - 1e-7 * rng.integers(0, 4, (len(confidence[1::3]), requests, m))  # rounding of the product
    who, cut = rng.integers(0, requests, trials), rng.integers(0, m, trials)
    budget = rng.integers(0, requests * m, trials).astype(np.int32)
    other = confidence.copy()
    for trial in range(trials):
        other[trial, who[trial], cut[trial] :] = rng.uniform(0, 1, m - cut[trial])
    run = jax.jit(jax.vmap(lambda c, k: allocate(c, k, Schedule(m, survival_eps=0.0)) - 1))
    before, after = np.asarray(run(confidence, budget)), np.asarray(run(other, budget))
    one = np.arange(trials)
    np.testing.assert_array_equal(np.minimum(before[one, who], cut), np.minimum(after[one, who], cut))
    top = np.maximum(*(np.asarray(survival_of(x))[one, who, cut] for x in (confidence, other)))
    safe = (np.asarray(survival_of(confidence)) > top[:, None, None]).sum(axis=2)
    for trial in range(trials):
        rest = np.arange(requests) != who[trial]
        low, high = (np.minimum(x[trial], safe[trial])[rest] for x in (before, after))
        np.testing.assert_array_equal(low, high, err_msg=str(trial))


def test_a_survival_never_exceeds_the_one_before_it() -> None:
    """A parallel prefix product's does (rounding, where a confidence is 1), and a slot would then admit itself."""
    rng = np.random.default_rng(3)
    confidence = rng.uniform(0.7, 1, (4000, 16)).astype(np.float32)
    confidence[rng.random(confidence.shape) < 0.3] = 1
    survival = np.asarray(jax.jit(survival_of)(confidence))
    assert (np.diff(survival, axis=1) <= 0).all()
    np.testing.assert_allclose(survival, np.cumprod(confidence, axis=1), rtol=1e-5)


def test_dead_rows_take_nothing_whatever_they_hold() -> None:
    confidence = np.array([[0.5, 0.5], [np.nan, 1.0], [1.0, 1.0], [0.9, np.nan]], np.float32)
    assert lengths(confidence, 3, live=[True, False, False, True]) == [3, 0, 0, 2]


def test_room_before_the_end_of_the_context_bounds_every_row() -> None:
    confidence = np.ones((4, 3), np.float32)
    assert lengths(confidence, 12, room=[0, 1, 3, -2]) == [1, 2, 4, 1]
    assert lengths(confidence, 2, room=[0, 1, 3, 3]) == [1, 2, 2, 1]  # rows without room leave the budget to others
    assert lengths(confidence, 0, Schedule(3, min_rows=3), room=[0, 1, 3, 3]) == [1, 2, 3, 3]


def test_pinned_requests_are_verified_in_full_whatever_the_neighbours_want() -> None:
    rng = np.random.default_rng(4)
    for budget in (0, 3, 5, 9):
        confidence = rng.uniform(0.1, 1, (3, 3)).astype(np.float32)
        confidence[1] = 1e-9
        got = lengths(confidence, budget, pinned=[False, True, False])
        assert got[1] == 4
        assert (got[0] - 1) + (got[2] - 1) == min(max(budget - 3, 0), 6)
    assert lengths(np.ones((2, 3)), 9, Schedule(3), pinned=[True, False], live=[False, True]) == [0, 4]


def test_limits_that_contradict_each_other_are_refused() -> None:
    for wrong in ((3, 4, 2), (3, 1, 5), (3, -1, 0)):
        with pytest.raises(ConfigError, match="min_verify_rows"):
            Schedule(*wrong)


def test_modes_differ_in_the_rows_of_the_forward_only() -> None:
    window = jnp.array([4, 1, 0, 2])
    assert forward_rows("compact", window, 5).tolist() == [4, 1, 0, 2]
    for mode in ("static", "cap"):
        assert forward_rows(mode, window, 5).tolist() == [6, 6, 0, 6]


@pytest.mark.parametrize("mode", ["ratio", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compact_emits_what_cap_emits_whatever_the_absent_rows_hold(mode: str, temperature: float) -> None:
    """Rows behind a request's window are in cap's forward and not in compact's: nothing may read them."""
    rng, many, m, vocab = np.random.default_rng(6), 300, 4, 6
    logits = rng.normal(size=(many, m + 1, vocab)).astype(np.float32)
    q = rng.dirichlet(np.ones(vocab), (many, m)).astype(np.float32)
    drafts = rng.integers(0, vocab, (many, m)).astype(np.int32)
    drafts[::2] = logits[::2, :-1].argmax(axis=-1)
    kept = rng.integers(0, m + 1, many).astype(np.int32)
    absent = np.where(np.arange(m + 1)[:, None] > kept[:, None, None], np.float32(np.nan), logits)
    u = rng.random((many, m + 1)).astype(np.float32)
    ones = jnp.ones(many)
    sampling = SlotSampling(temperature * ones, jnp.zeros(many, jnp.int32), ones, 0 * ones)

    @jax.jit
    def emit(rows):
        proposal = Proposal(drafts, Dense(q))
        out = accept(rows, proposal, sampling, u[:, :m], u[:, m], kept, mode)
        return out.accepted, out.tokens(proposal)

    for cap, compact in zip(emit(logits), emit(absent), strict=True):
        np.testing.assert_array_equal(cap, compact)
    assert set(np.asarray(emit(absent)[0]).tolist()) == set(range(m + 1))


def test_simulated_acceptance_has_the_asked_rates_and_obeys_the_cut() -> None:
    rates, rng = np.array([0.8, 0.5, 0.9], np.float32), np.random.default_rng(5)
    u = rng.random((20_000, 3)).astype(np.float32)
    likely = np.tile(np.arange(4, dtype=np.int32) + 10, (len(u), 1))
    cut = rng.integers(0, 4, len(u)).astype(np.int32)
    out = jax.jit(simulated_accept)(rates, likely, u, cut)
    accepted = np.asarray(out.accepted)
    assert (accepted <= cut).all()
    np.testing.assert_array_equal(np.asarray(out.token), 10 + accepted)
    whole = accepted[cut == 3]
    for slot, share in enumerate(np.cumprod(rates)):
        assert abs((whole > slot).mean() - share) < 0.02
