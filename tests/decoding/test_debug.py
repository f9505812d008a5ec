"""B35: the debug build stops at a sentinel id, an index out of range or a broken invariant; JAX alone would go on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import round as round_module
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import InvariantError
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import (
    by_lane,
    random_table,
    script,
    scripted,
    swap,
    table_target,
    tiny_draft,
    tiny_target,
    walk,
)

M, LANES, POSITIONS = 3, 2, 40
TABLE = random_table(LANES, POSITIONS, seed=4)
VOCAB = TABLE.shape[0]
PARAMS = SamplingParams(max_new_tokens=20)


def build(debug: bool = True, **options: object) -> SlotRunner:
    draft = scripted(TABLE, M, script(TABLE, M, by_lane([1, M])))
    return SlotRunner(
        table_target(TABLE),
        draft,
        num_slots=2,
        max_context=POSITIONS,
        prefill_chunk=4,
        page_size=8,
        cache_fill=float("nan"),
        debug=debug,
        **options,
    )


pytestmark = pytest.mark.ci  # one compilation of the checked programs, shared by the file


@pytest.fixture(scope="module")
def compiled() -> SlotRunner:
    made = build()
    made.warm_up()
    return made


@pytest.fixture
def runner(compiled: SlotRunner) -> SlotRunner:
    """The compiled debug runner with an empty state: one that raised is done for."""
    compiled._state = jax.jit(lambda: compiled.program.init_state(jnp.float32, float("nan")))()
    compiled._slots = [None] * compiled.num_slots
    compiled._pending.clear()
    swap(compiled, draft=script(TABLE, M, by_lane([1, M])))
    return compiled


def test_B35_a_sound_run_raises_nothing(runner: SlotRunner) -> None:
    prompts = [[1, 2, 3], [9] * 9, [5], [12, 13]]
    for params in (PARAMS, dataclasses.replace(PARAMS, max_new_tokens=POSITIONS)):
        for prompt, done in zip(prompts, generate(runner, prompts, params), strict=True):
            assert list(done.tokens) == walk(TABLE, prompt, len(done.tokens))
    sampled = [SamplingParams(temperature=1.0, top_p=0.9, top_k=5, seed=3, max_new_tokens=15), PARAMS]
    assert [len(done.tokens) for done in generate(runner, prompts[:2], sampled)] == [15, 20]


@pytest.mark.parametrize("sentinel", [-1, VOCAB, 2**31 - 1])
def test_B35_a_proposed_sentinel_is_caught(runner: SlotRunner, sentinel: int) -> None:
    tokens = np.array(script(TABLE, M, M)["tokens"])
    tokens[:, 10:, M - 1] = sentinel
    swap(runner, draft={"tokens": jnp.asarray(tokens)})
    runner.admit([1, 2, 3], PARAMS)
    with pytest.raises(
        InvariantError, match=rf"proposed tokens: found id {sentinel}, expected 0 <= id < vocab_size = 16"
    ):
        for _ in range(20):
            runner.step()


@pytest.mark.parametrize("sentinel", [-1, VOCAB])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_B35_a_sentinel_in_a_prompt_is_caught(
    runner: SlotRunner, sentinel: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission refuses it; the model's own check does not rely on that."""
    monkeypatch.setattr(runner, "check", lambda prompt, params: None)
    prompt = [1, 2, 3, 4, 5, 6]
    prompt[place] = sentinel
    with pytest.raises(InvariantError, match=f"found id {sentinel}"):
        runner.admit(prompt, PARAMS)


@pytest.mark.parametrize("sentinel", [-1, VOCAB])
def test_B35_a_sentinel_anchor_is_caught(runner: SlotRunner, sentinel: int) -> None:
    runner.admit([1, 2, 3], PARAMS)
    slots = dataclasses.replace(runner._state.slots, anchors=jnp.array([sentinel, 0], jnp.int32))
    runner._state = dataclasses.replace(runner._state, slots=slots)
    with pytest.raises(InvariantError, match=f"anchors: found id {sentinel}"):
        runner.step()


@pytest.mark.ci
def test_B35_the_served_build_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the debug build exists: the same sentinel gives an answer."""
    served = build(debug=False)
    monkeypatch.setattr(served, "check", lambda prompt, params: None)
    served.admit([1, -1, 3], PARAMS)
    assert len(served.step()) == 2


@pytest.mark.parametrize("shift", [-1, 1])
def test_invariant_context_length_is_the_targets(runner: SlotRunner, shift: int) -> None:
    runner.admit([1, 2, 3], PARAMS)
    runner.step()
    slots = dataclasses.replace(runner._state.slots, positions=runner._state.slots.positions + jnp.array([shift, 0]))
    runner._state = dataclasses.replace(runner._state, slots=slots)
    with pytest.raises(InvariantError, match="the drafter's context holds"):
        runner.step()


def test_invariant_target_length_is_committed_tokens_less_one(runner: SlotRunner) -> None:
    runner.admit([1, 2, 3], PARAMS)
    runner._slots[0].emitted.append(1)
    with pytest.raises(InvariantError, match=r"slot 0: the target's K/V hold \d+ rows, expected \d+"):
        runner.step()


def test_invariant_pages_are_distinct_and_none_is_the_trash_page(runner: SlotRunner) -> None:
    whole = np.array(runner._state.slots.page_table)
    for row, column, page in ((0, 1, 0), (1, 0, whole[0, 0])):
        table = whole.copy()
        table[row, column] = page
        slots = dataclasses.replace(runner._state.slots, page_table=jnp.asarray(table))
        runner._state = dataclasses.replace(runner._state, slots=slots)
        with pytest.raises(InvariantError, match="page table"):
            runner.admit([1, 2, 3], PARAMS)


def test_invariant_a_page_that_does_not_exist_is_an_index_error(runner: SlotRunner) -> None:
    table = np.array(runner._state.slots.page_table)
    table[0, 0] = 999
    slots = dataclasses.replace(runner._state.slots, page_table=jnp.asarray(table))
    runner._state = dataclasses.replace(runner._state, slots=slots)
    with pytest.raises(InvariantError, match="out-of-bounds"):
        runner.admit([1, 2, 3], PARAMS)


@pytest.mark.ci
def test_invariant_commit_gets_r_plus_one_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of every verified row, accepted or not."""
    monkeypatch.setattr(round_module, "keep_rows", lambda layout, counts: layout)
    faulty = build()
    faulty.admit([1, 2, 3], PARAMS)
    with pytest.raises(InvariantError, match=r"feature rows, expected r \+ 1"):
        faulty.step()


@pytest.mark.ci
def test_invariant_no_row_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that forgets the limit."""
    plan = lambda positions, m, *rest: jnp.full(positions.shape, m, jnp.int32)  # noqa: E731
    monkeypatch.setattr(round_module, "verify_lengths", plan)
    faulty = build()
    faulty.admit([1] * (POSITIONS - 3), PARAMS)
    with pytest.raises(InvariantError, match="expected all below the limit"):
        faulty.step()


@pytest.mark.ci
@REPEATS
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_B35_real_models_run_clean_in_the_debug_build(method: str) -> None:
    """Every gather and scatter of the target, the drafter and the acceptance, with mixed widths at the limit."""
    target = tiny_target()
    draft = tiny_draft(target, method, **({"draft_sampling": "sample"} if method == "dflash" else {}))
    options = {"num_slots": 2, "max_context": 40, "prefill_chunk": 8, "page_size": 8, "cache_fill": float("nan")}
    checked, served = (SlotRunner(target, draft, debug=debug, **options) for debug in (True, False))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, length).tolist() for length in (3, 17, 38, 30)]
    params = [
        SamplingParams(max_new_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, top_p=0.9, max_new_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, min_p=0.1, max_new_tokens=60, ignore_eos=True),
        SamplingParams(max_new_tokens=60, ignore_eos=True),
    ]
    assert generate(checked, prompts, params) == generate(served, prompts, params)
