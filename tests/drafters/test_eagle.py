"""EAGLE and EAGLE-2: layout, loss, noise, and the same weights under a fixed and a grown tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.drafter import load_drafter, save_drafter
from jaxspec.drafters.base import Rows
from jaxspec.drafters.draft_tree import DynamicTree, StaticTree
from jaxspec.drafters.eagle import Eagle, EagleObjective
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.decoder import FINAL
from jaxspec.models.layout import RaggedLayout, ragged_layout, uniform_layout
from tests.drafters import eagle_pairs as pairs

pytestmark = pytest.mark.ci

TARGET = pairs.target("llama")


def shared_of(drafter: Any) -> Any:
    return pairs.draft(drafter).shared(TARGET)


def batch_of(**changes: Any) -> Any:
    made = pairs.batch(TARGET, taps=(FINAL,), length=9, **changes)
    return dataclasses.replace(made, teacher_hidden=None)


def test_the_config_of_one_llama_layer_is_eagle_and_with_a_draft_vocabulary_eagle3() -> None:
    config = pairs.eagle(TARGET).to_hf()
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 1
    drafter = Eagle.from_hf(config, TARGET.config)
    assert isinstance(drafter, Eagle) and drafter.taps == (FINAL,) and drafter.tree == DynamicTree()
    assert drafter.num_proposals == 8 and drafter.tree_nodes == 59
    three = Eagle.from_hf({**config, "draft_vocab_size": 20, "target_layer_ids": [0, 1]}, TARGET.config)
    assert isinstance(three, Eagle3)
    with pytest.raises(ConfigError, match="num_hidden_layers: found 4, expected the 1 layer"):
        Eagle.from_hf({**config, "num_hidden_layers": 4}, TARGET.config)


@pytest.mark.parametrize("bias", [True, False])
def test_export_and_reload_give_bitwise_equal_logits(bias: bool, tmp_path: Any) -> None:
    made = pairs.draft(pairs.eagle(TARGET, fc_bias=bias))
    folder = save_drafter(tmp_path / "out", dataclasses.replace(made, embedding=TARGET.embedding))
    names = set(load_file(folder / "model.safetensors"))
    assert ("fc.bias" in names) == bias and "embed_tokens.weight" in names
    assert not any("input_layernorm" in name or name.startswith(("norm", "lm_head")) for name in names)
    loaded = load_drafter(folder, TARGET)
    batch = batch_of()
    one, two = (
        np.asarray(jax.jit(draft.drafter.predict)(draft.params, draft.shared(TARGET), batch, batch.features))
        for draft in (made, loaded)
    )
    np.testing.assert_array_equal(one, two)
    assert loaded.embedding is TARGET.embedding


def test_B43_a_missing_bias_is_not_a_zero_bias(tmp_path: Any) -> None:
    folder = save_drafter(tmp_path / "out", pairs.draft(pairs.eagle(TARGET)))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if name != "fc.bias"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: fc\.bias"):
        load_drafter(folder, TARGET)


def test_the_loss_is_smooth_l1_to_the_next_feature_and_the_soft_cross_entropy_of_its_tokens() -> None:
    mask = np.ones((2, 9), bool)
    mask[0, :4], mask[1, 6:] = False, False
    drafter = pairs.eagle(TARGET, objective_config=EagleObjective(noise=0.0, chunk_rows=4))
    params, shared, batch = pairs.params_of(drafter), shared_of(drafter), batch_of(mask=mask)
    found = jax.jit(lambda p: drafter.objective(drafter.loss(p, shared, batch, jax.random.key(0))))(params)
    predicted = np.asarray(jax.jit(drafter.predict)(params, shared, batch, batch.features), np.float64)
    features, head = np.asarray(batch.features, np.float64), np.asarray(shared.head, np.float64)
    feature, token, count = 0.0, 0.0, 0
    for row in range(2):
        for t in np.flatnonzero(mask[row])[:-1]:
            error = np.abs(predicted[row, t] - features[row, t + 1])
            feature += np.where(error < 1, 0.5 * error**2, error - 0.5).mean()
            teacher, logits = head @ features[row, t + 1], head @ predicted[row, t]
            p = np.exp(teacher - teacher.max()) / np.exp(teacher - teacher.max()).sum()
            token -= (p * (logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))).sum()
            count += 1
    expected = (feature + 0.1 * token) / (count + 1e-5)
    assert float(found) == pytest.approx(expected, rel=2e-5)


def test_noise_is_uniform_and_narrower_on_longer_sequences() -> None:
    drafter = pairs.eagle(TARGET, objective_config=EagleObjective(noise=0.2))
    batch = batch_of(mask=np.arange(9) < 4)
    noise = np.asarray(drafter.noisy(batch, jax.random.key(1)) - batch.features)
    width = 0.2 * 512 / 4  # nothing but the loss mask tells the length
    assert np.abs(noise).max() <= width / 2 and np.abs(noise).max() > 0.9 * width / 2
    assert abs(noise.mean()) < 0.05 * width
    known = dataclasses.replace(batch, lengths=jnp.array([8, 8]))
    assert np.abs(np.asarray(drafter.noisy(known, jax.random.key(1)) - batch.features)).max() <= 0.2 * 512 / 16
    quiet = dataclasses.replace(drafter, objective_config=EagleObjective(noise=0.0))
    assert quiet.noisy(batch, jax.random.key(1)) is batch.features


def test_no_gradient_reaches_the_target_through_the_teacher() -> None:
    drafter = pairs.eagle(TARGET)
    params, shared, batch = pairs.params_of(drafter), shared_of(drafter), batch_of()

    def loss(features: Any, teacher: Any) -> Any:
        given = dataclasses.replace(batch, features=jnp.concatenate([features[:, :1], teacher[:, 1:]], axis=1))
        return drafter.objective(drafter.loss(params, shared, given, jax.random.key(0)))

    # the last row is read as a teacher only
    grads = jax.jit(jax.grad(loss, argnums=1))(batch.features, batch.features)
    assert float(jnp.abs(grads[:, -1]).max()) == 0.0 and float(jnp.abs(grads[:, 1]).max()) > 0


@pytest.mark.parametrize("layout_of", [uniform_layout, ragged_layout])
def test_a_request_that_commits_nothing_keeps_its_state(layout_of: Any) -> None:
    """Its next proposal starts from it; neither a neighbour's last row nor a row of padding may take its place."""
    drafter = pairs.eagle(TARGET)
    params, shared, batch = pairs.params_of(drafter), shared_of(drafter), batch_of()
    table, more = jnp.array([[1, 2], [3, 4]]), () if layout_of is uniform_layout else (4,)

    def commit(state: Any, first: list[int], lengths: list[int]) -> Any:
        layout: RaggedLayout = layout_of(jnp.array(first), jnp.array(lengths), table, 4, *more)
        at = (jnp.minimum(layout.requests, 1), layout.positions)
        rows = Rows(batch.features[at], batch.input_ids[at], batch.input_ids[at[0], at[1] + 1])
        return jax.jit(drafter.commit)(params, shared, state, rows, layout)

    state = commit(drafter.init_state(5, 4, jnp.float32, 2), [0, 0], [2, 2])
    before = np.asarray(state.hidden)
    for idle in (0, 1):
        lengths = [1, 1]
        lengths[idle] = 0
        after = np.asarray(commit(state, [2, 2], lengths).hidden)
        np.testing.assert_array_equal(after[idle], before[idle])
        assert np.abs(after[1 - idle] - before[1 - idle]).max() > 1e-3


def test_trees_wider_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="up to 65 children, expected at most the 64"):
        pairs.eagle(TARGET, DynamicTree(65, 2, 70))
    with pytest.raises(ConfigError, match="up to 21 children, expected at most the 20"):
        pairs.eagle3(TARGET, StaticTree(tuple((rank,) for rank in range(21))))
