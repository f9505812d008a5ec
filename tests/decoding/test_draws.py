"""B10, B68: a request's draws are a function of its seed and its own history, and no uniform is used twice."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import round as round_module
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.draws import Purpose, round_keys, uniforms
from tests.helpers import worlds
from tests.helpers.worlds import LANE, random_table, script, scripted, slot_of, table_target

M, LANES, POSITIONS, SLOTS = 4, 2, 96, 8
TABLE = random_table(LANES, POSITIONS, seed=6, spread=1.0)
ONE = SamplingParams(temperature=1.0, seed=1234567890123, max_new_tokens=40)


def draft_law() -> dict[str, jax.Array]:
    """q near the target's p along its greedy walk, so that accept lengths vary."""
    params = script(TABLE, M, M)
    tokens = np.asarray(params["tokens"])
    rng = np.random.default_rng(0)
    lane = np.arange(LANES * LANE) // LANE
    same = lane[:, None, None, None] == lane
    logits = rng.normal(size=(*tokens.shape, LANES * LANE)) + 1.5 * np.eye(LANES * LANE)[tokens]
    logits = np.where(same, logits, -1e9)
    return {**params, "probs": jax.nn.softmax(jnp.asarray(logits, jnp.float32))}


@pytest.fixture(scope="module")
def runner() -> SlotRunner:
    made = SlotRunner(
        table_target(TABLE),
        scripted(TABLE, M, draft_law()),
        num_slots=SLOTS,
        max_context=POSITIONS,
        prefill_chunk=8,
        page_size=16,
    )
    made.warm_up()
    return made


def finish(runner: SlotRunner, handle: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    done = False
    while not done:
        for event in runner.step():
            if event.handle == handle:
                tokens += event.tokens
                done = event.finish_reason is not None
    return tokens


def test_B10_a_seeded_request_depends_on_nothing_around_it(runner: SlotRunner) -> None:
    """Alone, in a full batch, on every other slot, after 1000 rounds of others: the same ids and accept lengths."""
    prompt = [1, 2, 3]
    (alone,) = generate(runner, [prompt], ONE)
    assert set(alone.accepted) >= {0, 1, 2}, "the request should meet rejections and acceptances"
    others = [SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=60), SamplingParams(max_new_tokens=60)]
    batch = generate(runner, [[9], [10, 2]] * 3 + [prompt, prompt], [*others * 3, ONE, ONE])
    assert batch[-1] == batch[-2] == alone
    for slot in range(1, SLOTS):
        holders = [runner.admit([8], SamplingParams(max_new_tokens=90)) for _ in range(slot)]
        handle = runner.admit(prompt, ONE)
        assert slot_of(runner, handle) == slot
        assert finish(runner, handle) == alone.tokens
        for holder in holders:
            runner.cancel(holder)
    generate(runner, [[7], [3]] * 60, [*others * 60])
    assert generate(runner, [prompt], ONE) == [alone]


def test_B10_seed_sample_index_and_parameters_enter(runner: SlotRunner) -> None:
    prompt = [1, 2, 3]
    answers = {finish(runner, runner.admit(prompt, dataclasses.replace(ONE, seed=seed))) for seed in range(4)}
    answers |= {finish(runner, runner.admit(prompt, ONE, sample=sample)) for sample in range(3)}
    # Seeds that agree in their low or in their high word differ too.
    answers |= {finish(runner, runner.admit(prompt, dataclasses.replace(ONE, seed=s))) for s in (2**32, 2**33, 2**62)}
    assert len(answers) == 10


def test_B10_unseeded_requests_differ(runner: SlotRunner) -> None:
    free = dataclasses.replace(ONE, seed=None)
    serial = {generate(runner, [[1, 2, 3]], free)[0].tokens for _ in range(3)}
    together = {done.tokens for done in generate(runner, [[1, 2, 3]] * SLOTS, free)}
    assert len(serial | together) == 3 + SLOTS


def test_B68_first_tokens_follow_the_targets_law(runner: SlotRunner) -> None:
    """400 seeds: the token drawn by prefill and the one after it are distributed as the table says (chi-square)."""
    prompt = [3]
    done = generate(
        runner, [prompt] * 400, [dataclasses.replace(ONE, seed=seed, max_new_tokens=2) for seed in range(400)]
    )
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    p = softmax(TABLE[3, 0].astype(np.float64))[:LANE]
    second = sum(p[v] * softmax(TABLE[v, 1].astype(np.float64))[:LANE] for v in range(LANE))
    for place, law in ((0, p), (1, second)):
        seen = collections.Counter(one.tokens[place] for one in done)
        chi = sum((seen[v] - 400 * law[v]) ** 2 / (400 * law[v]) for v in range(LANE))
        assert chi < 29.9, (place, chi)  # 7 degrees of freedom, p = 1e-4; the seeds are fixed, so this never flickers


@pytest.mark.ci
def test_uniforms_are_never_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each (anchor, position, purpose) of a request occurs once, over prefill and all rounds, and the values differ."""
    used: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []

    def watched(keys, positions, purpose):
        values = uniforms(keys, positions, purpose)
        note = lambda p, v, k: used.append((purpose.name, np.array(p), np.array(v), np.array(k)))  # noqa: E731
        jax.debug.callback(note, positions, values, jax.random.key_data(keys), ordered=True)
        return values

    monkeypatch.setattr(round_module, "uniforms", watched)
    monkeypatch.setattr(worlds, "uniforms", watched)
    watched_runner = SlotRunner(
        table_target(TABLE), scripted(TABLE, M, draft_law()), num_slots=1, max_context=POSITIONS, prefill_chunk=8
    )
    watched_runner.warm_up()
    jax.effects_barrier()
    used.clear()
    (done,) = generate(watched_runner, [[1, 2, 3]], ONE)
    jax.effects_barrier()
    places: set[tuple[str, bytes, int]] = set()
    values: list[float] = []
    for purpose, positions, drawn, keys in used:
        for row in range(len(positions)):
            for position, value in zip(positions[row].tolist(), drawn[row].tolist(), strict=True):
                place = (purpose, keys[row].tobytes(), position)
                assert place not in places
                places.add(place)
                values.append(value)
    assert len(used) == 1 + 3 * done.rounds
    assert len(set(values)) == len(values) > 100


def test_keys_of_anchor_position_and_purpose_are_all_distinct() -> None:
    base = jax.random.split(jax.random.key(0), 2)
    seen: set[float] = set()
    total = 0
    positions = jnp.broadcast_to(jnp.arange(1, 9), (2, 8))
    draw = jax.jit(uniforms, static_argnums=2)
    for sample in range(2):
        for anchor in range(6):
            keys = round_keys(base, jnp.full(2, sample), jnp.full(2, anchor))
            for purpose in Purpose:
                drawn = np.asarray(draw(keys, positions, purpose)).reshape(-1).tolist()
                assert all(0 <= value < 1 for value in drawn)
                seen |= set(drawn)
                total += len(drawn)
    assert len(seen) == total == 2 * 6 * 3 * 16
    np.testing.assert_array_equal(  # a row's draws do not depend on its neighbours
        uniforms(round_keys(base, jnp.zeros(2, int), jnp.full(2, 4)), positions, Purpose.ACCEPT)[1:],
        uniforms(round_keys(base[1:], jnp.zeros(1, int), jnp.full(1, 4)), positions[1:], Purpose.ACCEPT),
    )
