"""What `propose` returns: q is what was drawn from, and zero where there is nothing, in every form (B01, B40)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Point, Proposal, Sparse, first_proposals
from tests.drafters import tiny

pytestmark = pytest.mark.ci

VOCAB = 7


def three_forms():
    """One q of two slots over 7 ids, as sparse, dense and point distributions."""
    ids = jnp.asarray([[[5, 2, 0], [6, 1, 3]], [[4, 5, 6], [0, 1, 2]]])
    probs = jnp.asarray([[[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]], [[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]])
    dense = np.zeros((2, 2, VOCAB))
    for r, slot, k in np.ndindex(2, 2, 3):
        dense[r, slot, ids[r, slot, k]] += probs[r, slot, k]
    best = dense.argmax(-1)
    return {
        "sparse": (Sparse(ids, probs, VOCAB), dense),
        "dense": (Dense(jnp.asarray(dense, jnp.float32)), dense),
        "point": (Point(jnp.asarray(best), VOCAB), np.eye(VOCAB)[best]),
    }


@pytest.mark.parametrize("form", ["sparse", "dense", "point"])
def test_B40_every_form_of_q_scatters_into_zeros_and_has_no_row_behind_the_last_slot(form):
    q, dense = three_forms()[form]
    for token in range(VOCAB):
        np.testing.assert_allclose(q.prob(jnp.full((2, 2), token)), dense[:, :, token], atol=1e-7)
    for first in range(3):
        for second in range(3):
            rows = np.asarray(q.rows(jnp.asarray([first, second])))
            for r, slot in enumerate((first, second)):
                expected = dense[r, slot] if slot < 2 else np.zeros(VOCAB)
                np.testing.assert_allclose(rows[r], expected, atol=1e-7)


def test_B40_a_padding_candidate_of_probability_zero_adds_nothing_to_its_id():
    q = Sparse(jnp.asarray([[[3, 3, 0]]]), jnp.asarray([[[0.6, 0.4, 0.0]]]), VOCAB)
    np.testing.assert_allclose(q.rows(jnp.asarray([0]))[0], [0, 0, 0, 1, 0, 0, 0], atol=1e-7)
    assert float(q.prob(jnp.asarray([[3]]))[0, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize("form", ["sparse", "dense", "point"])
def test_first_proposals_cuts_tokens_q_and_confidence_alike(form):
    q, dense = three_forms()[form]
    proposal = Proposal(jnp.asarray([[5, 6], [4, 2]]), q, jnp.asarray([[0.9, 0.8], [0.7, 0.6]]))
    short = first_proposals(proposal, 1)
    assert short.tokens.tolist() == [[5], [4]] and short.confidence.shape == (2, 1)
    np.testing.assert_allclose(short.q.rows(jnp.asarray([0, 1])), [dense[0, 0], np.zeros(VOCAB)], atol=1e-7)
    assert first_proposals(proposal, 2) is proposal


@functools.cache
def compiled(drafter):
    return jax.jit(drafter.propose)


def propose(drafter, sampling, seed=4, anchors=(7, 9), positions=(3, 6), live=None):
    params, shared = tiny.random_params(drafter), tiny.shared()
    rng = np.random.default_rng(8)
    table = tiny.page_tables(2, 3)
    pools = jax.eval_shape(lambda: drafter.init_state(7, 4, jnp.float32))
    state = tuple(jnp.asarray(rng.normal(size=pool.shape), jnp.float32) for pool in pools)
    slots = tiny.slots(anchors, positions, table, live)
    return compiled(drafter)(params, shared, state, slots, tiny.keys(2, seed), sampling), params, shared


@pytest.mark.parametrize("sampling", ["argmax", "sample"])
def test_B01_dflash_q_is_what_was_drawn_from(sampling):
    drafter = tiny.dflash(draft_sampling=sampling)
    greedy, _, shared = propose(drafter, tiny.greedy(2))
    logits = np.asarray(drafter.block_logits(shared, greedy.trace["draft_hidden"][:, 1:]))
    np.testing.assert_array_equal(greedy.tokens, logits.argmax(-1))
    np.testing.assert_array_equal(greedy.q.prob(greedy.tokens), 1.0)
    warm, *_ = propose(drafter, tiny.sampled(2, 2.0))
    if sampling == "argmax":
        np.testing.assert_array_equal(warm.tokens, greedy.tokens)
        np.testing.assert_array_equal(warm.q.prob(warm.tokens), 1.0)
        return
    expected = np.exp(logits / 2 - (logits / 2).max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(warm.q.probs, expected, atol=1e-5)
    drawn = [np.asarray(propose(drafter, tiny.sampled(2, 2.0), seed)[0].tokens) for seed in range(2)]
    assert not np.array_equal(*drawn)
    assert (np.asarray(warm.q.prob(warm.tokens)) > 0).all()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_B01_dspark_q_is_the_conditional_of_the_slots_before_it(kind):
    """Recomputed with teacher forcing on the drawn tokens, through the training path: q must be that row's softmax."""
    drafter = tiny.dspark(kind=kind)
    temperature = 1.5
    proposal, params, shared = propose(drafter, tiny.sampled(2, temperature))
    hidden, tokens = proposal.trace["draft_hidden"], proposal.tokens
    prev = jnp.concatenate([jnp.asarray([[7], [9]]), tokens[:, :-1]], axis=1)
    from jaxspec.drafters import markov

    def forced(hidden, prev):
        z = markov.latents(drafter.heads, params, hidden, prev)
        logits = drafter.draft_logits(params, shared, hidden, z)
        return jax.nn.softmax(logits / temperature, -1), markov.confidence_logits(drafter.heads, params, hidden, prev)

    q, confidence = jax.jit(forced)(hidden, prev)
    np.testing.assert_allclose(proposal.q.probs, q, atol=1e-5)
    np.testing.assert_allclose(proposal.trace["confidence_logits"], confidence, atol=1e-4)
    np.testing.assert_allclose(proposal.confidence, jax.nn.sigmoid(confidence), atol=1e-5)


def test_B12_a_confidence_does_not_depend_on_its_own_token():
    """Slot 0's confidence is the same whatever is drawn there; slot 1's moves with it."""
    drafter = tiny.dspark()
    seen = {}
    for seed in range(6):
        proposal, *_ = propose(drafter, tiny.sampled(2, 5.0), seed)
        seen[tuple(np.asarray(proposal.tokens[:, 0]))] = np.asarray(proposal.confidence)
    values = list(seen.values())
    assert len(values) > 1
    assert all(np.array_equal(v[:, 0], values[0][:, 0]) for v in values)
    assert any(not np.allclose(v[:, 1], values[0][:, 1]) for v in values)


def test_B06_a_greedy_row_beside_a_sampled_one_takes_the_argmax():
    drafter = tiny.dspark()
    greedy, *_ = propose(drafter, tiny.greedy(2))
    mixed = SlotSampling(jnp.asarray([0.0, 3.0]), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
    proposal, *_ = propose(drafter, mixed)
    np.testing.assert_array_equal(proposal.tokens[0], greedy.tokens[0])
    np.testing.assert_array_equal(proposal.q.prob(proposal.tokens)[0], 1.0)


@pytest.mark.parametrize("make", [tiny.dflash, tiny.dspark])
def test_B64_a_slot_that_is_not_live_is_finite_and_moves_nobody(make):
    both, *_ = propose(make(), tiny.greedy(2))
    one, *_ = propose(make(), tiny.greedy(2), live=[True, False], positions=(3, 0), anchors=(7, 0))
    np.testing.assert_array_equal(one.tokens[0], both.tokens[0])
    assert np.isfinite(np.asarray(one.trace["draft_hidden"])).all()


def test_no_drafter_proposes_nothing():
    from jaxspec.drafters.none import NoDrafter

    drafter = NoDrafter(VOCAB)
    proposal = drafter.propose(
        {}, None, (), tiny.slots([1, 2], [1, 2], tiny.page_tables(2, 1)), tiny.keys(2), tiny.greedy(2)
    )
    assert proposal.tokens.shape == (2, 0) and drafter.num_proposals == 0
    assert dataclasses.is_dataclass(proposal.q)
