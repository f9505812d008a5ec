"""DFlash 2 in the round: honest q (B01, B13), enumerated law (B02), token identity (B14), train-then-serve (B51)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters import selector
from jaxspec.drafters.base import Sparse
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash2 import DFlash2, DFlash2Objective
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.selector import SelectorConfig
from pallas_kernels.anchor_attention import reference
from tests.decoding.enumeration import Case, output_law, random_case, target_law
from tests.decoding.test_enumeration import through_jaxspec
from tests.drafters import family, tiny
from tests.helpers import worlds
from tests.helpers.marks import REPEATS
from tests.oracle import world

pytestmark = pytest.mark.ci

# -- proposals --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proposer():
    """(sampling, seed) -> proposal of two requests, one program."""
    drafter = family.dflash2()
    params, shared = tiny.random_params(drafter), tiny.shared()
    rng, table = np.random.default_rng(8), tiny.page_tables(2, 3)
    state = tuple(
        jnp.asarray(rng.normal(size=pool.shape), jnp.float32) for pool in drafter.init_state(7, 4, jnp.float32)
    )
    slots = tiny.slots((7, 9), (3, 6), table)
    run = jax.jit(lambda keys, sampling: drafter.propose(params, shared, state, slots, keys, sampling))
    return drafter, params, shared, lambda sampling, seed=4: run(tiny.keys(2, seed), sampling)


def test_B01_B13_q_is_the_conditional_of_the_token_before(proposer):
    """Recomputed with teacher forcing on what was drawn; the request's top-k, top-p and min-p leave q alone."""
    drafter, params, shared, propose = proposer
    filters = SlotSampling(jnp.full(2, 1.5), jnp.full(2, 2, jnp.int32), jnp.full(2, 0.4), jnp.full(2, 0.2))
    for sampling in (tiny.sampled(2, 1.5), filters):
        proposal = propose(sampling)
        assert isinstance(proposal.q, Sparse) and proposal.q.ids.shape == (2, 3, 3)
        hidden = proposal.trace["draft_hidden"][:, 1:]
        found = drafter.candidates(hidden @ shared.head.T)
        previous = jnp.concatenate([jnp.asarray([[7], [9]]), proposal.tokens[:, :-1]], axis=1)
        q = jax.nn.softmax(selector.scores(params, found, hidden, previous) / 1.5, axis=-1)
        np.testing.assert_array_equal(proposal.q.ids, found.ids)
        np.testing.assert_allclose(proposal.q.probs, q, atol=1e-5)
        assert (np.asarray(proposal.q.prob(proposal.tokens)) > 0).all()
    drawn = {tuple(np.asarray(propose(tiny.sampled(2, 5.0), seed).tokens).ravel()) for seed in range(4)}
    assert len(drawn) > 1


def test_B06_greedy_requests_take_the_path_of_best_candidates_with_a_one_hot_q(proposer):
    *_, propose = proposer
    greedy = propose(tiny.greedy(2))
    mixed = propose(SlotSampling(jnp.asarray([0.0, 2.0]), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2)))
    warm = propose(tiny.sampled(2, 2.0))
    np.testing.assert_array_equal(greedy.q.prob(greedy.tokens), 1.0)
    np.testing.assert_array_equal(mixed.tokens[0], greedy.tokens[0])
    np.testing.assert_array_equal(mixed.q.probs[0], greedy.q.probs[0])
    np.testing.assert_array_equal(mixed.tokens[1], warm.tokens[1])
    np.testing.assert_array_equal(mixed.q.probs[1], warm.q.probs[1])


# -- the law ----------------------------------------------------------------------------------------------------------


walk = jax.jit(selector.walk)


def tables(seed: int, temperature: float, vocab: int = 4, slots: int = 2, width: int = 3) -> tuple[np.ndarray, ...]:
    """q of each slot over the vocabulary given the tokens before it, as the walk reports it for every prefix."""
    params = jax.tree.map(
        lambda leaf: family.random_rows(seed + leaf.shape[0], *leaf.shape),
        selector.abstract_params(SelectorConfig(3), vocab, 5, jnp.float32),
    )
    found = selector.top_candidates(family.random_rows(seed, 1, slots, vocab), width)
    hidden = family.random_rows(seed + 1, 1, slots, 5)
    table = selector.lattice(params, found, hidden, jnp.asarray([1]))
    law = [np.zeros((vocab,) * (slot + 1)) for slot in range(slots)]
    law[1][:] = 1.0 / vocab  # behind a token that is never drawn: anything
    middle = (jnp.arange(512, dtype=jnp.float32) + 0.5) / 512
    grid = jnp.stack([middle, jnp.flip(middle)], axis=1)
    many = lambda x: jnp.broadcast_to(x, (512, *x.shape[1:]))  # noqa: E731
    path = walk(many(table), many(found.ids), jnp.full(512, temperature == 0), jnp.full(512, temperature), grid)
    q = Sparse(many(found.ids), path.probs, vocab)
    law[0][:] = q.rows(jnp.zeros(512, jnp.int32))[0]
    later = q.rows(jnp.ones(512, jnp.int32))
    for first, row in zip(np.asarray(path.tokens[:, 0]), np.asarray(later), strict=True):
        law[1][first] = row
    return tuple(law)


@pytest.mark.parametrize("mode", ["ratio", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_B02_B13_the_law_of_the_shipped_acceptance_with_the_walks_q_is_the_targets(mode, temperature):
    """V = 4 with K = 3 candidates, m = 2: one id has q = 0 at every slot. At every cut."""
    rng = np.random.default_rng(11)
    for seed in range(3):
        p = random_case(rng, 4, 2).p
        q = tables(seed, temperature)
        assert all((row == 0).any() for row in q[0].reshape(1, -1))
        exact = lambda x: x.astype(np.float32).astype(np.float64)  # noqa: E731
        case = Case(p, tuple(exact(x) for x in q))
        for cut in range(3):
            law = output_law(case, through_jaxspec(mode, "sparse"), cut)
            assert np.abs(law - target_law(case)).max() < 2e-6


# -- identity ---------------------------------------------------------------------------------------------------------


def answers(target, draft, prompts, new_tokens):
    room = max(map(len, prompts)) + new_tokens + 16
    runner = SlotRunner(target, draft, num_slots=len(prompts), max_context=room, prefill_chunk=16)
    done = generate(runner, prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    return [list(answer.tokens) for answer in done], done


@pytest.fixture(scope="module")
def golden_plain():
    """A golden pair, its prompts, and the target's own 512 tokens."""
    target, draft, prompts = worlds.golden_pair("q3a", "06_dflash2_gen")
    return target, draft, prompts, answers(target, None, prompts, 512)[0]


@pytest.mark.ci
@pytest.mark.parametrize("weights", ["trained", pytest.param("garbage", marks=REPEATS)])
def test_B14_512_greedy_tokens_are_the_targets_own(golden_plain, weights):
    target, draft, prompts, plain = golden_plain
    found, done = answers(target, draft if weights == "trained" else worlds.garbage(draft), prompts, 512)
    assert found == plain
    assert weights == "garbage" or count(done, draft.drafter.num_proposals).tau > 1.0


# -- train, then serve ------------------------------------------------------------------------------------------------

LAG = world.PROPOSALS + 1


def make(proposals: int = world.PROPOSALS) -> DFlash2:
    config = fresh_config(
        world.MODEL, num_layers=1, block_size=proposals + 1, mask_token_id=world.MASK_ID, target_layer_ids=(0,)
    )
    return DFlash2(config, DFlash2Objective(gamma=None), conv=ConvConfig(2, 8), selector=SelectorConfig(4, 4))


def serve(drafter, params, lag):
    counter = world.serve(drafter, params, lag)[1]
    return counter, world.acceptance(counter)


@pytest.fixture(scope="module")
def trained():
    return world.train(make(), LAG)


@pytest.mark.ci
def test_B51_training_reaches_100_percent_and_serving_accepts_100_percent(trained):
    params, accuracy = trained
    assert accuracy == 1.0
    counter, acceptance = serve(make(), params, LAG)
    assert acceptance == 1.0 and counter.tau == world.PROPOSALS + 1
    assert any(np.any(layer["mlp_conv"]["kernel_projection"]["weight"]) for layer in params["layers"])


@pytest.mark.ci
def test_B51_control_features_shifted_in_training_are_useless_when_served():
    params, accuracy = world.train(make(), LAG, shift=-1, steps=150)
    assert accuracy > 0.9
    assert serve(make(), params, LAG)[1] < 0.5


@pytest.mark.ci
def test_B50_control_a_context_with_the_anchors_own_feature_trains_and_fails_when_served(monkeypatch):
    drafter = make(proposals=1)

    def leaking(anchors, keep, block, context, window, starts=None):
        return (jnp.arange(context) <= anchors[:, :, None, None]) & keep[:, :, None, None] & jnp.ones((block, 1), bool)

    with monkeypatch.context() as patched:
        patched.setattr(reference, "context_mask", leaking)
        params, accuracy = world.train(drafter, 1, leak=True)
    assert accuracy > 0.95
    assert serve(drafter, params, 1)[1] < 0.5


class RowsOff(DFlash2):
    """Proposes from the rows 0 … B - 2, as if the anchor's row predicted."""

    def block_hidden(self, *arguments):
        return jnp.roll(super().block_hidden(*arguments), 1, axis=1)


@pytest.mark.ci
def test_B45_control_weights_served_from_the_wrong_rows(trained):
    drafter = make()
    wrong = RowsOff(drafter.config, drafter.objective_config, conv=drafter.conv, selector=drafter.selector)
    assert serve(wrong, trained[0], LAG)[1] < 0.5
