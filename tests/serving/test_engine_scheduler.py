"""Who runs in the engine's rounds, counted in steps: prompts beside answers, pages that run out, priorities."""

from __future__ import annotations

import math

import pytest

from jaxspec.decoding.request import SamplingParams
from jaxspec.serving.adaptive import PrefillSpeed
from jaxspec.serving.engine import Engine
from jaxspec.serving.scheduler import AGING_SECONDS
from tests.serving.test_engine_rounds import POSITIONS, M, build, greedy, prompt

pytestmark = pytest.mark.ci


class Clock:
    """Seconds that a test lets pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CHUNK, PIECES, PAGE = 8, 2, 4
TIGHT = {"num_slots": 3, "slot_buckets": (3,), "num_pages": 26, "pause_drafting": False, "overlap": False}


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def tight(clock: Clock) -> Engine:
    """Pages for little more than one whole request, and a clock that stands still."""
    return build(accepted=(0, 0, 0, 0), clock=clock, prefix_cache=False, **TIGHT)


@pytest.fixture(scope="module")
def cached(clock: Clock) -> Engine:
    """The same with a prefix cache."""
    return build(accepted=(0, 0, 0, 0), clock=clock, **TIGHT)


def finished(engine: Engine, limit: int = 400) -> list[int]:
    """Handles in the order in which they end."""
    order = []
    for _ in range(limit):
        if not engine.live:
            return order
        order += [event.handle for event in engine.step() if event.finish_reason is not None]
    raise AssertionError("the engine does not come to an end")


def test_a_long_prompt_gets_on_beside_a_flood_of_short_ones_and_stalls_no_answer() -> None:
    engine = build(
        accepted=(0, 0, 0, 0), num_slots=6, slot_buckets=(6,), prefill_pieces=PIECES, prefix_cache=False,
        pause_drafting=False, overlap=False,
    )  # fmt: skip
    answer = engine.admit(prompt(0, 3), greedy(80))
    engine.step()
    long = engine.admit(prompt(1, 70), greedy(2))
    steps, shorts, served = 0, set(), 0
    while True:
        while engine.free_slots:  # another short prompt whenever there is room
            shorts.add(engine.admit(prompt(2, 8 + steps % 4), greedy(1)))
        events = engine.step()
        steps += 1
        mine = [event for event in events if event.handle == answer]
        assert len(mine) == 1 and mine[0].tokens, "an answer waited for prompts"
        served += sum(event.handle in shorts for event in events)
        if any(event.handle == long for event in events):
            break
        assert steps <= math.ceil(70 / (CHUNK / PIECES)), "the long prompt waits for short ones"
    assert steps > 70 // CHUNK  # it had no chunk for itself
    assert served >= steps // 4, "short prompts wait for the long one"


def test_a_short_prompt_is_not_kept_behind_a_long_one(tight) -> None:
    long, short = tight.admit(prompt(0, 80), greedy(1)), tight.admit(prompt(1, 4), greedy(1))
    assert finished(tight) == [short, long]


def test_the_least_important_gives_way_then_the_youngest(tight) -> None:
    """Two answers that fit one after the other only: whoever gives way ends last."""
    for first, second, expected in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (-1, 0, 1)):
        before = tight.preemptions
        handles = [
            tight.admit(prompt(lane, 20), greedy(60), priority=priority) for lane, priority in ((0, first), (1, second))
        ]
        assert finished(tight)[0] == handles[expected]
        assert tight.preemptions > before


def test_who_gave_way_gets_on_in_the_end_under_a_flood_of_important_requests(tight, clock) -> None:
    low = tight.admit(prompt(0, 20), greedy(60))
    steps, ended = 0, False
    while not ended:
        if tight.free_slots:
            tight.admit(prompt(1, 30), greedy(40), priority=2)
        clock.now += 0.25
        steps += 1
        ended = any(event.handle == low and event.finish_reason for event in tight.step())
        assert steps < 2000
    # once it is two steps older than those that come, it gives nothing away any more
    assert 60 < steps < 4 * 3 * AGING_SECONDS + 100
    finished(tight)
    clock.now = 0.0


def test_an_important_prompt_without_pages_waits_for_those_that_have_them(tight) -> None:
    low = tight.admit(prompt(0, 90), greedy(3))
    tight.step()
    high = tight.admit(prompt(1, 40), greedy(3), priority=5)
    assert finished(tight) == [low, high]


def test_a_request_fits_if_its_prompt_and_first_rounds_do(tight, cached) -> None:
    plain = SamplingParams()
    rows = M + 1  # once, without overlap
    assert tight.fits([1] * (POSITIONS - 1), plain)
    held = tight.admit(prompt(0, 50), greedy(1))
    left = 25 - math.ceil((50 + rows) / PAGE)  # promised, though not yet taken
    assert tight.fits([1] * (left * PAGE - rows), plain)
    assert not tight.fits([1] * (left * PAGE - rows + 1), plain)
    tight.cancel(held)
    finished(tight)
    text = prompt(0, 90)
    cached.admit(text, greedy(1))
    finished(cached)
    assert cached.held_pages > 20
    assert cached.fits([1] * 90, plain)  # nobody but the cache holds those pages
    cached.admit(text[:81], greedy(12))
    cached.step()
    assert not cached.fits([1] * 40, plain)
    assert cached.fits([*text[:80], 7, 7], plain)  # shares what a request holds anyway
    finished(cached)


def test_the_least_time_to_a_first_token_knows_chunks_and_prefixes(cached, clock, monkeypatch) -> None:
    cached.warm_up()
    whole = cached._run

    def slow(*args):
        clock.now += 0.5
        return whole(*args)

    monkeypatch.setattr(cached, "_run", slow)
    monkeypatch.setattr(cached, "_prefill_speed", PrefillSpeed(CHUNK))
    tokens, plain = prompt(2, 33), greedy(4)
    assert cached.seconds_to_first_token(tokens, plain) == 0.0
    cached.admit(prompt(1, 9), greedy(2))
    finished(cached)
    assert cached.seconds_to_first_token(tokens, plain) == pytest.approx(5 * 0.5)
    cached.admit(tokens, plain)
    finished(cached)
    assert cached.seconds_to_first_token(tokens, plain) == pytest.approx(0.5)
