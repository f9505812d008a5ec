"""DFlash 2's objective: strict top-K, one weight sum, alpha's schedule, stop-gradient, metrics, and whole runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.config import TrainConfig, load_config
from jaxspec.drafters import losses
from jaxspec.drafters.dflash2 import DFlash2Objective
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.training import main
from jaxspec.training.build import fresh_drafter, warm_start
from tests.drafters import family, tiny
from tests.training import world

pytestmark = pytest.mark.ci

ANCHORS = [[0, 3, 7, 11], [2, 5, 11, 12]]


def objective(**changes):
    return DFlash2Objective(**{"gamma": 2.0, **changes})


def step(drafter, batch=None, params=None):
    params = tiny.random_params(drafter) if params is None else params
    return family.terms(drafter, params, tiny.shared(), batch if batch is not None else tiny.batch(ANCHORS))


def naive(drafter, batch):
    """The objective's sums from `trace`, position by position."""
    params, shared = tiny.random_params(drafter), tiny.shared()
    trace = {
        name: np.asarray(x, np.float64)
        for name, x in jax.jit(lambda p: drafter.trace(p, shared, batch))(params).items()
    }
    ids, target = trace["candidate_ids"].astype(int), trace["target_ids"].astype(int)
    sums = dict.fromkeys(("ce", "selector", "weight", "covered", "right", "mask"), 0.0)
    for b, n, j in np.ndindex(target.shape):
        if j == 0 or not trace["weight_mask"][b, n, j]:
            continue
        weight = np.exp(-(j - 1) / drafter.objective_config.gamma)
        sums["mask"] += 1
        sums["weight"] += weight
        sums["ce"] += weight * trace["neg_log_q"][b, n, j]
        found = np.flatnonzero(ids[b, n, j] == target[b, n, j])
        if found.size:
            scores = trace["selector_scores"][b, n, j]
            sums["covered"] += 1
            sums["selector"] += weight * (np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[found[0]])
            sums["right"] += float(scores.argmax() == found[0])
    return sums


def test_both_terms_are_divided_by_the_base_weight_sum_and_only_covered_labels_reach_the_selector():
    drafter = family.dflash2(objective(selector_alpha=0.5), paths=family.SelectorConfig(4, 6))
    mask = np.ones((2, 14), bool)
    mask[0, 4] = False
    batch = tiny.batch(ANCHORS, loss_mask=mask, keep=[[True] * 4, [True, True, True, False]])
    sums = naive(drafter, batch)
    value, terms, _ = step(drafter, batch)
    assert 0 < sums["covered"] < sums["mask"]
    assert value == pytest.approx((sums["ce"] + 0.5 * sums["selector"]) / sums["weight"], rel=1e-4)
    for name, number, weight in (
        ("ce", sums["ce"], sums["weight"]),
        ("selector", sums["selector"], sums["weight"]),
        ("metric/selector_coverage", sums["covered"], sums["mask"]),
    ):
        assert float(terms[name][0]) == pytest.approx(number, rel=1e-4), name
        assert float(terms[name][1]) == pytest.approx(weight, rel=1e-5), name
    right, covered = terms["metric/selector_conditional_accuracy_position"]
    assert float(right.sum()) == sums["right"] and float(covered.sum()) == sums["covered"]


def test_a_label_outside_the_strict_candidates_counts_in_the_denominator_only():
    """The label's head row points away from everything: it is nowhere among the candidates, and is not injected."""
    drafter, shared, batch = family.dflash2(), tiny.shared(), tiny.batch([[3]], 8)
    params = tiny.random_params(drafter)
    hidden = jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params)[0, 0, 1:]
    labels = np.asarray(batch.input_ids[0, 4:7])
    away = shared.head.at[jnp.asarray(labels)].set(-jnp.sum(hidden, axis=0))
    _, terms, grads = family.terms(drafter, params, dataclasses.replace(shared, head=away), batch)
    assert float(terms["selector"][0]) == 0 and float(terms["metric/selector_ce"][1]) == 0
    assert float(terms["selector"][1]) == float(terms["ce"][1]) > 0
    assert not any(np.any(grad) for grad in jax.tree.leaves(grads["candidate_selector"]))
    _, terms, grads = step(family.dflash2(paths=family.SelectorConfig(4, tiny.VOCAB)), batch)
    assert float(terms["metric/selector_coverage"][0]) == 3  # K = V covers everything
    assert all(np.any(grad) for grad in jax.tree.leaves(grads["candidate_selector"]))


def test_dpace_weights_scale_both_terms():
    drafter = family.dflash2(
        objective(loss_type="dpace-cumulative-confidence-only"), paths=family.SelectorConfig(4, 16)
    )
    batch = tiny.batch([[3]], 8)
    params, shared = tiny.random_params(drafter), tiny.shared()
    trace = jax.jit(lambda p: drafter.trace(p, shared, batch))(params)
    nll = np.asarray(trace["neg_log_q"], np.float64)[0, 0, 1:]
    weights = np.cumprod(0.5 * np.exp(-nll) + 0.5)
    _, terms, _ = step(drafter, batch, params)
    assert float(terms["ce"][0]) == pytest.approx((weights * nll).sum(), rel=1e-5)
    match = np.asarray(trace["candidate_ids"])[0, 0, 1:] == np.asarray(trace["target_ids"])[0, 0, 1:, None]
    scores = np.asarray(trace["selector_scores"], np.float64)[0, 0, 1:]
    each = np.log(np.exp(scores).sum(-1)) - (scores * match).sum(-1)
    assert match.any()
    assert float(terms["selector"][0]) == pytest.approx((weights * each * match.any(-1)).sum(), rel=1e-4)


@pytest.mark.parametrize("lk", ["tv", "lambda"])
def test_the_selector_keeps_its_cross_entropy_whatever_the_base_loss_is(lk):
    drafter = family.dflash2(objective(lk=lk, kl_decay=3.0, selector_alpha=0.7))
    value, terms, _ = step(drafter)
    ce, tv, paths = (float(losses.ratio(*terms[name])) for name in ("ce", "tv", "selector"))
    hit = float(losses.ratio(*terms["metric/target_probability"]))
    share = 0.0 if lk == "tv" else np.exp(-3.0 * hit)
    assert value == pytest.approx(share * ce + (1 - share) * tv + 0.7 * paths, rel=1e-5)


def test_alpha_zero_leaves_the_selector_out_of_the_program():
    frozen, plain = family.dflash2(objective(selector_alpha=0.0)), family.dflash2()
    value, terms, grads = step(frozen)
    _, with_selector, _ = step(plain)
    assert not any("selector" in name for name in terms)
    assert value == pytest.approx(float(losses.ratio(*with_selector["ce"])), rel=1e-6)
    assert not any(np.any(grad) for grad in jax.tree.leaves(grads["candidate_selector"]))
    program = str(
        jax.make_jaxpr(lambda p: frozen.loss(p, tiny.shared(), tiny.batch(ANCHORS), jax.random.key(0)))(
            tiny.random_params(frozen)
        )
    )
    assert "top_k" not in program


@pytest.mark.parametrize(
    ("warmup", "ramp", "expected"),
    [(0.0, 0.0, [2, 2, 2, 2]), (0.5, 0.0, [0, 0, 2, 2]), (0.25, 0.5, [0, 0, 1, 2]), (0.0, 0.5, [0, 1, 2, 2])],
)
def test_alpha_is_zero_through_the_warm_up_and_then_grows_linearly(warmup, ramp, expected):
    """At shares 0, 1/4, 1/2 and 1 of the optimizer steps."""
    schedule = objective(selector_alpha=2.0, selector_warmup_ratio=warmup, selector_ramp_ratio=ramp)
    found = [float(schedule.alpha(jnp.float32(share))) for share in (0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx(expected)
    drafter = family.dflash2(schedule)
    batch = dataclasses.replace(tiny.batch(ANCHORS), progress=jnp.float32(0.5))
    value, terms, _ = step(drafter, batch)
    ce, paths = (float(losses.ratio(*terms[name])) for name in ("ce", "selector"))
    assert value == pytest.approx(ce + expected[2] * paths, rel=1e-5)


def test_a_schedule_without_the_runs_progress_is_an_error():
    drafter = family.dflash2(objective(selector_warmup_ratio=0.1))
    with pytest.raises(ConfigError, match="progress"):
        step(drafter)


def test_stop_gradient_keeps_the_selectors_loss_off_the_backbone():
    plain = family.dflash2(objective(selector_alpha=3.0))
    stopped = family.dflash2(objective(selector_alpha=3.0, selector_stop_gradient=True))
    base = family.dflash2(objective(selector_alpha=0.0))
    value, _, with_selector = step(plain)
    same, _, kept = step(stopped)
    _, _, alone = step(base)
    assert same == pytest.approx(value, rel=1e-6)  # only gradients differ
    moved = []
    for name, grad in ly.flatten(kept).items():
        if name.startswith("candidate_selector"):
            family.assert_close(grad, ly.flatten(with_selector)[name], name)
        else:
            family.assert_close(grad, ly.flatten(alone)[name], name)
            moved.append(not np.allclose(ly.flatten(with_selector)[name], grad, rtol=1e-2))
    assert all(moved)


def test_chunks_change_nothing():
    whole, slices = (family.dflash2(objective(chunk_blocks=chunk)) for chunk in (0, 3))
    value, terms, grads = step(whole)
    other, other_terms, other_grads = step(slices)
    assert other == pytest.approx(value, rel=1e-6)
    for name, pair in terms.items():
        np.testing.assert_allclose(other_terms[name][0], pair[0], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(other_terms[name][1], pair[1], rtol=1e-5, err_msg=name)
    for name, grad in ly.flatten(grads).items():
        family.assert_close(ly.flatten(other_grads)[name], grad, name)


def test_B38_lengths_count_the_committed_tokens_of_a_block_up_to_the_first_unsupervised_row():
    """Two blocks of 3 proposals and one that is not supervised at all."""
    drafter = family.dflash2()
    mask = jnp.asarray([[[1.0, 1, 1], [1, 1, 0], [0, 0, 0]]])
    covered = jnp.asarray([[[1.0, 1, 0], [0, 1, 1], [1, 1, 1]]])
    served = jnp.asarray([[[1.0, 0, 1], [0, 1, 1], [1, 1, 1]]])
    chance = jnp.asarray([[[0.5, 0.5, 0.5], [0.25, 1.0, 1.0], [1, 1, 1]]])
    found = {
        "nll": -jnp.log(chance), "selector_nll": jnp.zeros((1, 3, 3)), "covered": covered, "selected": served,
        "served": served,
    }  # fmt: skip
    terms = drafter.selector_terms(found, mask, mask, jnp.sum(mask), tiny.batch([[1, 2, 3]]))
    assert [float(x) for x in terms["metric/oracle_length"]] == [4.0, 2.0]  # 3 and 1
    assert [float(x) for x in terms["metric/served_length"]] == [3.0, 2.0]  # 2 and 1
    assert [float(x) for x in terms["metric/expected_length"]] == pytest.approx([1.875 + 1.5, 2.0])
    assert [float(x) for x in terms["metric/selector_coverage"]] == [3.0, 5.0]


def test_the_metric_of_served_length_is_the_path_that_serving_takes():
    """K = V and a strong selector, so that the path is not the unary one."""
    drafter, shared, batch = family.dflash2(paths=family.SelectorConfig(4, 6)), tiny.shared(), tiny.batch(ANCHORS)
    params = tiny.random_params(drafter, scale=0.5)
    trace = jax.jit(lambda p: drafter.trace(p, shared, batch))(params)
    labels, mask = np.asarray(trace["target_ids"])[:, :, 1:], np.asarray(trace["weight_mask"])[:, :, 1:]
    path = np.asarray(trace["greedy_path"]).reshape(labels.shape)
    runs = 1 + np.cumprod((path == labels) * mask, -1).sum(-1)
    _, terms, _ = step(drafter, batch, params)
    total, blocks = terms["metric/served_length"]
    assert float(blocks) == mask.any(-1).sum() and float(total) == pytest.approx((runs * mask.any(-1)).sum())


# -- whole runs -------------------------------------------------------------------------------------------------------

SIZES = {"drafter__conv_group_size": 4, "drafter__selector_rank": 4, "drafter__selector_top_k": 8}


def run(tmp_path, method, data, **changes):
    config = world.config(tmp_path / "run", data, method, **{"run__steps": 30, "run__log_every": 5, **changes})
    return main.run(config, target=world.target())


def lines(tmp_path):
    import json

    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_B43_a_run_trains_logs_exports_and_reloads_bit_for_bit(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    report = run(
        tmp_path, "dflash2", data, **SIZES, objective__selector_warmup_ratio=0.2, objective__selector_ramp_ratio=0.4
    )
    log = lines(tmp_path)
    assert log[-1]["loss/ce"] < log[0]["loss/ce"]
    alphas = [line["selector_alpha"] for line in log]  # windows of 5 of 30 steps; 6 of warm-up, 12 of ramp
    assert alphas[0] == 0 and alphas[-1] == 1 and sorted(alphas) == alphas
    assert {"selector_coverage", "served_length", "oracle_length", "expected_length", "selector_accuracy"} <= log[
        -1
    ].keys()
    target = world.target()
    loaded = load_drafter(report["export"], target)
    assert loaded.drafter.method == "dflash2" and loaded.drafter.selector.top_k == 8
    save_drafter(tmp_path / "again", Draft(loaded.drafter, loaded.params))
    again = load_drafter(tmp_path / "again", target)
    batch = dataclasses.replace(
        tiny.batch([[1, 4]], 9), input_ids=jnp.ones((1, 9), jnp.int32), features=family.random_rows(0, 1, 9, 32)
    )
    forward = jax.jit(lambda p: loaded.drafter.trace(p, loaded.shared(target), batch))
    one, other = forward(loaded.params), forward(again.params)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
    assert np.any(loaded.params["candidate_selector"]["successor_codebook"])


@pytest.mark.parametrize("broken", ["missing", "extra", "renamed", "shape"])
def test_B43_a_wrong_tensor_is_an_error_that_names_it(tmp_path, broken):
    from safetensors.numpy import load_file, save_file

    from jaxspec.errors import CheckpointError

    target = world.target()
    config = load_config(TrainConfig, None, [
        "target.source=x", "drafter.method=dflash2", "drafter.num_layers=1", "drafter.mask_token_id=39",
        "drafter.target_layer_ids=[0,1]", "data.path=x", "run.directory=x", "run.steps=1",
    ])  # fmt: skip
    drafter = fresh_drafter(config, target.config)
    save_drafter(tmp_path / "draft", Draft(drafter, drafter.init(jax.random.key(0))))
    file, name = tmp_path / "draft" / "model.safetensors", "candidate_selector.predecessor_codebook"
    tensors = load_file(file)
    value = tensors.pop(name)
    tensors |= {
        "missing": {}, "extra": {name: value, "candidate_selector.bias": value[0]},
        "renamed": {name + ".weight": value}, "shape": {name: value[1:].copy()},
    }[broken]  # fmt: skip
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"candidate_selector\.(predecessor_codebook|bias)"):
        load_drafter(tmp_path / "draft", target)


def test_a_run_from_a_dflash_checkpoint_starts_where_it_ended(tmp_path):
    """Nothing changes at step 0, bit for bit; then it trains on, and exports a DFlash 2."""
    data, target = world.write_data(tmp_path / "data.npz"), world.target()
    source = run(tmp_path / "first", "dflash", data, run__steps=5)["export"]
    changes = {**SIZES, "drafter__source": str(source)}
    config = world.config(tmp_path / "run", data, "dflash2", **changes)
    before = load_drafter(source, target)
    warm = warm_start(config, before)
    batch = dataclasses.replace(
        tiny.batch([[1, 4]], 9), input_ids=jnp.ones((1, 9), jnp.int32), features=family.random_rows(0, 1, 9, 32)
    )
    hidden = [
        jax.jit(lambda p, d=draft: d.drafter.training_hidden(p, d.shared(target), batch))(draft.params)
        for draft in (before, warm)
    ]
    np.testing.assert_array_equal(*hidden)
    report = run(tmp_path, "dflash2", data, **changes)
    loaded = load_drafter(report["export"], target)
    assert (
        loaded.drafter.method == "dflash2"
        and drafter_from_hf(loaded.drafter.to_hf(), target.config).conv.group_size == 4
    )
    with pytest.raises(ConfigError, match=r"drafter\.sample_from_anchor"):  # a DSpark's rows are the anchor's too
        warm_start(world.config(tmp_path / "run", data, "dspark", drafter__source="x"), before)


# -- configuration ----------------------------------------------------------------------------------------------------

BASE = ["target.source=smollm2", "data.path=a.npz", "run.directory=out/run", "run.steps=3", "drafter.method=dflash2"]


def test_defaults_of_dflash2():
    config = load_config(TrainConfig, None, BASE)
    drafter, loss = config.drafter, config.objective
    assert (drafter.conv_kernel_size, drafter.conv_group_size, drafter.selector_rank, drafter.selector_top_k) == (
        2,
        16,
        256,
        16,
    )
    assert drafter.is_causal is False and drafter.block_size == 16
    assert (loss.gamma, loss.selector_alpha, loss.selector_warmup_ratio, loss.selector_stop_gradient) == (
        7.0,
        1.0,
        0.0,
        False,
    )
    dflash = load_config(TrainConfig, None, [*BASE[:-1], "drafter.method=dflash"])
    assert (dflash.drafter.selector_top_k, dflash.objective.selector_alpha, dflash.drafter.is_causal) == (0, 0.0, None)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["drafter.method=dflash", "drafter.selector_rank=4"], ("drafter.method", "drafter.selector_rank")),
        (["drafter.method=dspark", "drafter.conv_group_size=4"], ("drafter.method", "drafter.conv_group_size")),
        (["drafter.method=dflash", "objective.selector_alpha=1.0"], ("drafter.method", "objective.selector_alpha")),
        (["drafter.conv_kernel_size=9", "drafter.block_size=8"], ("drafter.conv_kernel_size", "drafter.block_size")),
        (["drafter.selector_top_k=0"], ("drafter.method", "drafter.selector_top_k")),
        (["drafter.markov_rank=8"], ("drafter.method", "drafter.markov_rank")),
        (["objective.selector_alpha=0.0", "objective.selector_ramp_ratio=0.1"],
         ("objective.selector_ramp_ratio", "objective.selector_alpha")),
        (["objective.selector_alpha=0.0", "optimizer.weight_decay=0.1"],
         ("optimizer.weight_decay", "objective.selector_alpha")),
        (["objective.l1_alpha=0.5"], ("drafter.method", "objective.l1_alpha")),
        (["run.steps=null", "run.seconds=5.0", "optimizer.schedule=constant", "optimizer.warmup_ratio=0.0",
          "objective.selector_warmup_ratio=0.1"], ("objective.selector_warmup_ratio", "run.steps")),
        (["drafter.method=dspark", "objective.gamma_per_epoch=0.5"], ("drafter.method", "objective.gamma_per_epoch")),
        (["objective.gamma=null", "objective.gamma_per_epoch=0.5"], ("objective.gamma_per_epoch", "objective.gamma")),
    ],
)  # fmt: skip
def test_contradictory_keys_are_refused_by_name(overrides, names):
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, None, [*BASE, *overrides])
    assert all(name in str(caught.value) for name in names), str(caught.value)
