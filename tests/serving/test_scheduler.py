"""The scheduling policy alone: who is next, who shares a chunk, what a prompt takes, and when not to draft."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxspec.decoding.plan import Schedule
from jaxspec.serving.adaptive import DraftSwitch, ObservedAcceptance, PrefillSpeed, RequestSwitch
from jaxspec.serving.budget import search
from jaxspec.serving.cost import AdditiveTable
from jaxspec.serving.scheduler import AGING_SECONDS, OVERTAKING, PATIENCE_SECONDS, choose, shares

pytestmark = pytest.mark.ci

# -- a queue ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Asked:
    id: int
    arrived: float = 0.0
    priority: int = 0
    deadline: float = math.inf
    pages: int = 1


def order(waiting: list[Asked], now: float, pages: float = math.inf) -> list[int]:
    """Ids as they are chosen, one after the other, from the same moment and the same free pages."""
    found, waiting = [], list(waiting)
    while (one := choose(waiting, now, lambda one: one.pages <= pages)) is not None:
        waiting.remove(one)
        found.append(one.id)
    return found


def test_order_is_priority_then_deadline_then_arrival_and_waiting_counts() -> None:
    waiting = [Asked(1), Asked(2, deadline=9.0), Asked(3, priority=1), Asked(4, 0.1, deadline=5.0), Asked(5, -0.1)]
    assert order(waiting, 0.2) == [3, 4, 2, 5, 1]
    old, new = Asked(1, 0.0), Asked(2, 1.9 * AGING_SECONDS, priority=2)
    assert order([old, new], 2 * AGING_SECONDS - 0.1) == [2, 1]
    assert order([old, new], 2 * AGING_SECONDS) == [1, 2]  # two steps of age


def test_what_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    large, small = Asked(1, 0.0, pages=9), Asked(2, 1.0)
    assert order([large, small], PATIENCE_SECONDS, pages=5) == [2]
    assert order([large, small], PATIENCE_SECONDS + 0.1, pages=5) == []
    assert order([large, small], PATIENCE_SECONDS + 0.1, pages=9) == [1, 2]
    asked = []
    for count, found in ((OVERTAKING, 99), (OVERTAKING + 1, None)):  # a long queue is not searched in every round
        queue = [Asked(id, id / 100, pages=9) for id in range(count)] + [Asked(99, 1.0)]
        one = choose(queue, 1.0, lambda one: asked.append(one) or one.pages < 9)
        assert (one and one.id) == found
    assert len(asked) == 2 * (OVERTAKING + 1)


def test_low_priority_is_served_under_a_flood_of_high_priority() -> None:
    """One is served a second, two that are more important arrive."""
    waiting, now = [Asked(0)], 0.0
    while waiting[0].id == 0:
        waiting += [Asked(id, now, priority=3) for id in (1, 2)]
        waiting.remove(choose(waiting, now, lambda one: True))
        now += 1.0
        assert now < 10 * AGING_SECONDS
    assert now >= 3 * AGING_SECONDS


def test_prompts_share_a_chunk_and_each_gets_on() -> None:
    assert shares([100, 5, 100], 32) == [14, 5, 13]
    assert shares([3, 2], 32) == [3, 2]
    assert shares([], 4) == []
    for needs in ([1, 50], [50, 1, 60], [9] * 4):
        for rows in range(len(needs), 40):
            given = shares(needs, rows)
            assert all(1 <= got <= need for got, need in zip(given, needs, strict=True))
            assert sum(given) == min(rows, sum(needs))
    with pytest.raises(ValueError, match="needs: found 3"):
        shares([1, 1, 1], 2)


def test_a_prompt_takes_as_many_of_the_fastest_rounds_as_it_has_chunks() -> None:
    speed = PrefillSpeed(chunk=16)
    assert speed.seconds(1000) == 0.0
    for seconds in (0.5, 0.1, 3.0):
        speed.observe(seconds)
    assert [speed.seconds(rows) for rows in (0, 1, 16, 17)] == pytest.approx([0.0, 0.1, 0.1, 0.2])


# -- when and how much to draft ---------------------------------------------------------------------------------------

M = 7
TABLE = AdditiveTable(0.004, (1, 256), (0.0, 0.004), (1, 64, 512), (0.0, 0.001, 0.060))
DRAFT_SECONDS = 0.0008


class Decoding:
    """R requests that decode for ever: a drafter with given chances, rounds that cost what the table says."""

    def __init__(self, chances: np.ndarray, seed: int = 0):
        self.chances, self.rng = chances, np.random.default_rng(seed)
        self.seconds = self.tokens = 0.0

    def round(self, kept: np.ndarray | None) -> tuple[np.ndarray, float]:
        """`kept` drafts of each request are verified; None: no drafter. Returns accepted and seconds."""
        requests = len(self.chances)
        kept = np.zeros(requests, int) if kept is None else kept
        drafting = DRAFT_SECONDS if kept.any() else 0.0
        stands = np.cumprod(self.rng.random((requests, M)) < self.chances[:, None], axis=1)
        accepted = (stands * (np.arange(M) < kept[:, None])).sum(axis=1)
        seconds = float(TABLE.step_seconds(requests, np.array(requests + kept.sum()))) + drafting
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + requests + accepted.sum()
        return accepted, seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def constant(chances: np.ndarray, kept: int | None, rounds: int = 800) -> float:
    world = Decoding(chances)
    for _ in range(rounds):
        world.round(None if kept is None else np.full(len(chances), kept))
    return world.rate


def spread(survival: np.ndarray, budget: int) -> np.ndarray:
    order = np.argsort(-survival.T.reshape(-1), kind="stable")[:budget]
    return np.bincount(order % len(survival), minlength=len(survival))


def scheduled(chances: np.ndarray, rounds: int = 3000) -> tuple[float, float]:
    """Observed acceptance, budget search and both switches; the rate, and the share of rounds that drafted."""
    requests = len(chances)
    world, switch, drafted = Decoding(chances), DraftSwitch(), 0
    seen = ObservedAcceptance(requests, M)
    own = [RequestSwitch() for _ in chances]
    slots = np.arange(requests)
    for _ in range(rounds):
        drafting = switch.drafting(requests)
        kept = None
        if drafting:
            survival = np.cumprod(seen.confidence(slots), axis=1)
            survival[[not one.drafting for one in own]] = 0
            kept = spread(survival, search(survival, TABLE, Schedule(M)).budget)
        accepted, seconds = world.round(kept)
        switch.observe(requests, drafting, int(accepted.sum()) + requests, seconds)
        drafted += drafting
        if kept is not None:
            seen.observe(slots, kept, accepted)
            for one, count in zip(own, accepted.tolist(), strict=True):
                one.observe(count, 0.05)
    return world.rate, drafted / rounds


@pytest.mark.parametrize("requests", [1, 8, 64, 200])
@pytest.mark.parametrize("chance", [0.02, 0.4, 0.85])
def test_the_loaded_server_is_never_slower_than_without_a_drafter(requests: int, chance: float) -> None:
    """At least 0.97 times the best fixed choice: no drafter, or 2, 4 or all of the drafts."""
    chances = np.full(requests, chance)
    best = max(constant(chances, kept) for kept in (None, 2, 4, M))
    rate, share = scheduled(chances)
    assert rate > 0.97 * best, (rate, best, share)


def test_mixed_requests_are_faster_than_any_one_length() -> None:
    chances = np.array([0.05] * 12 + [0.9] * 12)
    rate, _ = scheduled(chances)
    assert rate > 1.05 * max(constant(chances, kept) for kept in (None, 2, 4, M))


def test_observed_acceptance_counts_what_was_tested() -> None:
    seen = ObservedAcceptance(2, 3, decay=1.0, prior=0.5, weight=2.0)
    zero, one, three = (np.array([n]) for n in (0, 1, 3))
    seen.observe(zero, three, one)  # slot 1 stood, slot 2 fell, slot 3 was not reached
    np.testing.assert_allclose(seen.confidence(np.array([0])), [[2 / 3, 1 / 3, 1 / 2]])
    seen.observe(zero, one, one)
    np.testing.assert_allclose(seen.confidence(np.array([0])), [[3 / 4, 1 / 3, 1 / 2]])
    np.testing.assert_allclose(seen.confidence(np.array([1])), [[0.5] * 3])
    seen.reset(0)
    np.testing.assert_allclose(seen.confidence(np.array([0, 1])), [[0.5] * 3] * 2)


def test_what_is_not_tried_any_more_drifts_back_and_is_tried_again() -> None:
    seen = ObservedAcceptance(1, 1)
    zero, one = np.array([0]), np.array([1])
    for _ in range(50):
        seen.observe(zero, one, zero)
    low = float(seen.confidence(np.array([0]))[0, 0])
    for _ in range(100):
        seen.observe(zero, zero, zero)
    assert low < 0.1 < 0.5 < float(seen.confidence(np.array([0]))[0, 0])


def test_the_switch_tries_the_loser_again_and_less_and_less_often() -> None:
    switch, tried = DraftSwitch(trial=4, first=16, longest=256), []
    for step in range(900):
        drafting = switch.drafting(8)
        if drafting:
            tried.append(step)
        switch.observe(8, drafting, 16 if drafting else 20, 0.01)
    assert tried[:4] == [0, 1, 2, 3]
    starts = [step for step in tried if step - 1 not in tried]
    assert np.diff(starts[1:]).tolist()[:3] == [68, 260, 260]
    for _ in range(270):  # the drafter pays now: the next trial finds out
        drafting = switch.drafting(8)
        switch.observe(8, drafting, 40 if drafting else 20, 0.01)
    assert switch.drafting(8)
    assert switch.drafting(64)  # another load knows nothing of it


def test_a_request_pauses_and_is_tried_again_after_twice_as_long() -> None:
    switch, states = RequestSwitch(patience=4, first=8, longest=16), []
    for _ in range(80):
        states.append(switch.drafting)
        switch.observe(0, 0.2)
    edges = np.flatnonzero(np.diff(np.array([False, *states, False]).astype(int)))
    assert np.diff(edges).tolist()[:6] == [11, 8, 11, 16, 11, 16]
    happy = RequestSwitch(patience=4)
    for _ in range(20):
        happy.observe(1, 0.2)
        assert happy.drafting
    torn = RequestSwitch(patience=4)  # one in eight rounds brings 3: 0.375 a round, though most windows bring none
    for step in range(64):
        torn.observe(3 * (step % 8 == 7), 0.25)
        assert torn.drafting


def test_drafts_beside_a_chunk_pay_if_their_seconds_would_not_bring_more_elsewhere() -> None:
    """8 requests, 1 s a plain round, a chunk adds 4 s; drafts add 1 s and bring `more`. Beside a chunk any 2 of them
    raise that round's own rate; what counts is whether they bring the 8 that a second brings elsewhere."""
    for more, pays in ((4, False), (12, True)):
        switch, drafted = DraftSwitch(), 0
        for step in range(400):
            chunk = step % 2 == 1
            drafting = switch.drafting(8, chunk)
            drafted += drafting and chunk
            switch.observe(8, drafting, 8 + more * drafting, 1.0 + drafting + 4 * chunk, chunk)
        assert (drafted > 150) == pays, (more, drafted)
        for chunk in (False, True):
            assert switch.break_even(8, chunk) == pytest.approx(1.0 if more == 4 or not chunk else 10 / 8)


def test_one_request_is_not_judged_by_a_few_rounds() -> None:
    """Three in ten rounds bring 4 more tokens at 1.35 times the seconds: 10 rounds often say that drafts lose."""
    for seed in range(8):
        switch, rng, drafted = DraftSwitch(), np.random.default_rng(seed), 0
        for _ in range(1500):
            drafting = switch.drafting(1)
            drafted += drafting
            more = 4 * int(rng.random() < 0.3)
            switch.observe(1, drafting, 1 + more * drafting, 1.35 if drafting else 1.0)
        assert drafted > 1400, (seed, drafted)


def test_a_server_that_is_kept_from_drafting_decides_against_it() -> None:
    switch = DraftSwitch()
    for _ in range(30):  # as while rounds without drafts are profiled
        switch.observe(8, False, 8, 0.01)
    assert not switch.drafting(8) and switch.break_even(8) == 0.0
