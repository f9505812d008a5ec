"""Where an answer ends: stop tokens, end-of-sequence ids, limits, at every place of an accepted block."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxspec.decoding.generate import generate, stream
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import RequestError
from tests.helpers.worlds import LANE, by_lane, script, scripted, spoken_table, swap, table_target

M, POSITIONS, LANES = 7, 64, 4
STOP = 6  # code that the answers use for nothing else
EOS = (STOP, 2 * LANE + STOP, 3 * LANE + 5)  # of lanes 0 and 2, and a second one of lane 3


def speech(stop_at: dict[int, int], length: int = POSITIONS, code: int = STOP) -> np.ndarray:
    """Codes 0 to 4 in turn; in lane g, position stop_at[g] says `code`."""
    answers = np.tile(np.arange(length) % 5, (LANES, 1))
    for lane, position in stop_at.items():
        answers[lane, position] = code
    return answers


@pytest.fixture(scope="module")
def runner() -> SlotRunner:
    table = spoken_table(speech({}))
    draft = scripted(table, M, script(table, M, M))
    return SlotRunner(
        table_target(table, EOS), draft, num_slots=LANES, max_context=POSITIONS, prefill_chunk=4, page_size=8
    )


def say(runner: SlotRunner, answers: np.ndarray, accepted: Any = M) -> None:
    table = spoken_table(answers)
    swap(runner, target=table_target(table).params, draft=script(table, M, accepted))


def spoken(answers: np.ndarray, lane: int, start: int, count: int) -> tuple[int, ...]:
    return tuple(int(lane * LANE + code) for code in answers[lane, start : start + count])


PROMPT = 3  # tokens; the answer begins at this position


@pytest.mark.parametrize("accepted", [0, 1, 5, M])
def test_B17_stop_and_length_in_one_block(runner: SlotRunner, accepted: int) -> None:
    """A stop token as the s-th token of the answer and max_new_tokens = n: min(s, n) tokens, and the earlier one wins;
    the stop wins a tie. s and n run over the first token, whole blocks and what lies between."""
    for place in range(1, M + 4):
        answers = speech({lane: PROMPT + place - 1 for lane in range(LANES)})
        say(runner, answers, accepted)
        limits = range(M + 5)
        asked = [
            SamplingParams(max_new_tokens=n, ignore_eos=True, stop_token_ids=(limit_lane * LANE + STOP,))
            for limit_lane, n in zip(itertools.cycle(range(LANES)), limits)
        ]
        prompts = [[lane * LANE] * PROMPT for lane, _ in zip(itertools.cycle(range(LANES)), limits)]
        for n, prompt, done in zip(limits, prompts, generate(runner, prompts, asked), strict=True):
            assert done.tokens == spoken(answers, prompt[0] // LANE, PROMPT, min(place, n)), (place, n)
            assert done.finish_reason == ("stop" if place <= n else "length"), (place, n)


@pytest.mark.parametrize("place", range(1, M + 2))
def test_B19_eos_at_every_slot_of_a_block(runner: SlotRunner, place: int) -> None:
    """Several end-of-sequence ids; lanes 1 (no EOS) and 3 (another id) go on beside the rows that end."""
    answers = speech({0: PROMPT + place, 2: PROMPT + place})
    answers[3, PROMPT + place + 2] = 5
    say(runner, answers)
    done = generate(runner, [[lane * LANE] * PROMPT for lane in range(LANES)], SamplingParams(max_new_tokens=30))
    assert [one.finish_reason for one in done] == ["stop", "length", "stop", "stop"]
    assert [len(one.tokens) for one in done] == [place + 1, 30, place + 1, place + 3]
    for lane, one in enumerate(done):
        assert one.tokens == spoken(answers, lane, PROMPT, len(one.tokens))
    assert done[0].tokens[-1] in EOS and done[0].rounds == 1


def test_B19_ignore_eos_goes_on_and_stop_token_ids_still_end(runner: SlotRunner) -> None:
    answers = speech({0: PROMPT + 4, 2: PROMPT})
    say(runner, answers)
    lasting = SamplingParams(max_new_tokens=20, ignore_eos=True)
    stopped = SamplingParams(max_new_tokens=20, ignore_eos=True, stop_token_ids=(2, 4 * LANE - 1))
    prompts = [[0] * PROMPT, [2 * LANE] * PROMPT, [0] * PROMPT]
    done = generate(runner, prompts, [lasting, lasting, stopped])
    assert [(len(one.tokens), one.finish_reason) for one in done[:2]] == [(20, "length"), (20, "length")]
    assert done[0].tokens == spoken(answers, 0, PROMPT, 20)
    first = spoken(answers, 0, PROMPT, 20).index(2)
    assert (len(done[2].tokens), done[2].finish_reason) == (first + 1, "stop")


def test_B19_eos_first_after_prefill(runner: SlotRunner) -> None:
    """The slot is free again before any round, and its neighbour does not notice."""
    answers = speech({0: PROMPT})
    say(runner, answers)
    neighbour = runner.admit([LANE] * PROMPT, SamplingParams(max_new_tokens=12))
    handle = runner.admit([0] * PROMPT, SamplingParams(max_new_tokens=12))
    assert runner.free_slots == LANES - 1
    told = {neighbour: [], handle: []}
    while runner.live:
        for event in runner.step():
            told[event.handle].append(event)
    assert [(e.tokens, e.finish_reason, e.from_round) for e in told[handle]] == [((STOP,), "stop", False)]
    assert sum((e.tokens for e in told[neighbour]), ()) == spoken(answers, 1, PROMPT, 12)


@pytest.mark.parametrize("limit", [0, 1, 2, M, M + 1, M + 2])
def test_max_new_tokens_is_exact(runner: SlotRunner, limit: int) -> None:
    answers = speech({})
    say(runner, answers)
    (done,) = generate(runner, [[0] * PROMPT], SamplingParams(max_new_tokens=limit))
    assert done.tokens == spoken(answers, 0, PROMPT, limit)
    assert done.finish_reason == "length"
    assert runner.free_slots == LANES


def test_rounds_report_what_was_committed_not_what_was_trimmed(runner: SlotRunner) -> None:
    say(runner, speech({}), by_lane([3, 3, 3, 3]))
    (done,) = generate(runner, [[0] * PROMPT], SamplingParams(max_new_tokens=7))
    assert (done.accepted, done.proposed) == ((3, 3), (M, M))  # 1 + 4 + 4 tokens, of which 7 are kept


def test_stream_gives_the_same_tokens_and_frees_its_slot_when_left(runner: SlotRunner) -> None:
    answers = speech({})
    say(runner, answers, by_lane([2] * LANES))
    pieces = list(stream(runner, [0] * PROMPT, SamplingParams(max_new_tokens=9)))
    assert [len(piece) for piece in pieces] == [1, 3, 3, 2]
    assert sum(pieces, ()) == spoken(answers, 0, PROMPT, 9)
    early = stream(runner, [0] * PROMPT, SamplingParams(max_new_tokens=9))
    next(early)
    assert runner.free_slots == LANES - 1
    early.close()
    assert runner.free_slots == LANES and runner.live == 0


def test_generate_checks_every_prompt_before_it_starts_one(runner: SlotRunner) -> None:
    before = runner._handles
    for prompts, found in (
        ([[0], [0] * POSITIONS], r"prompts\[1\].*max_context = 64"),
        ([[0], [LANES * LANE]], r"prompts\[1\].*prompt\[0\]: found 32"),
        ([[0], [-1]], r"prompts\[1\].*found -1"),
        ([[0], []], r"prompts\[1\].*at least one token"),
    ):
        with pytest.raises(RequestError, match=found):
            generate(runner, prompts, SamplingParams())
    for field, value in (("temperature", -1.0), ("top_p", 0.0), ("min_p", 1.0), ("top_k", -1), ("seed", 2**63)):
        with pytest.raises(RequestError, match=field):
            generate(runner, [[0]], SamplingParams(**{field: value}))
    with pytest.raises(RequestError, match="stop_token_ids"):
        generate(runner, [[0]], SamplingParams(stop_token_ids=(LANES * LANE,)))
    assert runner._handles == before


def test_a_full_runner_says_so(runner: SlotRunner) -> None:
    handles = [runner.admit([0] * PROMPT, SamplingParams()) for _ in range(LANES)]
    with pytest.raises(RequestError, match="slots: all 4 are taken"):
        runner.admit([0], SamplingParams())
    for handle in handles:
        runner.cancel(handle)
    assert runner.live == 0
