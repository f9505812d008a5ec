"""The engine's rounds on the table target: nothing compiled, one door to the host, drafting paused where it loses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import Event
from jaxspec.errors import ConfigError
from jaxspec.serving.cost import CostTable, StepsTable
from jaxspec.serving.engine import Engine
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import LANE, by_lane, random_table, script, scripted, table_target, walk

pytestmark = pytest.mark.ci

M, LANES, POSITIONS = 4, 4, 96
TABLE = random_table(LANES, POSITIONS, seed=3)
ACCEPTED = (0, 1, 3, M)
VOCAB = LANES * LANE


def build(accepted: Sequence[int] = ACCEPTED, confident: bool = False, **changes: Any) -> Engine:
    draft = scripted(TABLE, M, script(TABLE, M, by_lane(accepted)))
    if confident:
        chance = np.random.default_rng(5).uniform(0.05, 0.99, (VOCAB, POSITIONS, M)).astype(np.float32)
        draft.params["confidence"] = chance
    options = {"num_slots": 2, "max_context": POSITIONS, "prefill_chunk": 8, "page_size": 4, "slot_buckets": (2,)}
    options |= {"row_shares": (0.5,), "rules": False, "max_logprobs": None, "cache_fill": float("nan")}
    return Engine(table_target(TABLE), draft, **{**options, **changes})


def prompt(lane: int, length: int) -> list[int]:
    return [(5 * index + length) % VOCAB for index in range(length - 1)] + [lane * LANE + length % LANE]


def run(engine: Engine, *asked: tuple[list[int], SamplingParams], sample: int = 0) -> list[list[Event]]:
    """The events of requests that begin together."""
    handles = [engine.admit(tokens, params, sample) for tokens, params in asked]
    events: list[Event] = []
    while engine.live:
        events += engine.step()
    return [[event for event in events if event.handle == handle] for handle in handles]


def ids(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **more)


def soak(engine: Engine, count: int, seed: int, cancel: float = 0.05) -> None:
    """Greedy answers with arrivals and cancels at random moments, each as a walk by hand says."""
    rng = random.Random(seed)
    asked = [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], greedy(rng.randint(1, 40))) for _ in range(count)
    ]
    waiting, owners, found, gone = list(range(count)), {}, {}, set()
    while waiting or engine.live:
        while waiting and engine.free_slots and rng.random() < 0.6:
            index = waiting.pop(0)
            owners[engine.admit(*asked[index])] = index
        for event in engine.step():
            assert event.handle not in gone
            found.setdefault(event.handle, []).append(event)
        if rng.random() < cancel and owners:
            gone.add(max(owners))
            engine.cancel(max(owners))
    for handle, events in found.items():
        tokens, params = asked[owners[handle]]
        expected = walk(TABLE, tokens, min(params.max_new_tokens, POSITIONS - len(tokens)))
        assert ids(events) == (expected[: len(ids(events))] if handle in gone else expected)
    engine.drop_prefixes()
    assert engine.held_pages == 0


@pytest.fixture(scope="module")
def tight() -> Engine:
    """Three slots, and pages for little more than one request."""
    return build(num_slots=3, slot_buckets=(3,), num_pages=26)


@pytest.fixture(scope="module")
def ruled() -> Engine:
    return build(num_pages=26, rules=True, max_logprobs=2)


def test_answers_are_those_of_a_walk_while_requests_give_way(tight):
    soak(tight, 60, seed=1)
    assert tight.preemptions > 3
    assert tight.compile_count == 0


def test_B38_no_proposal_is_cut_for_want_of_pages():
    """Every round accepts what the script says, wherever the edges of pages fall."""
    engine = build(pause_drafting=False)
    for lane, accepted in enumerate(ACCEPTED):
        for length in (1, 6, 7, 8, 9):
            rounds = 8
            (events,) = run(engine, (prompt(lane, length), greedy(1 + rounds * (accepted + 1))))
            assert [(one.accepted, one.proposed) for one in events if one.from_round] == [(accepted, M)] * rounds


def test_a_slots_next_owner_inherits_no_history(ruled):
    params = greedy(20, rules=LogitRules(frequency_penalty=2.0, repetition_penalty=3.0))
    for lane in range(LANES):
        for length in (3, 21):
            first, second = (ids(run(ruled, (prompt(lane, length), params))[0]) for _ in range(2))
            assert first == second


def penalised(tokens: list[int], count: int, penalty: float) -> list[int]:
    """Greedy with a frequency penalty, by hand."""
    emitted: list[int] = []
    for _ in range(count):
        row = TABLE[(tokens + emitted)[-1], len(tokens) + len(emitted) - 1].astype(np.float64)
        emitted.append(int(np.argmax(row - penalty * np.bincount(emitted, minlength=VOCAB))))
    return emitted


def test_penalties_count_the_answer_alone_through_chunks_and_preemptions(ruled):
    before = ruled.preemptions
    for length in (2, 19, 24):
        asked = [(prompt(lane, length + lane), greedy(40, rules=LogitRules(frequency_penalty=1.5))) for lane in (1, 3)]
        for (tokens, _), events in zip(asked, run(ruled, *asked), strict=True):
            assert ids(events) == penalised(tokens, 40, 1.5)
    assert ruled.preemptions > before


def test_B16_log_probabilities_end_with_the_answer(ruled):
    for lane in range(LANES):
        answer = walk(TABLE, prompt(lane, 5), 30)
        stop = answer[7]
        kept = answer[: answer.index(stop) + 1]
        (events,) = run(ruled, (prompt(lane, 5), greedy(30, stop_token_ids=(stop,), logprobs=1)))
        assert ids(events) == kept
        assert [one.token for event in events for one in event.logprobs] == kept


def test_B10_seed_words_and_sample_index_enter(tight):
    params = {seed: greedy(20, temperature=5.0, seed=seed) for seed in (1, 1 + 2**32)}
    answers = [ids(run(tight, (prompt(0, 5), params[1]), sample=sample)[0]) for sample in (0, 1, 0)]
    answers.append(ids(run(tight, (prompt(0, 5), params[1 + 2**32]))[0]))
    assert answers[0] == answers[2]
    assert answers[0] != answers[1] and answers[0] != answers[3]


def test_B27_the_same_prompt_at_once_is_prefilled_once(tight):
    tight.drop_prefixes()
    before = tight.metrics()
    first, second = run(tight, (prompt(1, 25), greedy(6)), (prompt(1, 25), greedy(6)))
    assert ids(first) == ids(second) == walk(TABLE, prompt(1, 25), 6)
    after = tight.metrics()
    assert (after.prefix_hits - before.prefix_hits, after.prefix_rows - before.prefix_rows) == (1, 24)


def test_a_cancelled_request_of_no_tokens_is_not_heard_of(tight):
    tight.cancel(tight.admit([1, 2], SamplingParams(max_new_tokens=0)))
    assert tight.step() == [] and tight.live == 0


# -- what leaves the device, and what is compiled ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sealed:
    """A device value that only the engine's one door opens: nothing else can be done with it."""

    value: Any


def opened(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, Sealed) else leaf, tree)


def seal(engine: Engine) -> Callable[[], int]:
    """Every result of an executable is sealed; says how often the door was opened."""
    reads = 0
    door = engine._host

    def host(tree: Any) -> Any:
        nonlocal reads
        reads += 1
        assert all(isinstance(leaf, Sealed) for leaf in jax.tree.leaves(tree))
        return door(opened(tree))

    def sealing(executable: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(Sealed, executable(*opened(args)))

    engine._host = engine.drafting._relay._read = host
    built = engine.executables.built
    engine.executables.built = {name: sealing(executable) for name, executable in built.items()}
    return lambda: reads


def test_500_mixed_steps_compile_nothing_and_read_through_one_door():
    table = StepsTable((1, 4, 6, 9), (1000.0, 900.0, 500.0, 400.0), 20)
    engine = build(confident=True, cost_table=table, num_pages=32, rules=True, max_logprobs=2)
    engine.warm_up()
    reads = seal(engine)
    rng, running, finished = random.Random(2), [], 0
    for _ in range(500):
        if engine.free_slots and rng.random() < 0.4:
            rules = LogitRules(
                frequency_penalty=rng.choice([0.0, 1.0]), logit_bias={3: 1.0} if rng.random() < 0.3 else {}
            )
            params = greedy(
                rng.randint(0, 40),
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.choice([None, 3]),
                top_k=rng.choice([0, 5]),
                logprobs=rng.choice([None, 2]),
                rules=rules,
            )
            running.append(engine.admit(prompt(rng.randrange(LANES), rng.randint(1, 40)), params))
        finished += sum(event.finish_reason is not None for event in engine.step())
        if running and rng.random() < 0.05:
            engine.cancel(rng.choice(running))
    metrics = engine.metrics()
    assert finished > 20 and engine.preemptions > 0 and 0 < metrics.drafted_rounds < metrics.rounds
    assert metrics.compilations == engine.compile_count == 0
    assert reads() == engine.reads
    # a round is read once, its log probabilities in one more read, and a confidence once a budget
    assert metrics.rounds - 1 <= reads() <= 3 * metrics.rounds
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))  # the counter counts
    assert engine.compile_count > 0


# -- drafting that loses ----------------------------------------------------------------------------------------------


class Clock:
    """Seconds that only executables take."""

    def __init__(self, drafted: float, plain: float = 1.0):
        self.now, self._costs = 0.0, {True: drafted, False: plain}

    def __call__(self) -> float:
        return self.now

    def drive(self, engine: Engine) -> Engine:
        engine.warm_up()

        def timed(name: str, executable: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.now += self._costs["(draft" in name]
                return executable(*args)

            return call

        built = engine.executables.built
        engine.executables.built = {name: timed(name, made) for name, made in built.items()}
        return engine


def timed(drafted: float, **changes: Any) -> Engine:
    clock = Clock(drafted)
    return clock.drive(build(clock=clock, overlap=False, **changes))


def test_a_drafter_that_loses_at_this_load_is_paused_and_one_that_wins_is_not():
    share = {}
    for drafted, accepted, pause in ((10.0, 1, True), (1.5, M, True), (10.0, 1, False)):
        engine = timed(drafted, accepted=[accepted] * LANES, pause_drafting=pause)
        for length in range(1, 9):
            (events,) = run(engine, (prompt(1, length), greedy(80)))
            assert ids(events) == walk(TABLE, prompt(1, length), 80)
        decoding = engine.rounds - 8  # a prompt of one chunk each
        share[drafted, pause] = engine.drafted_rounds / decoding
    assert share[10.0, True] < 0.2
    assert share[1.5, True] > 0.8
    assert share[10.0, False] == 1.0


def test_a_request_whose_drafts_lose_is_paused_beside_one_whose_drafts_win():
    flat: CostTable = StepsTable((1,), (1.0,), 10)  # the budget alone would verify everything
    proposed = {}
    for pause in (True, False):
        engine = timed(2.0, accepted=(0, 0, 0, M), cost_table=flat, pause_drafting=pause)
        for _ in range(4):
            lost, won = run(engine, (prompt(0, 4), greedy(80)), (prompt(3, 5), greedy(80)))
            assert ids(lost) == walk(TABLE, prompt(0, 4), 80) and ids(won) == walk(TABLE, prompt(3, 5), 80)
        proposed[pause] = sum(event.proposed for event in lost)
    assert proposed[True] < 0.7 * proposed[False]


@REPEATS
def test_seeded_answers_do_not_depend_on_what_is_paused():
    answers = []
    for drafted, pause in ((10.0, True), (1.0, True), (1.0, False)):
        engine = timed(drafted, accepted=[1] * LANES, pause_drafting=pause)
        run(engine, (prompt(1, 3), greedy(90)))  # long enough that the switch has made up its mind
        seeded = [(prompt(2, 4), greedy(40, temperature=0.7, seed=9)), (prompt(1, 6), greedy(40))]
        answers.append([ids(events) for events in run(engine, *seeded)])
    assert answers[0] == answers[1] == answers[2]


def test_overlapped_rounds_pause_too_and_say_the_same():
    soak(build(accepted=(0, 0, 0, 0)), 40, seed=4)


def test_observed_acceptance_shortens_budgets_where_the_drafter_knows_nothing():
    steep = StepsTable((1, 3, 5), (1000.0, 300.0, 150.0), 10)
    proposed = {}
    for accepted in (0, M):
        engine = build(accepted=[accepted] * LANES, cost_table=steep, pause_drafting=False, align=False)
        (events,) = run(engine, (prompt(1, 4), greedy(60)))
        assert ids(events) == walk(TABLE, prompt(1, 4), 60)
        rounds = [event for event in events if event.from_round]
        proposed[accepted] = sum(event.proposed for event in rounds) / len(rounds)
    assert proposed[0] < 0.5 * M


def test_a_budget_is_filled_up_to_its_bucket_only_if_asked():
    flat_then_steep = StepsTable((1, 4), (1000.0, 500.0), 10)
    proposed = {}
    for align in (True, False):
        engine = build(accepted=[0] * LANES, cost_table=flat_then_steep, align=align, pause_drafting=False)
        (events,) = run(engine, (prompt(1, 4), greedy(60)))
        assert ids(events) == walk(TABLE, prompt(1, 4), 60)
        proposed[align] = sum(event.proposed for event in events)
    assert proposed[True] > proposed[False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": "half"}, "engine.acceptance"),
        ({"num_proposals": M + 1}, "engine.num_proposals"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"prefill_pieces": 0}, "engine.prefill_pieces"),
        ({"cost_table": StepsTable((1,), (1.0,), 10), "min_verify_rows": M + 2}, "engine.min_verify_rows"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)
