"""Objectives: against naive loops, in chunks, at holes and ends, and what each of them may touch."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxspec.drafters import losses
from jaxspec.drafters.base import Shared
from jaxspec.drafters.dflash import DFlashObjective
from jaxspec.drafters.dspark import DSparkObjective
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from tests.drafters import naive_losses, tiny

LENGTH = 12
HOLES = np.array([[1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0]], bool)
ANCHORS, KEEP = [[0, 3, 4, 9], [2, 3, 8, 0]], [[1, 1, 1, 1], [1, 1, 1, 0]]
KEY = jax.random.key(0)

DFLASH = {
    "gamma": DFlashObjective(gamma=2.5),
    "flat": DFlashObjective(gamma=None),
    "dpace": DFlashObjective(loss_type="dpace", dpace_alpha=0.3),
    "dpace-batch": DFlashObjective(loss_type="dpace", dpace_normalizer="batch"),
    "dpace-confidence": DFlashObjective(loss_type="dpace-cumulative-confidence-only", dpace_alpha=0.2),
    "dpace-continuation": DFlashObjective(loss_type="dpace-continuation-value-only", dpace_alpha=0.2),
    "lk-alpha": DFlashObjective(gamma=2.5, lk="alpha"),
    "lk-tv": DFlashObjective(gamma=2.5, lk="tv"),
    "lk-lambda": DFlashObjective(gamma=2.5, lk="lambda", kl_scale=0.8, kl_decay=1.5),
}


def batch(**changes):
    return tiny.batch(ANCHORS, LENGTH, keep=KEEP, loss_mask=HOLES, **changes)


def objective_of(drafter, shared, batch):
    return lambda params: drafter.objective(drafter.loss(params, shared, batch, KEY))


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_objective_equals_naive_loops(name):
    objective = dataclasses.replace(DFLASH[name], chunk_blocks=0)
    drafter, shared = tiny.dflash(objective), tiny.shared()
    params = tiny.random_params(drafter, scale=0.1)
    logits = _dflash_logits()
    assert float(jax.jit(objective_of(drafter, shared, batch()))(params)) == pytest.approx(
        naive_losses.dflash(logits, batch(), objective), rel=1e-5
    )


@functools.cache
def _dflash_logits():
    drafter, shared = tiny.dflash(), tiny.shared()
    params = tiny.random_params(drafter, scale=0.1)
    return np.asarray(
        jax.jit(lambda p: drafter.block_logits(shared, drafter.training_hidden(p, shared, batch())[:, :, 1:]))(params)
    )


def test_dpace_variants_and_their_alphas_differ():
    values = [naive_losses.dflash(_dflash_logits(), batch(), DFLASH[name]) for name in DFLASH if name != "lk-alpha"]
    assert len({round(value, 5) for value in values}) == len(values)


@pytest.mark.parametrize(("sample_from_anchor", "kind"), [(True, "vanilla"), (True, "rnn"), (False, "gated")])
def test_dspark_terms_equal_naive_loops(sample_from_anchor, kind):
    objective = DSparkObjective(
        gamma=3.0, ce_alpha=0.1, l1_alpha=0.9, confidence_alpha=0.7, denominator_eps=0.25, chunk_blocks=0
    )
    drafter = tiny.dspark(kind=kind, sample_from_anchor=sample_from_anchor, objective=objective)
    params, shared = tiny.random_params(drafter), tiny.shared()
    data = batch()
    terms, trace = jax.jit(lambda p: (drafter.loss(p, shared, data, KEY), drafter.trace(p, shared, data)))(params)
    teacher = np.asarray(data.teacher_hidden) @ np.asarray(shared.head).T
    expected = naive_losses.dspark(
        np.asarray(trace["draft_logits"]), np.asarray(trace["confidence_logits"]), teacher, data, objective, 0.25
    )
    total = float(terms["ce"][1])
    for name, value in expected.items():
        assert float(terms[name][0]) / (total + 0.25) == pytest.approx(value, rel=1e-4), name
    combined = 0.1 * expected["ce"] + 0.9 * expected["l1"] + 0.7 * expected["confidence"]
    assert float(drafter.objective(terms)) == pytest.approx(combined, rel=1e-4)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.ci), 3])
@pytest.mark.ci
def test_chunks_change_neither_losses_nor_gradients(method, chunk):
    """8 blocks: chunks of 3 leave a partial one whose padding must weigh nothing."""
    kinds = {
        "dflash": (tiny.dflash, DFlashObjective(gamma=3.0, lk="lambda")),
        "dspark": (tiny.dspark, DSparkObjective(gamma=3.0)),
    }
    make, objective = kinds[method]
    shared, data, results = tiny.shared(), batch(), []
    for size in (0, chunk):
        drafter = make(objective=dataclasses.replace(objective, chunk_blocks=size))
        params = tiny.random_params(drafter)

        def run(p, drafter=drafter):
            terms = drafter.loss(p, shared, data, KEY)
            return drafter.objective(terms), terms

        results.append(jax.jit(jax.value_and_grad(run, has_aux=True))(params))
    for one, other in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5, rtol=1e-4)


def products(jaxpr, width):
    """Operand dtypes of every product with an axis of `width`, loops and inner functions included."""
    for equation in jaxpr.eqns:
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "dot_general" and any(width in shape for shape in shapes):
            yield {v.aval.dtype.name for v in equation.invars}
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner, width)


@pytest.mark.parametrize(("chunk", "expected"), [(0, 2), (3, 2)])
def test_dflash_projects_to_the_vocabulary_twice_and_never_in_float32(chunk, expected):
    """Logits and the gradient of the hidden states: no logits for a second time, none of a head that is frozen."""
    drafter = tiny.dflash(DFlashObjective(chunk_blocks=chunk))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.random_params(drafter))
    table = jnp.ones((97, tiny.shared().head.shape[1]), jnp.bfloat16)  # no other axis is as long
    shared = Shared(table, table)
    lowered = jax.make_jaxpr(jax.grad(objective_of(drafter, shared, batch())))(params)
    live, _ = jax.interpreters.partial_eval.dce_jaxpr(lowered.jaxpr, [True] * len(lowered.jaxpr.outvars))
    found = list(products(live, shared.head.shape[0]))
    assert found == [{"bfloat16"}] * expected


def test_wide_logits_have_the_gradients_of_a_plain_product():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head, weights = (
        jax.random.normal(k, s) for k, s in zip(keys, ((2, 3, 8), (12, 8), (2, 3, 12)), strict=True)
    )

    def plain(hidden, head):
        return jnp.sum(weights * jnp.tanh(hidden @ head.T))

    def ours(hidden, head):
        return jnp.sum(weights * jnp.tanh(ly.unembed(hidden, head)))

    exact = jax.grad(plain, (0, 1))(hidden, head)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        found = jax.grad(ours, (0, 1))(hidden.astype(dtype), head.astype(dtype))
        for one, other in zip(found, exact, strict=True):
            assert one.dtype == dtype
            assert np.linalg.norm(one.astype(np.float32) - other) <= tolerance * np.linalg.norm(other)


def test_partial_tail_has_exactly_one_target_and_denominator_one():
    """S = 4, anchor 2, B = 5: only row 1 (label at 3) is inside."""
    drafter = tiny.dflash(DFlashObjective(gamma=7.0), block_size=5)
    params, shared, data = tiny.random_params(drafter), tiny.shared(), tiny.batch([2], 4)
    terms = jax.jit(lambda p: drafter.loss(p, shared, data, KEY))(params)
    labels, weights = drafter.labels(data)
    assert weights[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert int(labels[0, 0, 1]) == int(data.input_ids[0, 3])
    assert float(terms["ce"][1]) == 1.0 and float(terms["metric/accuracy"][1]) == 1.0


def test_a_hole_drops_one_dflash_label_and_the_rest_of_a_dspark_block():
    mask = np.array([1, 1, 1, 0, 1, 1, 1, 1], bool)
    _, weights = tiny.dflash(block_size=6).labels(tiny.batch([1], 8, loss_mask=mask))
    assert weights[0, 0].tolist() == [0, 1, 0, 1, 1, 1]
    _, _, supervised, _ = tiny.dspark(block_size=5).labels(tiny.batch([1], 8, loss_mask=mask))
    assert supervised[0, 0].tolist() == [True, False, False, False, False]


def test_decay_starts_at_the_first_proposal():
    """DFlash: exp(-max(j - 1, 0) / gamma), so row 1 weighs 1; DSpark: slot 0 weighs 1."""
    expected = np.exp(-np.arange(4) / 7.0)
    np.testing.assert_allclose(losses.position_decay(4, 7.0), expected, rtol=1e-6)
    np.testing.assert_array_equal(losses.position_decay(3, None), 1.0)
    drafter = tiny.dflash(DFlashObjective(gamma=7.0), block_size=5)
    params, data = tiny.random_params(drafter), tiny.batch([2], 12)
    terms = jax.jit(lambda p: drafter.loss(p, tiny.shared(), data, KEY))(params)
    assert float(terms["ce"][1]) == pytest.approx(expected.sum())


def test_teacher_of_a_label_is_the_row_before_it_and_confidence_reads_the_previous_token():
    drafter = tiny.dspark()
    labels, prev, _, teacher = drafter.labels(tiny.batch([3], LENGTH))
    ids = np.asarray(tiny.batch([3], LENGTH).input_ids[0])
    np.testing.assert_array_equal(labels[0, 0], ids[4:8])
    np.testing.assert_array_equal(prev[0, 0], ids[3:7])
    np.testing.assert_array_equal(teacher[0, 0], [3, 4, 5, 6])


def test_dspark_ce_only_never_touches_the_teacher():
    objective = DSparkObjective(ce_alpha=1.0, l1_alpha=0.0, confidence_alpha=0.0)
    drafter = tiny.dspark(confidence=False, objective=objective)
    assert not drafter.needs_teacher
    params, shared = tiny.random_params(drafter), tiny.shared()
    poisoned = dataclasses.replace(batch(), teacher_hidden=jnp.full((2, LENGTH, tiny.HIDDEN), jnp.nan))
    run = jax.jit(lambda p, data: drafter.objective(drafter.loss(p, shared, data, KEY)))
    with_junk, without = float(run(params, poisoned)), float(run(params, batch(teacher=False)))
    assert with_junk == without and np.isfinite(without)


@pytest.mark.parametrize("objective", [DSparkObjective(confidence_alpha=0.0), DSparkObjective(l1_alpha=0.0)])
def test_missing_teacher_is_named(objective):
    drafter = tiny.dspark(objective=objective)
    assert drafter.needs_teacher
    with pytest.raises(ConfigError, match="teacher_hidden"):
        jax.eval_shape(lambda p: drafter.loss(p, tiny.shared(), batch(teacher=False), KEY), drafter.abstract_params())


@pytest.mark.ci
def test_gradients_flow_through_l1_and_confidence_but_not_through_the_confidences_label():
    """Confidence alone moves W1 and the backbone, not the correction W2: only its label depends on that."""
    shared, data = tiny.shared(), batch()

    def grads(**alphas):
        drafter = tiny.dspark(objective=DSparkObjective(**alphas))
        return jax.jit(jax.grad(objective_of(drafter, shared, data)))(tiny.random_params(drafter))

    size = lambda x: float(np.abs(np.asarray(x)).max())  # noqa: E731
    only = grads(ce_alpha=0.0, l1_alpha=0.0, confidence_alpha=1.0)
    assert size(only["markov_head"]["markov_w2"]["weight"]) == 0.0
    assert min(size(only["markov_head"]["markov_w1"]["weight"]), size(only["fc"]["weight"])) > 0
    only = grads(ce_alpha=0.0, l1_alpha=1.0, confidence_alpha=0.0)
    assert (
        size(only["markov_head"]["markov_w2"]["weight"]) > 0 and size(only["confidence_head"]["proj"]["weight"]) == 0.0
    )


def test_dpace_weights_are_detached():
    nll, mask = jnp.asarray([[[0.5, 1.0, 0.2]]]), jnp.ones((1, 1, 3))
    for kind in losses.DPACE:
        grad = jax.grad(lambda x, kind=kind: jnp.sum(losses.dpace_weights(x, mask, 0.5, kind)))(nll)
        np.testing.assert_array_equal(grad, 0.0)


def test_B53_nothing_supervised_gives_zero_loss_and_zero_gradients():
    for drafter in (tiny.dflash(), tiny.dspark()):
        data = dataclasses.replace(batch(), loss_mask=jnp.zeros((2, LENGTH), bool))
        value, grads = jax.jit(jax.value_and_grad(objective_of(drafter, tiny.shared(), data)))(
            tiny.random_params(drafter)
        )
        assert float(value) == 0.0
        assert all(np.all(np.asarray(g) == 0.0) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_type": "focal"}, "loss_type.*'focal'"),
        ({"dpace_alpha": 1.5}, "dpace_alpha"),
        ({"dpace_normalizer": "tokens"}, "dpace_normalizer"),
        ({"lk": "beta"}, "lk.*'beta'"),
    ],
)
def test_wrong_objectives_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        DFlashObjective(**changes)


def test_lk_total_variation_matches_the_published_example():
    """Expected acceptance is sum min(p, q): [.7, .3] against [.6, .4] gives .9, so half the L1 distance is .1."""
    p, q = np.array([0.7, 0.3]), np.array([0.6, 0.4])
    assert np.minimum(p, q).sum() == pytest.approx(1 - 0.5 * np.abs(p - q).sum()) == pytest.approx(0.9)
