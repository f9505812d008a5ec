"""B14: greedy decoding with a drafter gives, token for token, what greedy decoding without one gives.

float32 at the highest product precision. The targets are random; the good drafts were overfitted to some of their
answers (golden material), so that all of a block, a part and none of it are accepted; the garbage ones are random.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.generate import Completion, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Point, Proposal
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import bigram_draft, garbage, golden_pair, swap, tiny_draft, tiny_target

pytestmark = pytest.mark.timeout(900)

NEW = 512
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
CASES = {"dflash": "03_dflash_gen_q3a", "dspark": "05_deepspec_dspark_gen"}
CLOSE = 1e-4  # top-2 margin below which a float32 sum in another order may turn an argmax


def prompts_for(own: list[list[int]], vocab: int = 250) -> list[list[int]]:
    """The prompts that the draft knows, filled up to five with random ones."""
    rng = np.random.default_rng(7)
    return (own + [rng.integers(0, vocab, length).tolist() for length in (1, 23, 40)])[:5]


def runner_for(target: Any, draft: Any, slots: int) -> SlotRunner:
    made = SlotRunner(
        target, draft, num_slots=slots, max_context=NEW + 64, prefill_chunk=16, page_size=16, cache_fill=float("nan")
    )
    made.warm_up()
    return made


def check_against_cache_free_forward(target: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> None:
    """One dense causal forward over prompt + answer: the argmax at every position is the next token."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    rows = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    out = jax.jit(lambda tokens: target.model.forward_sequences(target.params, tokens, lengths=jnp.asarray(lengths)))(
        rows
    )
    logits = np.asarray(target.model.logits(target.params, out.hidden))
    turned = checked = 0
    for row, values, prompt, length in zip(rows, logits, prompts, lengths, strict=True):
        for place in range(len(prompt) - 1, length - 1):
            checked += 1
            best = int(np.argmax(values[place]))
            if best != row[place + 1]:
                margin = values[place, best] - values[place, row[place + 1]]
                assert margin < CLOSE, (place, best, row[place + 1], margin)
                turned += 1
    assert checked == sum(len(answer) for answer in answers)
    assert turned <= 2, f"{turned} of {checked} positions are near-ties that came out the other way"


def same(expected: Sequence[Completion], got: Sequence[Completion]) -> None:
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert len(a.tokens) == len(b.tokens)
        differ = [place for place, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y]
        assert not differ, f"prompt {index} differs first at token {differ[0]} of {len(a.tokens)}"


def counts(done: Sequence[Completion], m: int) -> dict[str, int]:
    """Full rounds with r = 0, 0 < r < m, r = m."""
    kinds = collections.Counter(
        "none" if r == 0 else "all" if r == m else "some"
        for one in done
        for r, offered in zip(one.accepted, one.proposed, strict=True)
        if offered == m
    )
    return dict(kinds)


class World:
    """A golden target with both its drafts; the plain answers to a draft's prompts are made and checked once."""

    def __init__(self) -> None:
        self.pairs = {method: golden_pair("q3a", case) for method, case in CASES.items()}
        self.target = self.pairs["dflash"][0]
        self.prompts = {method: prompts_for(own) for method, (_, _, own) in self.pairs.items()}
        self.plain = Answers(self)


class Answers(dict[str, list[Completion]]):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._runner = world, runner_for(world.target, None, 5)

    def __missing__(self, method: str) -> list[Completion]:
        world, prompts = self._world, self._world.prompts[method]
        self[method] = generate(self._runner, prompts, GREEDY)
        check_against_cache_free_forward(world.target, prompts, [one.tokens for one in self[method]])
        return self[method]


@pytest.fixture(scope="module", autouse=True)
def optimised():
    """Thousands of rounds of a few programs: here it is the rounds that take the time, not the compiler."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("method", ["dflash", pytest.param("dspark", marks=pytest.mark.ci)])
@pytest.mark.ci
def test_B14_512_tokens_five_at_a_time(world: World, method: str) -> None:
    _, draft, _ = world.pairs[method]
    runner = runner_for(world.target, draft, 5)
    done = generate(runner, world.prompts[method], GREEDY)
    same(world.plain[method], done)
    good = counts(done, runner.num_proposals)
    assert min(good.get(kind, 0) for kind in ("none", "some", "all")) >= 3, good
    swap(runner, draft=garbage(draft).params)
    done = generate(runner, world.prompts[method], GREEDY)
    same(world.plain[method], done)
    bad = counts(done, runner.num_proposals)
    assert bad["none"] > 0.9 * sum(bad.values()), bad
    print(f"{method}: rounds by accepted proposals, good {good}, garbage {bad}")


@pytest.mark.ci
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_B14_512_tokens_one_at_a_time(world: World, method: str) -> None:
    _, draft, _ = world.pairs[method]
    runner = runner_for(world.target, draft, 1)
    plain, prompts = world.plain[method][:1], world.prompts[method][:1]
    same(plain, generate(runner, prompts, GREEDY))
    swap(runner, draft=garbage(draft).params)
    same(plain, generate(runner, prompts, GREEDY))


@pytest.mark.ci
@pytest.mark.parametrize("family", [pytest.param(name, marks=REPEATS) for name in ("qwen2", "llama", "qwen3")])
def test_B14_families_with_a_partly_right_and_a_garbage_draft(family: str) -> None:
    """Two-layer targets that mostly follow the last token: a bigram Markov head is right in part."""
    target = tiny_target(family, seed=2, scale=0.2)
    prompts = [np.random.default_rng(n).integers(0, 60, n).tolist() for n in (2, 9, 21)]
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    options = {"num_slots": 3, "max_context": 250, "prefill_chunk": 8, "cache_fill": float("nan")}
    plain = generate(SlotRunner(target, None, **options), prompts, params)
    check_against_cache_free_forward(target, prompts, [one.tokens for one in plain])
    for draft in (bigram_draft(target), tiny_draft(target)):
        same(plain, generate(SlotRunner(target, draft, **options), prompts, params))


@pytest.mark.ci
@pytest.mark.parametrize("count", [pytest.param(count, marks=REPEATS) for count in (1, 2, 4, 6)])
def test_B14_any_number_of_proposals(world: World, count: int) -> None:
    """Every m below the block's, which also moves every verify shape."""
    _, draft, _ = world.pairs["dflash"]
    runner = SlotRunner(world.target, draft, num_slots=3, max_context=200, num_proposals=count, cache_fill=float("nan"))
    done = generate(runner, world.prompts["dflash"][:3], SamplingParams(max_new_tokens=100, ignore_eos=True))
    for plain, one in zip(world.plain["dflash"], done, strict=False):
        assert plain.tokens[:100] == one.tokens
        assert max(one.accepted) <= count


@pytest.mark.ci
def test_B14_verify_rows_do_not_depend_on_the_verify_width() -> None:
    """Widths 1 to m + 1 at one prefix: as rows of one compiled shape, and as shapes of their own."""
    target = tiny_target()
    runner = SlotRunner(target, tiny_draft(target), num_slots=2, max_context=64, prefill_chunk=8, page_size=8)
    runner.admit(list(range(1, 14)), GREEDY)
    runner.admit([5, 6, 7], GREEDY)
    runner.step()
    m = runner.num_proposals
    drafts = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, m)), jnp.int32)

    def logits(width: int, length: int) -> np.ndarray:
        proposal = Proposal(drafts[:, :width], Point(drafts[:, :width], 64))
        return np.asarray(verify(runner.weights, runner._state, proposal, jnp.full(2, length, jnp.int32))[0])

    verify = jax.jit(runner.program.verify)
    whole = logits(m, m)
    assert np.isfinite(whole).all() and len({row.tobytes() for row in whole[0]}) == m + 1
    for length in range(m + 1):
        np.testing.assert_array_equal(logits(m, length)[:, : length + 1], whole[:, : length + 1])
    for width in (0, 1, m - 1):
        np.testing.assert_allclose(logits(width, width), whole[:, : width + 1], atol=1e-5)


@pytest.mark.ci
def test_B26_real_pair_on_a_reused_slot_equals_a_fresh_runner() -> None:
    """Long then short and back, on one slot over a NaN cache: tokens and accept lengths of a fresh runner."""
    target = tiny_target("llama", seed=2, scale=0.2)
    draft = bigram_draft(target)
    options = {"num_slots": 1, "max_context": 120, "prefill_chunk": 8, "page_size": 8}
    rng = np.random.default_rng(0)
    long, short = rng.integers(0, 60, 50).tolist(), rng.integers(0, 60, 3).tolist()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    fresh = {
        len(prompt): generate(SlotRunner(target, draft, **options), [prompt], params)[0] for prompt in (long, short)
    }
    used = SlotRunner(target, draft, cache_fill=float("nan"), **options)
    for prompt in [long, short, short, long] + [long, short] * 6:
        assert generate(used, [prompt], params) == [fresh[len(prompt)]]
