"""The compiled step: accumulation, empty batches, devices, schedules, leaks, ahead-of-time compilation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.config import OptimizerSection
from jaxspec.drafters.base import Batch, Shared
from jaxspec.models.layers import stack_layers
from jaxspec.training import optimizer as opt
from jaxspec.training.build import fresh_drafter, initial_params
from jaxspec.training.features import capture
from jaxspec.training.state import Placement, create
from jaxspec.training.step import Frozen, StepSpec, compile_step, gradients, train_step
from tests.helpers.guards import no_compiles, no_implicit_transfers
from tests.helpers.process import run_on_devices
from tests.training import world


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A drafter with two parameters. Its two terms have different weights and its objective is not linear in them."""

    taps: tuple = ()
    needs_teacher: bool = False

    def loss(self, params, shared, batch, key):
        mask = batch.loss_mask.astype(jnp.float32)
        values = params["w"] * batch.features[..., 0] + params["v"] ** 2
        return {
            "a": (jnp.sum(jnp.where(mask > 0, values, 0.0)), jnp.sum(mask)),
            "b": (jnp.sum(jnp.where(mask > 0, values**2, 0.0)), jnp.sum(mask) + mask.shape[0]),
            "metric/count": (jnp.sum(batch.loss_mask), jnp.sum(batch.loss_mask)),
        }

    def objective(self, terms):
        ratio = {name: total / jnp.maximum(weight, 1.0) for name, (total, weight) in terms.items()}
        return ratio["a"] + jnp.log1p(ratio["b"]) * ratio["metric/count"]


def scalar_batch(mask):
    mask = jnp.asarray(mask)
    features = jnp.linspace(-1, 2, mask.size).reshape(*mask.shape, 1)
    none = jnp.zeros((*mask.shape[:-1], 0), jnp.int32)
    return Batch(jnp.zeros(mask.shape, jnp.int32), mask, features, none, none.astype(bool))


@pytest.mark.ci
def test_B53_one_and_ninety_nine_supervised_tokens_weigh_the_same_under_accumulation():
    mask = np.zeros((2, 100), bool)
    mask[0, 50], mask[1, 1:] = True, True
    whole = scalar_batch(mask)
    params = {"w": jnp.float32(0.7), "v": jnp.float32(-0.3)}
    shared = Shared(jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    one = jax.tree.map(lambda leaf: leaf[None], whole)
    two = jax.tree.map(lambda leaf: leaf[:, None], whole)
    loss, terms, grads = gradients(Scalar(), params, shared, one, jax.random.split(jax.random.key(0), 1))
    loss2, terms2, grads2 = gradients(Scalar(), params, shared, two, jax.random.split(jax.random.key(0), 2))
    np.testing.assert_allclose(loss, loss2, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (terms, grads), (terms2, grads2))
    halves = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1, None], whole) for i in (0, 1)]
    keys = jax.random.split(jax.random.key(0), 1)
    means = [gradients(Scalar(), params, shared, half, keys)[2]["w"] for half in halves]
    assert abs(np.mean(means) - grads["w"]) > 0.05, "the case would not notice averaged micro-batches"


def make_spec(method="dflash", num_anchors=5, **changes):
    config = world.config("unused", "unused", method, **changes)
    drafter = fresh_drafter(config, world.MODEL)
    return StepSpec(
        world.target().model,
        drafter,
        opt.build(config.optimizer),
        opt.schedule(config.optimizer, 10),
        num_anchors,
        block_size=4,
    )


def make_world(spec):
    target = world.target()
    state = create(initial_params(spec.drafter, jax.random.key(1), jnp.float32), spec.optimizer, jax.random.key(5))
    return state, Frozen(stack_layers(target.params), Shared(target.embedding, target.head))


def make_batch(rows=4, length=16, micro=1, mask=True, seed=0):
    ids = np.random.default_rng(seed).integers(2, world.MASK_ID, (micro, rows // micro, length)).astype(np.int32)
    numbers = np.arange(rows, dtype=np.int32).reshape(micro, -1)
    return {
        "input_ids": ids,
        "loss_mask": np.full(ids.shape, mask),
        "example_ids": numbers,
        "epochs": np.zeros_like(numbers),
    }


def compiled(spec, state, frozen, batch):
    placement = Placement.of()
    step = compile_step(spec, state, frozen, batch, placement)
    frozen = jax.device_put(frozen, placement.replicated)
    return lambda now, data: step(now, frozen, placement.put_batch(data))


@pytest.mark.parametrize("method", ["dflash", pytest.param("dspark", marks=pytest.mark.ci)])
@pytest.mark.ci
def test_B53_empty_batch_has_loss_zero_changes_nothing_and_is_counted(method):
    spec = make_spec(method)
    state, frozen = make_world(spec)
    step = compiled(spec, state, frozen, make_batch())
    state = jax.device_put(state, Placement.of().replicated)
    state, metrics = step(state, make_batch())
    assert float(metrics["loss"]) > 0 and float(metrics["grad_norm"]) > 0 and int(metrics["skipped"]) == 0
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = step(state, make_batch(mask=False))
    assert float(metrics["loss"]) == 0 == float(metrics["grad_norm"]) and int(metrics["anchors"]) == 0
    assert (int(state.step), int(state.skipped), int(state.nonfinite)) == (2, 1, 0)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (state.params, state.opt_state)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics["terms"]))


@pytest.mark.ci
def test_gradients_that_are_no_numbers_change_nothing_and_are_counted():
    spec = make_spec()
    state, frozen = make_world(spec)
    bad = dataclasses.replace(frozen, shared=Shared(frozen.shared.embedding, frozen.shared.head * jnp.nan))
    after, metrics = jax.jit(lambda *xs: train_step(spec, *xs))(state, bad, make_batch())
    assert (int(after.step), int(after.skipped), int(after.nonfinite)) == (1, 0, 1) and not np.isfinite(
        metrics["grad_norm"]
    )
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (after.params, after.opt_state))


@pytest.mark.ci
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(method):
    spec = make_spec(method)
    state, frozen = make_world(spec)
    whole, halves = make_batch(), make_batch(micro=2)
    whole["loss_mask"][0, 0, 3:] = halves["loss_mask"][0, 0, 3:] = (
        False  # one row has 3 supervised tokens, the others 16
    )
    results = [jax.jit(lambda *xs: train_step(spec, *xs))(state, frozen, batch) for batch in (whole, halves)]
    (one, first), (two, second) = results
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-5)
    np.testing.assert_allclose(first["grad_norm"], second["grad_norm"], rtol=1e-4)
    moments = [state.opt_state[1].mu for state in (one, two)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), *moments)


def test_B66_steps_neither_compile_nor_copy_behind_our_back():
    spec = make_spec()
    state, frozen = make_world(spec)
    step = compiled(spec, state, frozen, make_batch())
    state = jax.device_put(state, Placement.of().replicated)
    state, _ = step(state, make_batch())
    with no_compiles(), no_implicit_transfers():
        for seed in range(3):
            state, metrics = step(state, make_batch(seed=seed))
    with pytest.raises((TypeError, ValueError)):
        step(state, make_batch(rows=2))
    assert int(state.step) == 4 and jax.tree.leaves(metrics)


@pytest.mark.ci
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7])
def test_B55_lengths_around_the_block(length):
    spec = make_spec()
    state, frozen = make_world(spec)
    batch = make_batch(length=length)
    batch["loss_mask"][0, 0, :-1] = False  # supervised span of one token, at the end
    after, metrics = jax.jit(lambda *xs: train_step(spec, *xs))(state, frozen, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after.params, metrics)))
    total = sum(min(length - 1, 5) for _ in range(3))
    assert int(metrics["anchors"]) == total and int(after.skipped) == (total == 0)


def test_padding_does_not_reach_real_rows():
    """Longer padding, and other ids in it, leave the features of the real rows as they are."""
    spec = make_spec()
    target = world.target()
    ids = jnp.asarray(make_batch()["input_ids"][0])
    stacked = stack_layers(target.params)
    short, _ = capture(target.model, spec.drafter, stacked, ids, jnp.float32)
    for filler in (0, 7):
        padded = jnp.pad(ids, ((0, 0), (0, 8)), constant_values=filler)
        long, teacher = capture(target.model, spec.drafter, stacked, padded, jnp.float32)
        np.testing.assert_allclose(long[:, :16], short, atol=1e-6)
        assert teacher is None


def test_no_gradient_reaches_the_target():
    spec = make_spec()
    target = world.target()
    ids = jnp.asarray(make_batch()["input_ids"][0])
    grads = jax.grad(lambda p: capture(target.model, spec.drafter, p, ids, jnp.float32)[0].sum())(
        stack_layers(target.params)
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.ci
def test_features_reach_the_drafter_from_both_taps_and_in_order():
    spec = make_spec()
    target = world.target()
    ids = jnp.asarray(make_batch()["input_ids"][0])
    both, _ = capture(target.model, spec.drafter, stack_layers(target.params), ids, jnp.bfloat16)
    assert both.dtype == jnp.bfloat16
    apart = [target.model.forward_sequences(target.params, ids, (tap,)).features for tap in (0, 1)]
    np.testing.assert_allclose(both.astype(np.float32), jnp.concatenate(apart, -1), atol=2e-2)


RATES = {"learning_rate": 1.0, "warmup_ratio": 0.2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup_offset": 1, "schedule": "constant"}, [0.5, 1, 1, 1]),
        ({"warmup_offset": 0, "schedule": "constant"}, [0, 0.5, 1, 1]),
        ({"warmup_offset": 1, "schedule": "cosine"}, [0.5, 1, 1, 0.5 * (1 + math.cos(math.pi / 8))]),
        ({"warmup_ratio": 0.0, "schedule": "cosine"}, [1, 0.5 * (1 + math.cos(math.pi / 10))]),
    ],
)
def test_learning_rate_by_step(changes, expected):
    rate = opt.schedule(OptimizerSection(**{**RATES, **changes}), 10)
    found = [float(rate(jnp.int32(step))) for step in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if changes["schedule"] == "cosine":
        assert float(rate(jnp.int32(10))) == 0 and 0 < float(rate(jnp.int32(9))) < 0.05


def test_clipping_has_the_recipes_epsilon():
    clip = opt.clip_by_global_norm(1.0)
    small, large = {"x": jnp.array([0.3, 0.4])}, {"x": jnp.array([3.0, 4.0])}
    np.testing.assert_array_equal(clip.update(small, None)[0]["x"], small["x"])
    np.testing.assert_array_equal(clip.update(large, None)[0]["x"], large["x"] * np.float32(1 / (5 + 1e-6)))
    tiny = opt.clip_by_global_norm(1e-6)
    np.testing.assert_allclose(tiny.update({"x": jnp.array([1e-6, 0.0])}, None)[0]["x"], [5e-7, 0], rtol=1e-5)


def test_update_equals_adamw():
    config = OptimizerSection(learning_rate=0.1, weight_decay=0.01, clip_norm=1e9)
    params = {"x": jnp.array([1.0, -2.0])}
    ours, theirs = opt.build(config), optax.adamw(0.1, 0.9, 0.999, 1e-8, weight_decay=0.01)
    mine, other, state, state2 = params, params, ours.init(params), theirs.init(params)
    for step in range(4):
        grads = {"x": jnp.array([0.5, -1.0]) * (step + 1)}
        mine, state = opt.apply(ours, grads, state, mine, jnp.float32(0.1))
        updates, state2 = theirs.update(grads, state2, other)
        other = optax.apply_updates(other, updates)
    np.testing.assert_allclose(mine["x"], other["x"], rtol=1e-6)


@pytest.mark.ci
def test_masters_are_float32_whatever_the_compute_dtype():
    spec = dataclasses.replace(make_spec(), dtype=jnp.bfloat16)
    state, frozen = make_world(spec)
    after, _ = jax.jit(lambda *xs: train_step(spec, *xs))(state, frozen, make_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves((after.params, after.opt_state[1].mu))} == {jnp.dtype("float32")}
    moved = after.params["fc"]["weight"] - state.params["fc"]["weight"]
    assert 0 < float(jnp.abs(moved).max()) <= 1.01 * float(spec.learning_rate(jnp.int32(0)))


@pytest.mark.ci
def test_B68_anchors_and_losses_are_equal_for_one_two_and_four_devices():
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jaxspec.training.state import Placement
        from jaxspec.training.step import compile_step
        from tests.training.test_step import make_batch, make_spec, make_world
        spec = make_spec()
        batch, results = make_batch(rows=8), []
        batch["loss_mask"][0, 0, 2:] = False  # unequal supervision on the shards
        for count in (1, 2, 4):
            placement = Placement.of(jax.devices()[:count])
            state, frozen = jax.device_put(make_world(spec), placement.replicated)
            step = compile_step(spec, state, frozen, batch, placement)
            for _ in range(3):
                state, metrics = step(state, frozen, placement.put_batch(batch))
            results.append(jax.tree.map(np.asarray, (metrics, state.params)))
        one, two, four = results
        for other in (two, four):
            assert int(other[0]["anchors"]) == int(one[0]["anchors"]) == 7 * 5 + 1
            assert abs(float(other[0]["loss"]) - float(one[0]["loss"])) < 1e-5
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * 0.03), one[1], other[1])
        print("equal")
    """
    assert run_on_devices(code, 4).split() == ["equal"]


def test_B52_teacher_states_give_the_targets_own_logits():
    spec = make_spec("dspark")
    target = world.target()
    ids = jnp.asarray(make_batch()["input_ids"][0])
    _, teacher = capture(target.model, spec.drafter, stack_layers(target.params), ids, jnp.bfloat16)
    own = target.model.forward_sequences(target.params, ids)
    assert teacher.dtype == jnp.float32  # the drafter's narrow dtype does not touch it
    np.testing.assert_allclose(
        target.model.logits(target.params, teacher), target.model.logits(target.params, own.hidden), atol=1e-5
    )
