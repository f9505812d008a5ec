"""Requests side by side and one after the other on the same slots: nobody sees anybody else."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from tests.helpers.guards import no_compiles, no_implicit_transfers
from tests.helpers.worlds import (
    LANE,
    by_lane,
    position_of,
    random_table,
    rows_of,
    script,
    scripted,
    slot_of,
    swap,
    table_target,
    walk,
)

M, LANES, STEPS = 7, 4, 50
POSITIONS = 20 + STEPS * (M + 1) + 8
FORCED = (0, 1, 3, M)
TABLE = random_table(LANES, POSITIONS, seed=3)
PROMPTS = ([1, 2, 3], [9, 8, 9, 10, 11, 12, 13, 14, 15], [16] * 20, [31])


@pytest.fixture(scope="module")
def runner() -> SlotRunner:
    draft = scripted(TABLE, M, script(TABLE, M, by_lane(FORCED)))
    made = SlotRunner(
        table_target(TABLE),
        draft,
        num_slots=LANES,
        max_context=POSITIONS,
        prefill_chunk=8,
        page_size=16,
        cache_fill=float("nan"),
    )
    made.warm_up()
    return made


@pytest.fixture(autouse=True)
def forced(request: pytest.FixtureRequest) -> None:
    if "runner" in request.fixturenames:
        runner = request.getfixturevalue("runner")
        for slot in runner._slots:
            if slot is not None:
                runner.cancel(slot.handle)
        swap(runner, target=table_target(TABLE).params, draft=script(TABLE, M, by_lane(FORCED)))


def run_fixed_steps(runner: SlotRunner, prompts: Any, steps: int) -> list[dict[str, Any]]:
    """Admits all prompts, makes `steps` rounds, reads the slots, cancels."""
    params = SamplingParams(max_new_tokens=POSITIONS, ignore_eos=True)
    handles = [runner.admit(prompt, params) for prompt in prompts]
    tokens: dict[int, list[int]] = {handle: [] for handle in handles}
    accepted: dict[int, list[int]] = {handle: [] for handle in handles}
    for _ in range(steps):
        for event in runner.step():
            tokens[event.handle] += event.tokens
            accepted[event.handle] += [event.accepted] if event.from_round else []
    seen = []
    for handle in handles:
        slot = slot_of(runner, handle)
        length = position_of(runner, slot)
        keys, values = rows_of(runner, runner._state.target[0], slot)
        context, features = rows_of(runner, runner._state.draft, slot)
        seen.append(
            {
                "tokens": tokens[handle],
                "accepted": accepted[handle],
                "length": length,
                "target_kv": np.concatenate([keys[:length, 0], values[:length, 0]], axis=1),
                "context": np.concatenate([context[:length, 0], features[:length, 0]], axis=1),
            }
        )
    for handle in handles:
        runner.cancel(handle)
    return seen


def test_B30_rows_with_their_own_accept_length_equal_their_solo_runs(runner: SlotRunner) -> None:
    """a = 0, 1, 3, m for 50 steps: ids, lengths, the target's K/V and the drafter's context, against a run alone and
    against the walk through the table."""
    together = run_fixed_steps(runner, PROMPTS, STEPS)
    for prompt, a, row in zip(PROMPTS, FORCED, together, strict=True):
        assert row["accepted"] == [a] * STEPS
        assert row["length"] == len(prompt) + STEPS * (a + 1)
        assert row["tokens"] == walk(TABLE, prompt, 1 + STEPS * (a + 1))
        sequence = np.array([*prompt, *row["tokens"]])
        where = np.arange(row["length"])
        # K = V = (token, position) in the target; (token, next token) and the feature (token, position) in the context.
        np.testing.assert_array_equal(row["target_kv"], np.stack([sequence[:-1], where] * 2, axis=1))
        np.testing.assert_array_equal(
            row["context"], np.stack([sequence[:-1], sequence[1:], sequence[:-1], where], axis=1)
        )
        (alone,) = run_fixed_steps(runner, [prompt], STEPS)
        for name, value in alone.items():
            np.testing.assert_array_equal(value, row[name], err_msg=name)


def test_B30_accept_lengths_that_change_every_round(runner: SlotRunner) -> None:
    """The accepted count is a function of the anchor's token and position, from 0 to m."""
    rng = np.random.default_rng(5)
    accepted = rng.integers(0, M + 1, TABLE.shape[:2])
    swap(runner, draft=script(TABLE, M, accepted))
    params = SamplingParams(max_new_tokens=120)
    done = generate(runner, PROMPTS, params)
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert list(one.tokens) == walk(TABLE, prompt, 120)
        sequence = [*prompt, *one.tokens]
        position = len(prompt)
        for r in one.accepted:
            assert r == accepted[sequence[position], position]
            position += r + 1
            if position >= len(sequence):
                break
    assert {r for one in done for r in one.accepted} == set(range(M + 1))


def test_B26_slot_reuse_leaves_nothing_behind(runner: SlotRunner) -> None:
    """Long then short, short then long, then two conversations in turn 20 times, on one slot, over a cache that was
    filled with NaN: the table target turns any NaN that it attends into wrong tokens."""
    swap(runner, draft=script(TABLE, M, by_lane([3, 0, 0, 0])))
    long, short = [1] * 60, [2, 3]
    order = [long, short, short, long] + [long, short] * 20
    others = [runner.admit([lane * LANE], SamplingParams(max_new_tokens=POSITIONS)) for lane in (1, 2, 3)]
    for prompt in order:
        handle = runner.admit(prompt, SamplingParams(max_new_tokens=10))
        assert slot_of(runner, handle) == 3
        got: list[int] = []
        while runner.free_slots == 0:
            got += [token for event in runner.step() if event.handle == handle for token in event.tokens]
        assert got == walk(TABLE, prompt, 10)
    for handle in others:
        runner.cancel(handle)


def test_generations_a_late_round_does_not_reach_the_slots_next_owner(runner: SlotRunner) -> None:
    """The round was dispatched for a request that is cancelled before its result is read; the slot has a new owner."""
    params = SamplingParams(max_new_tokens=40)
    old = runner.admit([1, 2, 3], params)
    runner.step()
    late = runner._run(runner._round, runner._alive())
    assert int(late.counts[0]) > 0
    runner.cancel(old)
    new = runner.admit([24, 25], params)
    assert slot_of(runner, new) == 0
    runner._read(late)
    got: list[int] = []
    while runner.live:
        for event in runner.step():
            assert event.handle == new
            got += event.tokens
    assert got == walk(TABLE, [24, 25], 40)


def test_cancel_frees_the_slot_and_reports_nothing_more(runner: SlotRunner) -> None:
    params = SamplingParams(max_new_tokens=60)
    kept, gone = runner.admit([1, 2, 3], params), runner.admit([9, 9], params)
    runner.cancel(gone)  # before its first token was reported
    got: list[int] = []
    third = None
    while runner.live:
        for event in runner.step():
            assert event.handle in (kept, third)
            if event.handle == kept:
                got += event.tokens
        if third is None:
            third = runner.admit([17], params)
            runner.step()
            runner.cancel(third)
            runner.cancel(third)  # twice, and an unknown one: no error
            runner.cancel(10**9)
            got = got or []
            break
    assert runner.free_slots == LANES - 1
    runner.cancel(kept)
    assert runner.live == 0 and runner.step() == []


@pytest.mark.parametrize("chunk_edge", [7, 8, 9, 16, 17])
def test_B28_prompt_lengths_around_the_prefill_chunk(runner: SlotRunner, chunk_edge: int) -> None:
    """The drafter's context pairs every prompt row with its own next token, across chunk edges too."""
    prompt = [int(x) for x in np.random.default_rng(chunk_edge).integers(0, LANE, chunk_edge)]
    (row,) = run_fixed_steps(runner, [prompt], 3)
    sequence = np.array([*prompt, *row["tokens"]])
    np.testing.assert_array_equal(row["context"][:, 0], sequence[:-1])
    np.testing.assert_array_equal(row["context"][:, 1], sequence[1:])
    assert row["tokens"] == walk(TABLE, prompt, len(row["tokens"]))


def test_B66_500_mixed_steps_compile_nothing(runner: SlotRunner) -> None:
    """Arrivals, cancels, greedy and sampled requests with every parameter; greedy answers stay the oracle's."""
    rng = np.random.default_rng(11)
    swap(runner, draft=script(TABLE, M, rng.integers(0, M + 1, TABLE.shape[:2])))
    live: dict[int, tuple[list[int], SamplingParams, list[int]]] = {}
    finished = sampled = cancelled = 0
    runner._compilations.reset()  # the tables above were compiled in this process too
    with no_compiles(), no_implicit_transfers():
        for _ in range(500):
            while runner.free_slots and rng.random() < 0.6:
                prompt = rng.integers(0, LANES * LANE, rng.integers(1, 30)).tolist()
                params = SamplingParams(max_new_tokens=int(rng.integers(0, 60)), ignore_eos=bool(rng.random() < 0.5))
                if rng.random() < 0.5:
                    params = SamplingParams(
                        temperature=float(rng.choice([0.3, 1.0, 2.0])),
                        top_k=int(rng.choice([0, 1, 5, 10**6])),
                        top_p=float(rng.choice([1.0, 0.5])),
                        min_p=float(rng.choice([0.0, 0.1])),
                        seed=None if rng.random() < 0.5 else int(rng.integers(2**62)),
                        max_new_tokens=int(rng.integers(1, 60)),
                    )
                live[runner.admit(prompt, params)] = (prompt, params, [])
            if live and rng.random() < 0.1:
                handle = int(rng.choice(list(live)))
                runner.cancel(handle)
                del live[handle]
                cancelled += 1
            for event in runner.step():
                prompt, params, tokens = live[event.handle]
                tokens += event.tokens
                if event.finish_reason is None:
                    continue
                del live[event.handle]
                finished += 1
                assert len(tokens) == params.max_new_tokens
                if params.temperature == 0:
                    assert tokens == walk(TABLE, prompt, len(tokens))
                else:
                    sampled += 1
                    assert {token // LANE for token in tokens} == {prompt[-1] // LANE}
        for handle in list(live):
            runner.cancel(handle)
    assert runner.compile_count == 0
    assert finished > 100 and sampled > 40 and cancelled > 10, (finished, sampled, cancelled)


def test_compile_count_sees_a_compilation(runner: SlotRunner) -> None:
    before = runner.compile_count
    jax.jit(lambda x: x * 3 + 1)(np.arange(7.0)).block_until_ready()
    assert runner.compile_count == before + 1
    runner._compilations.reset()


def test_B38_tau_of_a_run_counts_rounds_and_not_the_first_token(runner: SlotRunner) -> None:
    done = generate(runner, [PROMPTS[2]], SamplingParams(max_new_tokens=1 + 4 * 10))
    counter = count(done, M)
    assert (counter.rounds, counter.tokens, counter.tau) == (10, 40, 4.0)
    assert counter.acceptance_unconditional == [1, 1, 1, 0, 0, 0, 0]
    assert counter.acceptance_conditional == [1, 1, 1, 0, 0, 0, 0]
