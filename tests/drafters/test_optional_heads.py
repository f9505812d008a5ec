"""DSpark's optional heads in every combination (B48), and the teacher that they learn from (B52)."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.checkpoints.target import Target
from jaxspec.drafters.dspark import DSparkObjective
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.errors import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten
from tests.drafters import tiny
from tests.helpers.marks import REPEATS
from tests.models.numpy_decoder import random_weights

pytestmark = pytest.mark.ci

FIRST = ((0, "vanilla", False, False), *((3, kind, True, True) for kind in ("vanilla", "gated", "rnn")))
GRID = [
    pytest.param(*one, marks=() if one in FIRST else REPEATS)
    for one in itertools.product((0, 3), ("vanilla", "gated", "rnn"), (True, False), (True, False))
    if not (one[0] == 0 and one[1] != "vanilla") and (one[2] or not one[3])
]


@pytest.fixture(scope="module")
def target():
    model = Decoder(tiny.TARGET)
    return Target("tiny", model, random_weights(model, 0.3), "r1")


@pytest.mark.ci
@pytest.mark.parametrize(("rank", "kind", "confidence", "with_markov"), GRID)
def test_B48_heads_build_propose_train_export_and_reload_or_say_why_not(
    rank, kind, confidence, with_markov, target, tmp_path
):
    if rank == 0 and with_markov:
        with pytest.raises(ConfigError, match="confidence_head_with_markov"):
            MarkovConfig(rank, kind, confidence, with_markov)
        return
    objective = DSparkObjective(gamma=2.0, confidence_alpha=1.0 if confidence else 0.0)
    drafter = tiny.dspark(rank, kind, confidence, with_markov, objective=objective)
    params = tiny.random_params(drafter)
    shared = dataclasses.replace(tiny.shared(), embedding=target.embedding, head=target.head)
    data, table = tiny.batch([[1, 4, 6]], 9), tiny.page_tables(2, 2)

    def propose(drafter, params):
        state = drafter.init_state(5, 4, jnp.float32)
        slots = tiny.slots([7, 9], [0, 5], table)
        return drafter.propose(params, shared, state, slots, tiny.keys(2), tiny.sampled(2))

    @jax.jit
    def step_and_propose(params):
        value, grads = jax.value_and_grad(
            lambda p: drafter.objective(drafter.loss(p, shared, data, jax.random.key(0)))
        )(params)
        updates, _ = optax.adam(1e-2).update(grads, optax.adam(1e-2).init(params))
        return value, updates, propose(drafter, optax.apply_updates(params, updates))

    value, updates, proposal = step_and_propose(params)
    assert np.isfinite(float(value)) and proposal.tokens.shape == (2, 4)
    assert (proposal.confidence is not None) == confidence
    still = [name for name, update in flatten(updates).items() if not np.any(np.asarray(update))]
    assert not still, f"nothing trains {still}"
    trained = jax.tree.map(lambda a, b: a + b, params, updates)
    save_drafter(tmp_path / "draft", Draft(drafter, trained))
    loaded = load_drafter(tmp_path / "draft", target)
    assert (loaded.drafter.heads, loaded.drafter.num_proposals) == (drafter.heads, drafter.num_proposals)
    assert set(flatten(loaded.params)) == set(flatten(trained))
    for name, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(leaf, flatten(trained)[name], err_msg=name)
    same = dataclasses.replace(loaded.drafter, config=drafter.config, objective_config=drafter.objective_config)
    assert same == drafter


@pytest.mark.parametrize(("rank", "kind", "named"), [(-1, "vanilla", "markov_rank"), (3, "lstm", "markov_head_type")])
def test_B48_heads_that_do_not_exist_are_refused_by_name(rank, kind, named):
    with pytest.raises(ConfigError, match=named):
        MarkovConfig(rank, kind)


def test_B48_rank_0_takes_the_blocks_own_logits():
    drafter = tiny.dspark(0, confidence=False)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, tiny.HIDDEN)), jnp.float32)
    walk = drafter.walk(tiny.random_params(drafter), tiny.shared(), hidden, jnp.asarray([5, 6]))
    np.testing.assert_allclose(walk.logits, np.asarray(hidden) @ np.asarray(tiny.shared().head).T, atol=1e-5)
    assert walk.confidence_logits is None


def naive_latent(kind, head, state, hidden, previous):
    """One slot of a Markov head: gate reads [h; e], rnn reads [state; e; h] and splits into gate, candidate, out."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    if kind == "vanilla":
        return state, previous
    if kind == "gated":
        z = head["gate_proj"]["weight"] @ np.concatenate([hidden, previous]) + head["gate_proj"]["bias"]
        return state, sigmoid(z) * previous
    z = head["joint_proj"]["weight"] @ np.concatenate([state, previous, hidden]) + head["joint_proj"]["bias"]
    gate, candidate, out = np.split(z, 3)
    return sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate), np.tanh(out)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_walk_equals_a_naive_walk(kind):
    drafter = tiny.dspark(kind=kind)
    params, shared = tiny.random_params(drafter), tiny.shared()
    hidden = np.random.default_rng(3).normal(size=(1, 4, tiny.HIDDEN))
    walk = jax.jit(lambda h: drafter.walk(params, shared, h, jnp.asarray([5])))(jnp.asarray(hidden, jnp.float32))
    head = jax.tree.map(lambda x: np.asarray(x, np.float64), params["markov_head"])
    table = np.asarray(shared.head, np.float64)
    state, prev = np.zeros(3), 5
    confidence = jax.tree.map(np.asarray, params["confidence_head"]["proj"])
    for slot in range(4):
        h, e = hidden[0, slot], head["markov_w1"]["weight"][prev]
        score = confidence["weight"][0] @ np.concatenate([h, e]) + confidence["bias"][0]
        assert float(walk.confidence_logits[0, slot]) == pytest.approx(score, abs=1e-4)
        state, z = naive_latent(kind, head, state, h, e)
        logits = table @ h + head["markov_w2"]["weight"] @ z
        np.testing.assert_allclose(walk.logits[0, slot], logits, atol=1e-4)
        prev = int(logits.argmax())
        assert int(walk.tokens[0, slot]) == prev


@pytest.mark.parametrize("narrow", [False, True])
def test_B52_the_teacher_is_the_targets_own_distribution_also_after_a_bfloat16_round_trip(target, narrow):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, tiny.VOCAB, (2, 9)))
    run = jax.jit(lambda p: target.model.forward_sequences(p, tokens, (4, "final")))
    out = run(target.params)
    saved = out.features[..., tiny.HIDDEN :]
    raw = out.features[..., : tiny.HIDDEN]
    if narrow:
        saved = saved.astype(jnp.bfloat16).astype(jnp.float32)
    drafter = tiny.dspark()
    shared = dataclasses.replace(tiny.shared(), head=target.head)
    data = dataclasses.replace(tiny.batch([[2], [4]], 9), input_ids=tokens, teacher_hidden=saved)
    teacher = jax.jit(lambda p: drafter.trace(p, shared, data)["teacher_logits"])(tiny.random_params(drafter))
    own = jax.nn.log_softmax(target.model.logits(target.params, out.hidden))
    for b, anchor in enumerate((2, 4)):  # labels at anchor + 1 …: the teacher's rows are anchor …
        ours = jax.nn.log_softmax(teacher[b, 0])
        theirs = own[b, anchor : anchor + 4]
        kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), -1)
        assert float(jnp.max(jnp.abs(kl))) < (1e-3 if narrow else 1e-6)
    wrong = jax.nn.log_softmax(target.model.logits(target.params, raw))
    assert float(jnp.max(jnp.sum(jnp.exp(own) * (own - wrong), -1))) > 1e-2  # the pre-norm state is another teacher
