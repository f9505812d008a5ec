"""Penalties, bias, min tokens and masks against plain numpy; every verified row is what plain decoding would see."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.acceptance import accept
from jaxspec.decoding.logprobs import logprobs
from jaxspec.decoding.processors import MAX_BIASES, LogitRules, SlotRules, mask_words, slot_rules, unpack_mask
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Point, Proposal
from jaxspec.errors import RequestError

pytestmark = pytest.mark.ci

VOCAB, SLOTS, M = 11, 4, 3
RULES = [
    LogitRules(),
    LogitRules(repetition_penalty=1.7, min_tokens=6),
    LogitRules(presence_penalty=0.7, frequency_penalty=-0.4, logit_bias={3: 2.0, 10: -5.0}),
    LogitRules(0.6, -1.5, 1.1, {0: 1.0}, 4),
]
ENDS = (2, 7)
serve = jax.jit(SlotRules.apply)
start, prompt, emitted = jax.jit(SlotRules.start), jax.jit(SlotRules.note_prompt), jax.jit(SlotRules.note_emitted)


def oracle(row: np.ndarray, rules: LogitRules, before: list[int], answer: list[int]) -> np.ndarray:
    """One row of logits by the words of the definition."""
    out = row.astype(np.float64).copy()
    if len(answer) < rules.min_tokens:
        out[list(ENDS)] = -np.inf
    for token, value in rules.logit_bias.items():
        out[token] += value
    for token in range(len(out)):
        times = answer.count(token)
        if times or token in before:
            out[token] = (
                out[token] / rules.repetition_penalty if out[token] > 0 else out[token] * rules.repetition_penalty
            )
        out[token] -= rules.frequency_penalty * times + rules.presence_penalty * (times > 0)
    return out


@dataclasses.dataclass
class World:
    """Slots with rules and histories, on the device and as lists."""

    state: SlotRules
    prompts: list[list[int]]
    answers: list[list[int]]


def world(rng: np.random.Generator, rules: list[LogitRules] = RULES, answered: int = 3) -> World:
    state = SlotRules.empty(len(rules), VOCAB)
    prompts = [rng.integers(0, VOCAB, 4).tolist() for _ in rules]
    answers = [rng.integers(0, VOCAB, answered).tolist() for _ in rules]
    for slot, one in enumerate(rules):
        state = start(state, slot, slot_rules(one, ENDS, VOCAB))
        junk = np.array([*prompts[slot], 9, 9], np.int32)  # a chunk's padding is no history
        state = prompt(state, slot, junk, 4)
    tokens = np.concatenate([np.array(answers, np.int32), np.full((len(rules), 2), 5, np.int32)], axis=1)
    return World(emitted(state, tokens, np.full(len(rules), answered)), prompts, answers)


def test_every_row_of_a_block_equals_the_numpy_oracle() -> None:
    rng, live = np.random.default_rng(0), np.ones(SLOTS, bool)
    for _ in range(40):
        here = world(rng)
        logits = rng.normal(size=(SLOTS, M + 1, VOCAB)).astype(np.float32) * 3
        drafts = rng.integers(0, VOCAB, (SLOTS, M)).astype(np.int32)
        drafts[0] = drafts[0, 0]  # the same id thrice
        got = np.asarray(serve(here.state, logits, drafts, live))
        for slot, rules in enumerate(RULES):
            for row in range(M + 1):
                answer = [*here.answers[slot], *drafts[slot, :row].tolist()]
                expected = oracle(logits[slot, row], rules, here.prompts[slot], answer)
                np.testing.assert_allclose(got[slot, row], expected, rtol=1e-5, atol=1e-5, err_msg=str((slot, row)))


@pytest.mark.parametrize("accepted", [0, 1, M - 1, M])
def test_the_history_follows_the_accepted_tokens_and_no_other(accepted: int) -> None:
    """After a round the first row is what the row behind the accepted drafts was (accept lengths 0, 1, m - 1, m)."""
    rng, live = np.random.default_rng(1), np.ones(SLOTS, bool)
    here = world(rng)
    logits = rng.normal(size=(SLOTS, M + 1, VOCAB)).astype(np.float32)
    logits[:] = logits[:, :1]
    drafts = rng.integers(0, VOCAB, (SLOTS, M)).astype(np.int32)
    within = np.asarray(serve(here.state, logits, drafts, live))
    after = emitted(here.state, drafts, np.full(SLOTS, accepted))
    again = np.asarray(serve(after, logits[:, :1], drafts[:, :0], live))
    np.testing.assert_allclose(again[:, 0], within[:, accepted], rtol=1e-6)
    np.testing.assert_array_equal(after.emitted, 3 + accepted)


def test_rows_of_a_tree_see_their_ancestors_only() -> None:
    rng = np.random.default_rng(2)
    here = world(rng)
    logits = rng.normal(size=(SLOTS, M + 1, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, VOCAB, (SLOTS, M)).astype(np.int32)
    above = np.zeros((SLOTS, M + 1, M), bool)  # nodes 1 and 2 below the root, node 3 below node 2
    above[:, 1, 0] = above[:, 2, 1] = above[:, 3, 1] = above[:, 3, 2] = True
    got = np.asarray(serve(here.state, logits, drafts, np.ones(SLOTS, bool), None, above))
    for slot, rules in enumerate(RULES):
        for row, path in enumerate(([], [0], [1], [1, 2])):
            answer = [*here.answers[slot], *drafts[slot, path].tolist()]
            expected = oracle(logits[slot, row], rules, here.prompts[slot], answer)
            np.testing.assert_allclose(got[slot, row], expected, rtol=1e-5, atol=1e-5)


def test_a_slots_next_request_starts_without_its_history() -> None:
    here = world(np.random.default_rng(3))
    fresh = start(here.state, 3, slot_rules(RULES[3], ENDS, VOCAB))
    assert int(fresh.emitted[3]) == 0 and not fresh.counts[3].any() and not fresh.prompt[3].any()
    np.testing.assert_array_equal(fresh.counts[2], here.state.counts[2])


def test_dead_slots_and_absent_rules_leave_logits_alone() -> None:
    rng = np.random.default_rng(4)
    here = world(rng)
    logits = rng.normal(size=(SLOTS, M + 1, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, VOCAB, (SLOTS, M)).astype(np.int32)
    only = np.array([True, False, False, False])  # slot 0 asks for nothing
    np.testing.assert_array_equal(serve(here.state, logits, drafts, only), logits)
    everybody = np.asarray(serve(here.state, logits, drafts, np.ones(SLOTS, bool)))
    np.testing.assert_array_equal(everybody[0], logits[0])
    assert (everybody[1:] != logits[1:]).any(axis=(1, 2)).all()


def test_grammar_masks_come_first_and_a_row_that_allows_nothing_is_left_alone() -> None:
    rng = np.random.default_rng(5)
    here = world(rng, [LogitRules(logit_bias={4: 50.0}, min_tokens=9)])
    logits = rng.normal(size=(1, M + 1, VOCAB)).astype(np.float32)
    allowed = np.zeros((1, M + 1, VOCAB), bool)
    allowed[0, 0, [1, 2]] = True
    allowed[0, 1, 2] = True  # the grammar leaves the end alone, which min tokens must not forbid
    allowed[0, 3] = True
    got = np.asarray(serve(here.state, logits, np.full((1, M), 6, np.int32), np.ones(1, bool), allowed))
    np.testing.assert_array_equal(np.isfinite(got[0, 0]), np.arange(VOCAB) == 1)
    np.testing.assert_array_equal(np.isfinite(got[0, 1]), np.arange(VOCAB) == 2)
    assert np.isfinite(got[0, 2]).sum() == VOCAB - len(ENDS)
    assert got[0, 3].argmax() == 4
    rules_off = SlotRules.empty(1, VOCAB)
    got = np.asarray(serve(rules_off, logits, np.full((1, M), 6, np.int32), np.ones(1, bool), allowed))
    np.testing.assert_array_equal(np.isfinite(got[0, 0]), allowed[0, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_B08_bias_holds_on_every_verified_row(temperature: float) -> None:
    """-100 on x: never emitted, proposed or not. +100 on y: y alone, and other drafts are rejected."""
    rng = np.random.default_rng(6)
    many = 200
    sampling = SlotSampling(jnp.full(many, temperature), jnp.zeros(many, jnp.int32), jnp.ones(many), jnp.zeros(many))

    @jax.jit
    def emit(rules: SlotRules, drafts, logits, u):
        processed = rules.apply(logits, drafts, jnp.ones(many, bool))
        proposal = Proposal(drafts, Point(drafts, VOCAB))
        out = accept(processed, proposal, sampling, u[:, :M], u[:, M], jnp.full(many, M))
        return out.tokens(proposal, fill=-1), out.accepted

    row = slot_rules(LogitRules(logit_bias={5: -100.0, 6: 100.0}), ENDS, VOCAB)
    both = jax.tree.map(lambda x: jnp.repeat(x, many, axis=0), row)
    banned = dataclasses.replace(both, bias=both.bias.at[:, 1].set(0))
    for slot in range(M):
        logits = rng.normal(size=(many, M + 1, VOCAB)).astype(np.float32)
        u = rng.random((many, M + 1)).astype(np.float32)
        drafts = np.full((many, M), 6, np.int32)
        drafts[:, slot] = 5
        tokens, accepted = emit(both, drafts, logits, u)
        assert set(np.unique(tokens)) <= {-1, 6}
        np.testing.assert_array_equal(accepted, slot)
        tokens, _ = emit(banned, drafts, logits, u)
        assert 5 not in np.asarray(tokens)


def test_packed_masks_of_any_width() -> None:
    rng = np.random.default_rng(7)
    for vocab in (1, 31, 32, 33, 70):
        bits = rng.random((2, 3, vocab)) < 0.5
        padded = np.pad(bits, ((0, 0), (0, 0), (0, 32 * mask_words(vocab) - vocab)))
        words = np.packbits(padded, axis=-1, bitorder="little").view(np.int32)
        assert words.shape[-1] == mask_words(vocab)
        np.testing.assert_array_equal(jax.jit(unpack_mask, static_argnums=1)(words, vocab), bits)


def test_logprobs_equal_numpy_with_ties() -> None:
    rng = np.random.default_rng(8)
    logits = np.round(rng.normal(size=(3, 4, VOCAB)) * 2).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (3, 4)).astype(np.int32)
    found = jax.jit(logprobs, static_argnames="top")(logits, tokens, top=5)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for at in np.ndindex(3, 4):
        order = sorted(range(VOCAB), key=lambda v: (-logits[at][v], v))
        assert np.asarray(found.ids[at]).tolist() == order[:5]
        np.testing.assert_allclose(found.values[at], expected[at][order[:5]], atol=1e-5)
        np.testing.assert_allclose(found.chosen[at], expected[at][tokens[at]], atol=1e-5)
        assert int(found.rank[at]) == 1 + order.index(tokens[at])


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (LogitRules(repetition_penalty=0.0), "repetition_penalty"),
        (LogitRules(repetition_penalty=float("inf")), "repetition_penalty"),
        (LogitRules(presence_penalty=2.5), "presence_penalty"),
        (LogitRules(frequency_penalty=float("nan")), "frequency_penalty"),
        (LogitRules(min_tokens=9), "min_tokens"),
        (LogitRules(min_tokens=True), "min_tokens"),
        (LogitRules(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (LogitRules(logit_bias={-1: 1.0}), "logit_bias"),
        (LogitRules(logit_bias={1: float("inf")}), r"logit_bias\[1\]"),
        (LogitRules(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0)), "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_one_line_that_names_the_field(rules: LogitRules, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        rules.validate(VOCAB, 8)
    assert "\n" not in str(caught.value)


def test_good_rules_pass_and_too_many_ends_do_not() -> None:
    for rules in RULES:
        rules.validate(VOCAB, 8)
    with pytest.raises(RequestError, match="stop_token_ids"):
        slot_rules(RULES[0], tuple(range(9)), VOCAB)
