"""The engine against lone requests: whatever arrives, leaves or gives way beside it, a request's ids are its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serving.cost import StepsTable
from jaxspec.serving.engine import Engine
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import (
    LANE,
    bigram_draft,
    by_lane,
    random_table,
    script,
    scripted,
    table_target,
    tiny_target,
    walk,
)

pytestmark = pytest.mark.ci

M, LANES, POSITIONS = 4, 4, 96
TABLE = random_table(LANES, POSITIONS, seed=3)
ACCEPTED = (0, 1, 3, M)


def table_engine(confident: bool = False, **changes: Any) -> Engine:
    draft = scripted(TABLE, M, script(TABLE, M, by_lane(ACCEPTED)))
    if confident:
        chance = np.random.default_rng(5).uniform(0.05, 0.99, (LANES * LANE, POSITIONS, M)).astype(np.float32)
        draft.params["confidence"] = chance
    options = {"num_slots": 4, "max_context": POSITIONS, "prefill_chunk": 8, "page_size": 4, "slot_buckets": (4,)}
    options |= {"rules": False, "max_logprobs": None}  # test_engine_sampling.py has them
    return Engine(table_target(TABLE), draft, cache_fill=float("nan"), **{**options, **changes})


def drain(engine: Engine, found: dict[int, list[int]], reasons: dict[int, str], steps: int = 10_000) -> None:
    for _ in range(steps):
        if not engine.live:
            return
        for event in engine.step():
            found.setdefault(event.handle, []).extend(event.tokens)
            if event.finish_reason is not None:
                reasons[event.handle] = event.finish_reason
    raise AssertionError("the engine does not come to an end")


def prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(LANES * LANE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def soak(engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]], rng: random.Random, cancel: float = 0.0):
    """Feeds the requests in at random moments, cancels some; the answers of the others, by index."""
    found: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    owners: dict[int, int] = {}
    waiting, gone = list(enumerate(asked)), set()
    while waiting or engine.live:
        while waiting and engine.free_slots and rng.random() < 0.6:
            index, (prompt, params) = waiting.pop(0)
            owners[engine.admit(prompt, params)] = index
        for event in engine.step():
            assert event.handle not in gone, "a cancelled request was heard of"
            assert event.handle not in reasons, "an ended request was heard of"
            found.setdefault(event.handle, []).extend(event.tokens)
            if event.finish_reason is not None:
                reasons[event.handle] = event.finish_reason
        if rng.random() < cancel and (running := [h for h in owners if h not in reasons and h not in gone]):
            gone.add(rng.choice(running))
            for handle in gone:  # also those that were cancelled before: it must not hurt
                engine.cancel(handle)
    return {owners[handle]: (found[handle], reasons[handle]) for handle in reasons}


@pytest.mark.parametrize(
    ("overlap", "pages", "confident"),
    [pytest.param(True, None, False, marks=REPEATS), (True, 31, False), (True, 31, True), (False, 31, True)],
    ids=["overlap-roomy", "overlap-preempting", "overlap-preempting-budgeted", "no-overlap-preempting-budgeted"],
)
def test_every_answer_equals_a_walk_by_hand(overlap, pages, confident):
    table = StepsTable((1, 6, 12, 16), (1000.0, 900.0, 500.0, 400.0), 20) if confident else None
    buckets = (2,) if pages is None else (4,)
    engine = table_engine(confident, overlap=overlap, num_pages=pages, cost_table=table, slot_buckets=buckets)
    rng = random.Random(7)
    asked = []
    for prompt in prompts(rng, 30):
        asked.append((prompt, SamplingParams(max_new_tokens=rng.randint(1, 40), ignore_eos=True)))
    answers = soak(engine, asked, rng, cancel=0.03)
    assert len(answers) > 15
    for index, (tokens, reason) in answers.items():
        prompt, params = asked[index]
        count = min(params.max_new_tokens, POSITIONS - len(prompt))
        assert (tokens, reason) == (walk(TABLE, prompt, count), "length")
    assert engine.compile_count == 0
    assert (engine.preemptions > 0) == (pages is not None)
    engine.drop_prefixes()
    assert engine.held_pages == 0


@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=REPEATS) for chunk in (1, 64))])
def test_B14_a_real_pair_answers_as_a_lone_request_does(chunk):
    target = tiny_target()
    draft = bigram_draft(target)
    lone = SlotRunner(target, num_slots=1, max_context=128, prefill_chunk=16)
    sizes = {"num_slots": 3, "max_context": 128, "prefill_chunk": chunk, "page_size": 8, "slot_buckets": (1,)}
    engine = Engine(target, draft, **sizes, rules=False, max_logprobs=None)
    rng = random.Random(chunk)
    asked = []
    for _ in range(8):
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 50))]
        asked.append((prompt, SamplingParams(max_new_tokens=rng.randint(1, 60), ignore_eos=rng.random() < 0.5)))
    asked += asked[:3]  # prompts that the prefix cache knows
    answers = soak(engine, asked, rng)
    for index, (tokens, reason) in answers.items():
        found: dict[int, list[int]] = {}
        reasons: dict[int, str] = {}
        lone.admit(*asked[index])
        for _ in range(200):
            for event in lone.step():
                found.setdefault(0, []).extend(event.tokens)
                reasons[0] = event.finish_reason or reasons.get(0, "")
            if not lone.live:
                break
        assert (tokens, reason) == (found[0], reasons[0])


def test_seeded_requests_without_a_drafter_keep_their_ids():
    target = tiny_target()
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30, ignore_eos=True) for seed in range(6)]
    rng = random.Random(1)
    asked = [([rng.randrange(60) for _ in range(20 + index)], params[index]) for index in range(6)]
    lone = SlotRunner(target, num_slots=1, max_context=96, prefill_chunk=16)
    engine = Engine(target, num_slots=3, max_context=96, prefill_chunk=16, page_size=8, num_pages=20)
    answers = soak(engine, asked, rng)
    for index, request in enumerate(asked):
        found: list[int] = []
        lone.admit(*request)
        while lone.live:
            for event in lone.step():
                found += event.tokens
        assert answers[index][0] == found


def test_B25_a_seeded_answer_goes_on_from_its_anchor_after_a_preemption():
    """With a drafter that is drawn from: the rounds after the preemption are those that there would have been."""
    target = tiny_target()
    noisy = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), target.params)
    draft = Draft(SmallModel(target.model, num_proposals=3), noisy)
    options = {"num_slots": 2, "max_context": 96, "prefill_chunk": 16, "page_size": 8, "slot_buckets": (2,)}
    quick = {"rules": False, "max_logprobs": None, "pause_drafting": False}
    asked = []
    for seed in range(5):
        prompt = [random.Random(seed).randrange(60) for _ in range(20 + seed)]
        asked.append((prompt, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=60, ignore_eos=True)))
    roomy, tight = (Engine(target, draft, **options, **quick, num_pages=pages) for pages in (None, 14))
    whole, given_way = soak(roomy, asked, random.Random(1)), soak(tight, asked, random.Random(2))
    assert whole == given_way
    assert roomy.preemptions == 0 and tight.preemptions > 0


def test_B27_a_prefix_hit_changes_neither_answer_nor_acceptance():
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 3]

    def run(engine: Engine) -> list[tuple[tuple[int, ...], int]]:
        engine.admit(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
        events = []
        while engine.live:
            events += engine.step()
        return [(event.tokens, event.accepted) for event in events]

    cached, fresh = (table_engine(prefix_cache=cache, pause_drafting=False) for cache in (True, False))
    first, second, without = run(cached), run(cached), run(fresh)
    assert first == second == without
    assert cached.held_pages > 0
    assert fresh.held_pages == 0


def test_B33_a_thousand_cancels_leave_no_page_behind():
    engine, rng = table_engine(num_pages=40), random.Random(3)
    running: list[int] = []
    for _ in range(1000):
        if engine.free_slots:
            prompt = prompts(rng, 1)[0]
            running.append(engine.admit(prompt, SamplingParams(max_new_tokens=50, ignore_eos=True)))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        engine.cancel(running.pop(rng.randrange(len(running))) if running else 0)
    drain(engine, {}, {})
    engine.drop_prefixes()
    assert engine.held_pages == 0


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"engine.num_pages: found 9, expected at least"):
        table_engine(num_pages=9)
    with pytest.raises(ConfigError, match=r"engine.slot_buckets: found 5"):
        table_engine(slot_buckets=(5,))
    engine = table_engine()
    with pytest.raises(RequestError, match="fewer than max_context"):
        engine.admit([1] * POSITIONS, SamplingParams())
