"""DFlare against an independent NumPy forward (fusion, the context's own projections, one norm), and its recipe."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.config import TrainConfig, load_config
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflare import DFlare, DFlareObjective
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.decoder import Decoder
from jaxspec.training import main
from jaxspec.training.build import fresh_drafter
from pallas_kernels.anchor_attention import reference
from tests.drafters import family, tiny
from tests.drafters.test_train_equals_serve import serve as served_hidden
from tests.helpers import worlds
from tests.oracle import world as oracle
from tests.training import world

pytestmark = pytest.mark.ci

LENGTH = 14


# -- the forward, once more in NumPy ----------------------------------------------------------------------------------


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions, theta):
    """x [rows, heads, D]: pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def naive_block(params, model, features, inputs, anchor, taps):
    """Final-normed hidden states [block, H] of one block behind context rows 0 … anchor - 1 (full attention)."""
    eps, dim, theta = model.rms_norm_eps, model.head_dim, model.rope.theta
    stacked = features[:anchor].reshape(anchor, taps, -1)
    shares = softmax(params["layer_fusion_weights"])
    x, block = inputs, np.arange(len(inputs)) + anchor
    for depth, layer in enumerate(params["layers"]):
        mixed = sum(shares[depth, tap] * stacked[:, tap] for tap in range(taps))
        context = rms(mixed, params["hidden_norm"]["weight"], eps)
        att = layer["self_attn"]
        normed = rms(x, layer["input_layernorm"]["weight"], eps)
        heads = lambda rows, name, att=att: (rows @ att[name]["weight"].T).reshape(len(rows), -1, dim)  # noqa: E731
        q = rope(rms(heads(normed, "q_proj"), att["q_norm"]["weight"], eps), block, theta)
        keys = [
            rope(rms(heads(rows, name), att["k_norm"]["weight"], eps), at, theta)
            for rows, name, at in ((context, "k_proj_target", np.arange(anchor)), (normed, "k_proj", block))
        ]
        k = np.concatenate(keys)
        v = np.concatenate([heads(context, "v_proj_target"), heads(normed, "v_proj")])
        group = q.shape[1] // k.shape[1]
        out = np.stack(
            [softmax(q[:, h] @ k[:, h // group].T / np.sqrt(dim)) @ v[:, h // group] for h in range(q.shape[1])], axis=1
        )
        x = x + out.reshape(len(x), -1) @ att["o_proj"]["weight"].T
        y = rms(x, layer["post_attention_layernorm"]["weight"], eps)
        gate, up = y @ layer["mlp"]["gate_proj"]["weight"].T, y @ layer["mlp"]["up_proj"]["weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down_proj"]["weight"].T
    return rms(x, params["norm"]["weight"], eps)


def material(anchors, drafter=None):
    drafter = drafter or family.dflare()
    return drafter, tiny.random_params(drafter), tiny.shared(), tiny.batch([anchors], LENGTH, taps=len(drafter.taps))


def test_the_forward_equals_an_independent_one_in_training_and_in_serving():
    anchors = [1, 5, 6, LENGTH - 1]
    drafter, params, shared, batch = material(anchors)
    trained = np.asarray(jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params))[0]
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, shared.embedding, batch.features[0]))
    for row, anchor in enumerate(anchors):
        ids = [int(batch.input_ids[0, anchor])] + [tiny.MASK_ID] * 3
        expected = naive_block(wide[0], drafter.config.model, wide[2], wide[1][ids], anchor, taps=3)
        np.testing.assert_allclose(trained[row], expected, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(served_hidden(drafter, params, shared, batch, anchors), trained, atol=1e-5, rtol=1e-5)


def test_B39_each_draft_layer_reads_its_own_mixture_of_the_taps():
    """Layer 0 wholly on tap 2, layer 1 wholly on tap 0: nothing moves with tap 1, the output does with the others."""
    drafter, params, shared, batch = material([6])
    params["layer_fusion_weights"] = jnp.asarray([[-99.0, -99.0, 99.0], [99.0, -99.0, -99.0]])
    run = jax.jit(lambda f: drafter.training_hidden(params, shared, dataclasses.replace(batch, features=f)))
    base = run(batch.features)
    moved = []
    for tap in range(3):
        changed = batch.features.at[..., tap * tiny.HIDDEN : (tap + 1) * tiny.HIDDEN].add(
            1.0 + family.random_rows(tap, tiny.HIDDEN)
        )
        moved.append(float(jnp.max(jnp.abs(run(changed) - base))))
    assert moved[1] == 0 and moved[0] > 1e-2 and moved[2] > 1e-2
    context = drafter.project_context(params, batch.features)
    assert context.shape == (2, 1, LENGTH, tiny.HIDDEN)


def test_B43_tensor_names_and_shapes_are_the_public_ones():
    """DFlash's without fc; 7 layers over 9 taps give fusion weights [7, 9]."""
    drafter = family.dflare()
    shapes = {name: leaf.shape for name, leaf in ly.flatten(drafter.abstract_params()).items()}
    base = {name: leaf.shape for name, leaf in ly.flatten(DFlash(drafter.config).abstract_params()).items()}
    extra = {name: shape for name, shape in shapes.items() if name not in base}
    assert base.keys() - shapes.keys() == {"fc.weight"}
    assert extra == {"layer_fusion_weights": (2, 3)} | {
        f"layers.{layer}.self_attn.{name}_proj_target.weight": (2 * 6, 16) for layer in range(2) for name in "kv"
    }


def test_a_fresh_drafter_favours_the_taps_in_order():
    """7 layers over 9 taps: floor(d / 7 * 9), weight 2 there and 0 elsewhere; everything else as in DFlash."""
    target = dataclasses.replace(tiny.TARGET, num_layers=36, layer_windows=(None,) * 36)
    config = fresh_config(
        target, num_layers=7, block_size=4, mask_token_id=tiny.MASK_ID, target_layer_ids=tuple(range(1, 34, 4))
    )
    params = DFlare(config).init(jax.random.key(0))
    expected = np.zeros((7, 9))
    expected[np.arange(7), [0, 1, 2, 3, 5, 6, 7]] = 2.0
    np.testing.assert_array_equal(params["layer_fusion_weights"], expected)
    assert 0.015 < float(jnp.std(params["layers"][0]["self_attn"]["k_proj_target"]["weight"])) < 0.025
    np.testing.assert_array_equal(params["hidden_norm"]["weight"], 1.0)


def test_published_defaults_of_a_training_run():
    """7 layers, 9 taps 1, 5, … 33 of 36, block 16, old anchor rule, gamma 7 and half a unit more each epoch, + 1e-6."""
    config = load_config(TrainConfig, None, [
        "target.source=x", "data.path=x", "run.directory=x", "run.steps=1", "drafter.method=dflare",
        "drafter.mask_token_id=23",
    ])  # fmt: skip
    assert (config.drafter.num_layers, config.drafter.block_size, config.data.anchor_rule) == (7, 16, "legacy")
    assert (config.objective.gamma, config.objective.gamma_per_epoch) == (7.0, 0.5)
    drafter = fresh_drafter(config, dataclasses.replace(tiny.TARGET, num_layers=36, layer_windows=(None,) * 36))
    assert drafter.taps == (1, 5, 9, 13, 17, 21, 25, 29, 33)
    assert drafter.objective_config == DFlareObjective(
        gamma=7.0, gamma_per_epoch=0.5, denominator_eps=1e-6, kl_decay=3.0
    )
    flat = load_config(TrainConfig, None, [
        "target.source=x", "data.path=x", "run.directory=x", "run.steps=1", "drafter.method=dflare",
        "objective.gamma=null",
    ])  # fmt: skip
    assert flat.objective.gamma_per_epoch == 0.0


# -- the objective ----------------------------------------------------------------------------------------------------


def test_progressive_decay_follows_each_sequences_own_epoch():
    """gamma 2 + 0.5 x epoch, a sequence in epoch 0 beside one in epoch 4; the weight sum carries 1e-6."""
    drafter = family.dflare(DFlareObjective(gamma=2.0))
    params, shared = tiny.random_params(drafter), tiny.shared()
    batch = dataclasses.replace(tiny.batch([[2, 6], [3, 8]], LENGTH, taps=3), epochs=jnp.asarray([0, 4]))
    value, terms, _ = family.terms(drafter, params, shared, batch)
    nll = np.asarray(jax.jit(lambda p: drafter.trace(p, shared, batch)["neg_log_q"])(params), np.float64)[:, :, 1:]
    weights = np.stack([np.exp(-np.arange(3) / gamma) for gamma in (2.0, 4.0)])[:, None] * np.ones((2, 2, 1))
    assert value == pytest.approx((weights * nll).sum() / (weights.sum() + 1e-6), rel=1e-5)
    assert float(terms["ce"][1]) == pytest.approx(weights.sum(), rel=1e-6)
    with pytest.raises(ConfigError, match="epochs"):
        family.terms(drafter, params, shared, dataclasses.replace(batch, epochs=None))
    with pytest.raises(ConfigError, match="gamma_per_epoch"):
        DFlareObjective(gamma=None)


def test_every_tensor_is_trained():
    drafter, params, shared, batch = material([4, 9])
    _, _, grads = family.terms(drafter, params, shared, batch)
    assert all(np.any(grad) for grad in ly.flatten(grads).values())


# -- checkpoints, runs, serving ---------------------------------------------------------------------------------------


def test_B43_a_run_trains_exports_and_reloads_bit_for_bit(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    config = world.config(tmp_path / "run", data, "dflare", drafter__num_layers=2, run__steps=12)
    assert config.data.anchor_rule == "legacy" and config.objective.gamma_per_epoch == 0.5
    report = main.run(config, target=world.target())
    target = world.target()
    loaded = load_drafter(report["export"], target)
    assert loaded.drafter.method == "dflare" and loaded.drafter.to_hf()["architectures"] == ["QwenDFlareDraftModel"]
    save_drafter(tmp_path / "again", loaded)
    again = load_drafter(tmp_path / "again", target)
    shared = loaded.shared(target)
    batch = dataclasses.replace(
        tiny.batch([[1, 4]], 9), input_ids=jnp.ones((1, 9), jnp.int32), features=family.random_rows(0, 1, 9, 32)
    )
    logits = jax.jit(lambda p: loaded.drafter.block_logits(shared, loaded.drafter.training_hidden(p, shared, batch)))
    np.testing.assert_array_equal(logits(loaded.params), logits(again.params))
    bytes_of = lambda folder: (folder / "model.safetensors").read_bytes()  # noqa: E731
    from pathlib import Path

    assert bytes_of(Path(report["export"])) == bytes_of(tmp_path / "again")


@pytest.mark.parametrize("broken", ["layer_fusion_weights", "layers.1.self_attn.k_proj_target.weight", "fc.weight"])
def test_B43_a_missing_or_an_extra_tensor_is_an_error_that_names_it(tmp_path, broken):
    from safetensors.numpy import load_file, save_file

    model = Decoder(tiny.TARGET)
    from jaxspec.checkpoints.target import Target

    target = Target("tiny", model, model.init(jax.random.key(0)), "r1")
    drafter = family.dflare()
    save_drafter(tmp_path / "draft", Draft(drafter, drafter.init(jax.random.key(0))))
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    if broken in tensors:
        del tensors[broken]
    else:
        tensors[broken] = np.zeros((2, 2), np.float32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=broken.replace(".", r"\.")):
        load_drafter(tmp_path / "draft", target)


def test_B45_config_is_read_and_written_back_verbatim():
    hf = tiny.draft_hf(
        architectures=["QwenDFlareDraftModel"], num_anchors=512, loss_decay_gamma=7, attention_backend="flex_attention"
    )
    drafter = drafter_from_hf(hf, tiny.TARGET)
    assert isinstance(drafter, DFlare) and drafter.num_proposals == 3 and drafter.to_hf() == hf


@pytest.mark.ci
def test_B14_512_greedy_tokens_are_the_targets_own():
    target = worlds.tiny_target()
    model = dataclasses.replace(target.model.config, max_position=1024)
    target = dataclasses.replace(target, model=Decoder(model))
    config = fresh_config(model, num_layers=2, block_size=5, mask_token_id=worlds.MASK_ID, target_layer_ids=(0, 1))
    drafter = DFlare(config)
    draft = Draft(drafter, worlds.loud(drafter.init(jax.random.key(1))))
    prompts, params = [[5, 6, 7, 8], [9, 10]], SamplingParams(max_new_tokens=512, ignore_eos=True)
    found = []
    for one in (None, draft):
        runner = SlotRunner(target, one, num_slots=2, max_context=540, prefill_chunk=16)
        found.append([list(answer.tokens) for answer in generate(runner, prompts, params)])
    assert found[0] == found[1]


# -- train, then serve ------------------------------------------------------------------------------------------------

LAG = oracle.PROPOSALS + 1


def make(proposals=oracle.PROPOSALS):
    config = fresh_config(
        oracle.MODEL, num_layers=1, block_size=proposals + 1, mask_token_id=oracle.MASK_ID, target_layer_ids=(0,)
    )
    return DFlare(config, DFlareObjective(gamma=None, gamma_per_epoch=0.0))


def acceptance(drafter, params, lag):
    return oracle.acceptance(oracle.serve(drafter, params, lag)[1])


@pytest.fixture(scope="module")
def trained():
    return oracle.train(make(), LAG)


@pytest.mark.ci
def test_B51_training_reaches_100_percent_and_serving_accepts_100_percent(trained):
    params, accuracy = trained
    assert accuracy == 1.0 and acceptance(make(), params, LAG) == 1.0


@pytest.mark.ci
def test_B51_control_features_shifted_in_training_are_useless_when_served():
    params, accuracy = oracle.train(make(), LAG, shift=-1, steps=150)
    assert accuracy > 0.9 and acceptance(make(), params, LAG) < 0.5


@pytest.mark.ci
def test_B50_control_a_context_with_the_anchors_own_feature_trains_and_fails_when_served(monkeypatch):
    def leaking(anchors, keep, block, context, window, starts=None):
        return (jnp.arange(context) <= anchors[:, :, None, None]) & keep[:, :, None, None] & jnp.ones((block, 1), bool)

    with monkeypatch.context() as patched:
        patched.setattr(reference, "context_mask", leaking)
        params, accuracy = oracle.train(make(1), 1, leak=True)
    assert accuracy > 0.95 and acceptance(make(1), params, 1) < 0.5


class OneProjection(DFlare):
    """Serves the context through the block's own projections, as DFlash does."""

    def context_kv(self, params, context, positions):
        shared = [
            {
                **layer,
                "self_attn": {
                    **layer["self_attn"],
                    **{f"{n}_proj_target": layer["self_attn"][f"{n}_proj"] for n in "kv"},
                },
            }
            for layer in params["layers"]
        ]
        return super().context_kv({**params, "layers": shared}, context, positions)


@pytest.mark.ci
def test_B39_control_weights_served_with_dflashs_projections(trained):
    drafter = make()
    assert acceptance(OneProjection(drafter.config, drafter.objective_config), trained[0], LAG) < 0.5
