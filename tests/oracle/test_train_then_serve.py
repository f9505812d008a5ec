"""Train-then-serve (B51): features carry the answer, so training must reach 100 % and serving must accept 100 %.

One misaligned row, feature, position, mask or teacher anywhere between the two breaks it: each control below plants
such a fault and must be rejected by the server, however well it trained.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark, DSparkObjective
from jaxspec.drafters.markov import MarkovConfig
from pallas_kernels.anchor_attention import reference
from tests.oracle import world

pytestmark = pytest.mark.ci

METHODS = ("dflash", "dspark")
LAG = world.PROPOSALS + 1  # the last proposal needs the feature right before the anchor, and no later one


@pytest.fixture(scope="module")
def trained():
    return {method: world.train(world.make(method), LAG) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_B51_training_reaches_100_percent_and_serving_accepts_100_percent(trained, method):
    params, trained_accuracy = trained[method]
    assert trained_accuracy == 1.0
    drafter = world.make(method)
    _, counter, _ = world.serve(drafter, params, LAG)
    assert counter.tau == drafter.num_proposals + 1 == world.PROPOSALS + 1
    assert world.acceptance(counter) == 1.0


def test_B51_the_same_weights_propose_the_answer_as_a_tree(trained):
    """DDTree over a trained DFlash: the best path of its marginals is the answer."""
    tree = DDTree(world.make("dflash"), 9)
    _, counter, _ = world.serve(tree, trained["dflash"][0], LAG)
    assert counter.tau == world.PROPOSALS + 1


def batch_of(answers, table, drafter, lag):
    """The very rounds that were served, as one training batch: the anchor of each round is where the last one ended."""
    size = len(table) - lag
    tokens = np.asarray(table)[None]
    anchors, accepted = [], []
    for answer in answers:
        at = len(answer.prompt_ids)
        for r in answer.accepted:
            anchors.append(at)
            accepted.append(r)
            at += r + 1
    order = np.argsort(anchors, kind="stable")
    features = world.features_of(tokens, lag)[:, :size]
    data = world.of_tokens(tokens, size, features, np.asarray(anchors)[order][None])
    return data, np.asarray(accepted)[order]


@pytest.mark.parametrize("method", METHODS)
def test_B38_accuracy_of_training_equals_acceptance_of_serving_on_the_same_tokens(method):
    """Half-trained weights, so that there is something to count; full context, so that no round is cut short."""
    drafter = world.make(method)
    params, trained_accuracy = world.train(drafter, LAG, steps=40)
    assert 0.2 < trained_accuracy < 0.98
    answers, counter, table = world.serve(drafter, params, LAG)
    data, accepted = batch_of(answers, table, drafter, LAG)
    assert all(n == drafter.num_proposals for answer in answers for n in answer.proposed)
    assert 0 < accepted.sum() < drafter.num_proposals * len(accepted)
    labels, logits = world.predictions(drafter, params, data)
    prefix = np.cumprod(np.asarray(logits).argmax(-1)[0] == np.asarray(labels)[0], axis=-1).sum(-1)
    np.testing.assert_array_equal(prefix, accepted)
    terms = drafter.loss(params, world.SHARED, data, None)
    hits, seen = terms["metric/accuracy_position"]
    assert float(hits[0] / seen[0]) == pytest.approx(counter.acceptance_unconditional[0])
    stood, reached = terms["metric/accepted_position"]
    assert (stood.tolist(), reached.tolist()) == (counter.accepted_at, counter.reached_at)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_B51_control_features_shifted_by_one_in_training_are_useless_when_served(method, shift):
    """Shifted left, training still reaches 100 %; only serving can tell."""
    drafter = world.make(method)
    params, trained_accuracy = world.train(drafter, LAG, shift=shift, steps=150)
    assert trained_accuracy > 0.95 if shift < 0 else trained_accuracy > 0.5
    _, counter, _ = world.serve(drafter, params, LAG)
    assert world.acceptance(counter) < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_B50_control_context_with_the_anchors_own_feature_trains_and_fails_when_served(method, monkeypatch):
    """Here only the anchor's own feature knows the next token: with the honest mask nothing can be learned."""
    drafter = world.make(method, proposals=1)
    _, honest = world.train(drafter, 1, steps=60)
    assert honest < 0.5

    def leaking(anchors, keep, block, context, window, starts=None):
        return (jnp.arange(context) <= anchors[:, :, None, None]) & keep[:, :, None, None] & jnp.ones((block, 1), bool)

    with monkeypatch.context() as patched:
        patched.setattr(reference, "context_mask", leaking)
        params, trained_accuracy = world.train(drafter, 1, leak=True)
    assert trained_accuracy > 0.95
    _, counter, _ = world.serve(drafter, params, 1)
    assert world.acceptance(counter) < 0.5


def test_B45_control_dflash_weights_served_with_dsparks_rows(trained):
    config = world.make("dflash").config
    rows = DSpark(
        config, MarkovConfig(0, confidence=False, confidence_with_markov=False), objective_config=DSparkObjective()
    )
    _, counter, _ = world.serve(rows, trained["dflash"][0], LAG)
    assert world.acceptance(counter) < 0.5


def test_B45_control_dspark_weights_served_with_dflashs_rows(trained):
    weights = {name: value for name, value in trained["dspark"][0].items() if "head" not in name}
    _, counter, _ = world.serve(DFlash(world.make("dspark").config), weights, LAG)
    assert world.acceptance(counter) < 0.5
