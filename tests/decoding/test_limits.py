"""B21: the context's end. JAX would slide or clamp a write that does not fit, so the cache itself is read."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.decoding.plan import verify_lengths
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import RequestError
from tests.helpers.worlds import by_lane, position_of, random_table, rows_of, script, scripted, swap, table_target, walk

M, LIMIT, PAGE = 7, 32, 12  # three pages of 12 rows hold 36: rows 32 to 35 exist and must stay untouched
TABLE = random_table(4, LIMIT, seed=8)
LONG = SamplingParams(max_new_tokens=1000)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.ci)], ids=["served", "debug"])
def runner(request: pytest.FixtureRequest) -> SlotRunner:
    draft = scripted(TABLE, M, script(TABLE, M, M))
    made = SlotRunner(
        table_target(TABLE),
        draft,
        num_slots=3,
        max_context=100,
        prefill_chunk=8,
        page_size=PAGE,
        cache_fill=float("nan"),
        debug=request.param,
    )
    made.warm_up()
    return made


def slots_rows(runner: SlotRunner) -> list[np.ndarray]:
    pools = (runner._state.target[0], getattr(runner._state.draft, "inner", runner._state.draft))
    return [np.concatenate(rows_of(runner, pool, slot), axis=1) for slot in range(3) for pool in pools]


def test_B21_max_position_bounds_the_context(runner: SlotRunner) -> None:
    assert runner.max_context == LIMIT
    for length in (LIMIT, LIMIT + 1, 3 * LIMIT):
        with pytest.raises(RequestError, match=f"prompt: {length} tokens, expected fewer than max_context = 32"):
            runner.admit([1] * length, LONG)


@pytest.mark.parametrize("accepted", [0, 3, M])
@pytest.mark.parametrize("length", range(20, LIMIT))
def test_B21_answer_ends_at_the_limit_and_touches_nothing_else(runner: SlotRunner, length: int, accepted: int) -> None:
    swap(runner, draft=script(TABLE, M, by_lane([accepted, 0, 0, 0])))
    rng = np.random.default_rng(length)
    before, after = rng.integers(8, 16, 5).tolist(), rng.integers(16, 24, 3).tolist()
    prompt = rng.integers(0, 8, length).tolist()
    first, place, third = (runner.admit(one, LONG) for one in (before, [0], after))
    runner.cancel(place)
    neighbours, handle = [first, third], runner.admit(prompt, LONG)  # always on the middle slot
    got: dict[int, list[int]] = {handle: [], **{one: [] for one in neighbours}}
    reason, last_round = None, (0, 0)
    while reason is None:
        old, lengths = slots_rows(runner), [position_of(runner, slot) for slot in range(3)]
        for event in runner.step():
            got[event.handle] += event.tokens
            if event.handle == handle:
                reason, last_round = event.finish_reason, (event.accepted, event.proposed)
        # The neighbours' committed rows are the same bits before and after.
        for index, rows in enumerate(slots_rows(runner)):
            if index // 2 != 1:
                committed = lengths[index // 2]
                np.testing.assert_array_equal(rows[:committed], old[index][:committed])
    assert reason == "length"
    assert len(prompt) + len(got[handle]) == LIMIT
    assert got[handle] == walk(TABLE, prompt, LIMIT - length)
    assert last_round[1] <= M and last_round[0] <= last_round[1]
    for rows in slots_rows(runner):
        assert np.isnan(rows[LIMIT:]).all()  # nothing was written at or past the limit
    sequence = np.array(prompt + got[handle])
    target_rows = slots_rows(runner)[2]
    written = LIMIT - 1  # every token but the last
    np.testing.assert_array_equal(target_rows[:written, 0, 0], sequence[:written])
    np.testing.assert_array_equal(target_rows[:written, 0, 1], np.arange(written))
    for one in neighbours:
        runner.cancel(one)
    assert got[neighbours[0]] == walk(TABLE, before, len(got[neighbours[0]]))
    assert got[neighbours[1]] == walk(TABLE, after, len(got[neighbours[1]]))


def test_B21_stop_on_the_last_position_wins_over_length(runner: SlotRunner) -> None:
    prompt = [1] * 25
    answer = walk(TABLE, prompt, LIMIT - 25)
    swap(runner, draft=script(TABLE, M, M))
    params = SamplingParams(max_new_tokens=1000, stop_token_ids=(answer[-1],))
    handle = runner.admit(prompt, params)
    events = []
    while runner.live:
        events += [event for event in runner.step() if event.handle == handle]
    expected = answer[: answer.index(answer[-1]) + 1]
    assert [token for event in events for token in event.tokens] == expected
    assert events[-1].finish_reason == "stop"


def test_B21_plan_never_offers_a_row_past_the_limit() -> None:
    """The last token of a round needs a position below the limit: s + l + 1 <= limit - 1."""
    positions = np.arange(0, 40)
    lengths = np.asarray(verify_lengths(positions, 7, LIMIT))
    np.testing.assert_array_equal(lengths, np.clip(LIMIT - 2 - positions, 0, 7))
    assert ((positions + lengths + 1 < LIMIT) | (lengths == 0)).all()


def test_plan_stops_before_the_first_doubtful_slot() -> None:
    confidence = np.array([[0.9, 0.9, 0.2, 0.9], [0.1, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.9, 0.9]])
    positions = np.array([0, 0, 0, 29])
    lengths = np.asarray(verify_lengths(positions, 4, LIMIT, confidence, 0.5))
    np.testing.assert_array_equal(lengths, [2, 0, 4, 1])
    np.testing.assert_array_equal(np.asarray(verify_lengths(positions, 4, LIMIT, confidence, 0.0)), [4, 4, 4, 1])
