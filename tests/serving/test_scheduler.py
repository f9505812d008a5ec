"""The scheduling policy, alone and in a simulated server: fairness, deadlines, pages, and when not to draft."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxspec.decoding.plan import Schedule
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serving.adaptive import DraftSwitch, ObservedAcceptance, RequestSwitch, break_even
from jaxspec.serving.budget import search
from jaxspec.serving.cost import AdditiveTable
from jaxspec.serving.pages import PageAllocator, PageLease
from jaxspec.serving.scheduler import Limits, Overloaded, Request, Scheduler

pytestmark = pytest.mark.ci

LIMITS = Limits(slots=4, rows=32, page_size=4, pages=100, queue=8, rows_in_flight=8, max_context=200)


def scheduler(**changes) -> Scheduler:
    return Scheduler(dataclasses.replace(LIMITS, **changes))


def submit(policy: Scheduler, *requests: Request, now: float = 0.0) -> None:
    for request in requests:
        policy.submit(request, now)


def request(id: int, rows: int = 8, arrived: float = 0.0, **about) -> Request:
    return Request(id, rows, about.pop("max_new_tokens", 16), arrived, **about)


def prefilled(policy: Scheduler, plan, seconds: float | None = None) -> None:
    for id, rows in plan.prefill.items():
        policy.prefilled(id, rows, seconds)


# -- the policy -------------------------------------------------------------------------------------------------------


def test_prefills_share_a_round_and_leave_decoding_its_rows() -> None:
    policy = scheduler()
    submit(policy, request(1, 100), request(2, 5), request(3, 100))
    plan = policy.plan(0.0, 100)
    assert [one.id for one in plan.admitted] == [1, 2, 3]
    assert plan.prefill == {2: 5, 1: 14, 3: 13} and plan.decoding == ()
    prefilled(policy, plan)
    plan = policy.plan(0.1, 100)
    assert plan.decoding == (2,)
    assert plan.prefill == {1: 4, 3: 4}  # a quarter of the 32 rows while somebody decodes
    assert policy.draft_rows(plan) == 32 - 1 - 8
    assert plan.prefill_rows == 8


def test_a_prefix_hit_needs_no_prefill_and_no_pages() -> None:
    policy = scheduler()
    submit(policy, request(1, 40))
    plan = policy.plan(0.0, 3, lambda one: 36)
    assert plan.prefill == {1: 4} and len(plan.admitted) == 1
    assert scheduler().pages_to_start(request(1, 40)) == 12
    assert scheduler().pages_to_start(request(1, 199)) == 50  # never past the context


def test_admission_waits_for_pages_and_keeps_them_for_who_waited_long() -> None:
    policy = scheduler()
    submit(policy, request(1, 80), request(2, 8, arrived=1.0), now=1.0)
    assert [one.id for one in policy.plan(1.0, 10).admitted] == [2]  # the large one is overtaken
    submit(policy, request(3, 8, arrived=6.0), now=6.0)
    assert policy.plan(6.0, 10).admitted == ()  # but not for longer than `patience`
    assert [one.id for one in policy.plan(6.5, 26).admitted] == [1, 3]


def test_order_is_priority_then_deadline_then_arrival_and_waiting_counts() -> None:
    policy = scheduler(slots=1)
    submit(policy, request(1), request(2, deadline=9.0), request(3, priority=1), request(4, deadline=5.0))
    order = []
    for now in (0.0, 0.1, 0.2, 0.3):
        order += [one.id for one in policy.plan(now, 100).admitted]
        policy.finish(order[-1])
    assert order == [3, 4, 2, 1]
    submit(policy, request(5, arrived=0.0), request(6, arrived=19.0, priority=2), now=19.0)
    assert [one.id for one in policy.plan(19.0, 100).admitted] == [6]
    policy.finish(6)
    submit(policy, request(7, arrived=20.5, priority=2), now=20.5)
    assert [one.id for one in policy.plan(20.5, 100).admitted] == [5]  # two steps of age


def test_the_queue_is_bounded_and_what_never_fits_is_refused() -> None:
    policy = scheduler(queue=2, pages=20)
    with pytest.raises(RequestError, match="pages") as caught:
        submit(policy, request(1, 100))
    assert not isinstance(caught.value, Overloaded)
    submit(policy, request(1), request(2))
    with pytest.raises(Overloaded, match="queue"):
        submit(policy, request(3))
    policy.finish(1)
    submit(policy, request(3))
    policy.finish(99)
    assert [one.id for one in policy.waiting] == [2, 3]


def test_deadlines_are_refused_as_soon_as_they_cannot_be_met() -> None:
    policy = scheduler(slots=1)
    with pytest.raises(Overloaded, match="deadline"):
        submit(policy, request(1, deadline=1.0), now=2.0)
    submit(policy, request(2, 20), request(3, 20, deadline=3.0))
    plan = policy.plan(0.0, 100)
    assert [one.id for one in plan.admitted] == [3]
    prefilled(policy, plan, seconds=2.0)  # 10 rows a second
    submit(policy, request(4, 20, deadline=5.0), now=2.9)
    with pytest.raises(Overloaded, match="deadline"):
        submit(policy, request(5, 40, deadline=6.0), now=2.9)
    assert [one.id for one in policy.plan(3.5, 100).refused] == [4]
    assert [one.id for one in policy.waiting] == [2]


def test_preemption_takes_the_least_important_and_keeps_its_answer() -> None:
    policy = scheduler()
    submit(policy, request(1, priority=1), request(2, arrived=1.0, deadline=50.0), request(3, arrived=0.5), now=1.0)
    plan = policy.plan(1.0, 100)
    prefilled(policy, plan)
    assert policy.victim(policy.running[1]).id == 2
    assert policy.victim(policy.running[2]).id == 2  # the last to come goes itself
    policy.emitted(2, 5)
    back = policy.preempt(2)
    assert (back.prompt_rows, back.max_new_tokens, back.done_rows, back.emitted) == (13, 11, 0, 0)
    assert back.deadline == math.inf and policy.waiting == [back] and 2 not in policy.running
    submit(policy, request(4, deadline=50.0), now=1.0)
    policy.plan(1.0, 100)
    assert policy.preempt(4).deadline == 50.0  # its first token is still due
    policy.finish(2)
    assert policy.victim(policy.running[3]).id == 3  # never a more important one


@pytest.mark.parametrize("wrong", [{"prefill_share": 0.0}, {"prefill_share": 1.0}, {"rows": 4}, {"aging_seconds": 0.0}])
def test_limits_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.{next(iter(wrong))}"):
        scheduler(**wrong)


# -- a simulated server -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trace:
    """Times of one request's tokens, and how often it was preempted."""

    request: Request
    tokens: list[float] = dataclasses.field(default_factory=list)
    preempted: int = 0


class Simulation:
    """Rounds of 10 ms + 0.1 ms a row over real pages. A decoding request brings 1 to 5 tokens a round."""

    def __init__(self, limits: Limits, seed: int = 0):
        self.policy, self.limits, self.now = Scheduler(limits), limits, 0.0
        self.allocator = PageAllocator(limits.pages + 1, limits.page_size)
        self.leases: dict[int, PageLease] = {}
        self.traces: dict[int, Trace] = {}
        self.answers: dict[int, int] = {}
        self.refused: list[int] = []
        self.rng = np.random.default_rng(seed)

    def submit(self, one: Request) -> None:
        self.policy.submit(one, self.now)
        self.traces[one.id] = Trace(one)
        self.answers[one.id] = one.max_new_tokens

    def step(self) -> None:
        plan = self.policy.plan(self.now, self.allocator.free)
        self.refused += [one.id for one in plan.refused]
        for one in plan.admitted:
            self.leases[one.id] = PageLease(self.limits.page_size, [])
        rows = 0
        for id in (*plan.decoding, *plan.prefill):
            if id not in self.policy.running:
                continue  # preempted by one before it
            count = plan.prefill.get(id, self.limits.rows_in_flight)
            rows += plan.prefill.get(id, 1 + min(self.policy.draft_rows(plan) // max(len(plan.decoding), 1), 7))
            while id in self.policy.running and not self.reserve(id, count):
                self.preempt(self.policy.victim(self.policy.running[id]).id)
        assert rows <= self.limits.rows
        self.now += 0.010 + 0.0001 * rows
        for id, count in plan.prefill.items():
            if id in self.policy.running:
                self.leases[id].commit(count)
                self.policy.prefilled(id, count, 0.010 + 0.0001 * rows)
                if not self.policy.running[id].prefilling:
                    self.emit(id, 1)
        for id in plan.decoding:
            if id in self.policy.running:
                count = int(self.rng.integers(1, 6))
                self.leases[id].commit(min(count, self.limits.max_context - self.leases[id].committed))
                self.emit(id, count)

    def reserve(self, id: int, rows: int) -> bool:
        return self.leases[id].reserve(self.allocator, rows, self.limits.max_context, lambda count: 0)

    def emit(self, id: int, count: int) -> None:
        count = min(count, self.answers[id])
        self.answers[id] -= count
        self.traces[id].tokens += [self.now] * count
        self.policy.emitted(id, count)
        if not self.answers[id]:
            self.policy.finish(id)
            self.leases.pop(id).release(self.allocator)

    def preempt(self, id: int) -> None:
        self.policy.preempt(id)
        self.traces[id].preempted += 1
        self.leases.pop(id).release(self.allocator)

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.policy.waiting and not self.policy.running:
                return
            self.step()
        raise AssertionError("requests are left over")


SIMULATED = Limits(
    slots=8, rows=128, page_size=16, pages=400, queue=1000, rows_in_flight=16, max_context=4096, aging_seconds=1.0
)


def test_a_long_prompt_neither_stalls_answers_nor_starves() -> None:
    limits = dataclasses.replace(SIMULATED, rows=1024, prefill_share=1 / 16)
    world = Simulation(limits)
    for id in range(4):
        world.submit(Request(id, 20, 400, 0.0))
    for _ in range(5):
        world.step()
    world.submit(Request(9, 3000, 10, world.now))
    started = world.now
    world.drain()
    for id in range(4):
        gaps = np.diff([0.0, *sorted(set(world.traces[id].tokens))][1:])
        assert gaps.max() < 0.022, gaps.max()  # a round of prompt rows alone would take 0.11 s
    rounds = 3000 / (limits.rows * limits.prefill_share)
    assert world.traces[9].tokens[0] - started < rounds * 0.022 * 1.1


def test_a_short_prompt_overtakes_long_ones_that_came_before() -> None:
    world = Simulation(SIMULATED)
    for id in range(3):
        world.submit(Request(id, 1900, 5, 0.0))
    world.step()
    world.submit(Request(9, 30, 5, world.now))
    world.drain()
    first = {id: trace.tokens[0] for id, trace in world.traces.items()}
    assert first[9] < 0.1 < min(first[id] for id in range(3))


def test_low_priority_is_served_under_a_flood_of_high_priority() -> None:
    world = Simulation(dataclasses.replace(SIMULATED, slots=2), seed=1)
    for id in range(1, 1200):
        if id == 21:
            world.submit(Request(0, 50, 5, world.now))
        if len(world.policy.waiting) < 20:
            world.submit(Request(id, 50, 40, world.now, priority=3))
        world.step()
        if id > 21 and world.traces[0].tokens:
            break
    # three steps of a second more than those have that are waiting for the two to three seconds of the queue
    assert 3.0 < world.traces[0].tokens[0] < 8.0


def test_random_load_on_few_pages_ends_well() -> None:
    """With preemptions everybody still gets the whole answer, and no page is lost."""
    preempted = 0
    for seed in range(4):
        world = Simulation(dataclasses.replace(SIMULATED, pages=90, max_context=1024), seed)
        rng = np.random.default_rng(seed)
        sizes = {}
        for id in range(60):
            sizes[id] = int(rng.integers(1, 300))
            world.submit(Request(id, int(rng.integers(1, 400)), sizes[id], world.now, int(rng.integers(0, 2))))
            for _ in range(int(rng.integers(0, 12))):
                world.step()
            if rng.random() < 0.1 and world.policy.running:
                gone = int(rng.choice(list(world.policy.running)))
                world.policy.finish(gone)
                world.leases.pop(gone).release(world.allocator)
                sizes.pop(gone)
        world.drain()
        assert world.allocator.free == world.allocator.capacity
        for id, size in sizes.items():
            assert len(world.traces[id].tokens) == size
        preempted += sum(trace.preempted for trace in world.traces.values())
    assert preempted > 20


def test_deadlines_under_overload_are_kept_or_refused() -> None:
    world = Simulation(dataclasses.replace(SIMULATED, slots=4), seed=2)
    rng = np.random.default_rng(3)
    refused = 0
    for id in range(150):
        try:
            world.submit(Request(id, int(rng.integers(50, 600)), 30, world.now, deadline=world.now + 1.0))
        except Overloaded:
            refused += 1
        for _ in range(3):
            world.step()
    world.drain()
    served = [trace for trace in world.traces.values() if trace.tokens]
    late = [trace for trace in served if trace.tokens[0] > trace.request.deadline and not trace.preempted]
    assert len(served) + len(world.refused) + refused == 150
    assert len(served) > 40 and len(world.refused) + refused > 20
    assert len(late) < 0.25 * len(served), len(late)


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
    switch, tried = DraftSwitch(trial=4, first=16, longest=64), []
    for step in range(400):
        drafting = switch.drafting(8)
        if drafting:
            tried.append(step)
        switch.observe(8, drafting, 16 if drafting else 20, 0.01)
    assert tried[:4] == [0, 1, 2, 3]
    starts = [step for step in tried if step - 1 not in tried]
    assert np.diff(starts[1:]).tolist()[:3] == [36, 68, 68]
    for _ in range(70):  # the drafter pays now: the next trial finds out
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
    assert np.diff(edges).tolist()[:6] == [4, 8, 4, 16, 4, 16]
    happy = RequestSwitch(patience=4)
    for _ in range(20):
        happy.observe(1, 0.2)
        assert happy.drafting
    assert break_even(0.012, 0.010) == pytest.approx(0.2)
    assert break_even(0.012, 0.0) == math.inf
