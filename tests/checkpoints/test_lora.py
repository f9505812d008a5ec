"""A PEFT adapter merged at load: against a merge by hand, and refused where it is not plain LoRA of this target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.checkpoints.lora import Adapter
from jaxspec.checkpoints.safetensors_file import write_safetensors
from jaxspec.checkpoints.store import write_folder
from jaxspec.checkpoints.target import load_target
from jaxspec.errors import CheckpointError, ConfigError, JaxspecError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten

RANK, ALPHA = 3, 12
CONFIG = {
    "model_type": "qwen3", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
# what the library writes beside the keys that matter
WRITTEN = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "org/base", "corda_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.18.0",
    "rank_pattern": {}, "revision": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "qalora_group_size": 16,
}  # fmt: skip
MODULES = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    rng, abstract = np.random.default_rng(0), Decoder(ModelConfig.from_hf(CONFIG)).abstract_params(jnp.float32)
    tensors = {name: rng.normal(0, 0.4, leaf.shape).astype(np.float32) for name, leaf in flatten(abstract).items()}
    return write_folder(folder, tensors, CONFIG)


def factors(base: Path, modules: list[str] = MODULES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Matrix -> (B, A)."""
    rng = np.random.default_rng(1)
    shapes = {name: leaf.shape for name, leaf in flatten(load_target(base, "float32").params).items()}
    chosen = [name for name in shapes if name.split(".")[-2] in modules]
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
    return {name: (draw(shapes[name][0], RANK), draw(RANK, shapes[name][1])) for name in chosen}


def adapter(
    folder: Path, pairs: dict[str, tuple[np.ndarray, np.ndarray]], without: str = "", more: Any = None, **config: Any
) -> Path:
    folder.mkdir()
    tensors = dict(more or {})
    for name, (b, a) in pairs.items():
        module = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    tensors.pop(without, None)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": False, "bias": "none",
             "init_lora_weights": True, "target_modules": MODULES}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**WRITTEN, **plain, **config}))
    return folder


@pytest.mark.parametrize(
    ("change", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / np.sqrt(RANK)),
        ({"target_modules": r".*layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"}, ALPHA / RANK),
    ],
)
def test_merged_weights_are_those_by_hand(base: Path, tmp_path: Path, change: dict[str, Any], scale: float) -> None:
    pairs = factors(base)
    merged = flatten(load_target(base, "float32", lora=adapter(tmp_path / "a", pairs, **change)).params)
    for name, leaf in flatten(load_target(base, "float32").params).items():
        wanted = np.asarray(leaf)
        if name in pairs:
            wanted = wanted + scale * (pairs[name][0] @ pairs[name][1])
            assert not np.allclose(wanted, np.asarray(leaf))
        np.testing.assert_allclose(np.asarray(merged[name]), wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    assert len(pairs) == 4


def test_a_sharded_stacked_and_rounded_merge_is_the_same(base: Path, tmp_path: Path) -> None:
    """A shard merges its own rows and columns; rounding to bfloat16 happens once, after the sum."""
    pairs = factors(base, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    folder = adapter(tmp_path / "a", pairs, target_modules="all-linear")
    whole = flatten(load_target(base, "float32", lora=folder).params)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    cut = lambda name, shape: NamedSharding(mesh, PartitionSpec(*("x", "y")[: len(shape)]))  # noqa: E731
    target = load_target(base, "bfloat16", lora=folder, shardings=cut, stacked=True)
    layers = flatten(target.params["model"]["layers"])
    for name, leaf in layers.items():
        for index in range(2):
            wanted = np.asarray(whole[f"model.layers.{index}.{name}"]).astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(leaf[index]), wanted, err_msg=name)
    shapes = {name: tuple(leaf.shape) for name, leaf in whole.items()}
    name = "model.layers.0.mlp.down_proj.weight"
    plain = np.asarray(flatten(load_target(base, "float32").params)[name])
    part = Adapter(folder, shapes).merge(name, plain[3:9, 5:11], slice(3, 9), slice(5, 11), np.float32)
    np.testing.assert_allclose(part, np.asarray(whole[name])[3:9, 5:11], rtol=1e-5, atol=1e-6)


def test_the_adapter_is_part_of_the_identity(base: Path, tmp_path: Path) -> None:
    pairs = factors(base)
    plain = load_target(base).revision
    first = load_target(base, lora=adapter(tmp_path / "a", pairs)).revision
    other = {name: (b + 1, a) for name, (b, a) in pairs.items()}
    assert len({plain, first, load_target(base, lora=adapter(tmp_path / "b", other)).revision}) == 3
    assert first.startswith(plain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "use_dora: found True"),
        ({"bias": "all"}, "bias: found 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: found 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type: found 'IA3'"),
        ({"something_new": 1}, "something_new: found 1"),
        ({"r": 0}, "r: found 0"),
        ({"r": 2.5}, "r: found 2.5, expected a whole number"),
        ({"r": "2"}, "r: found '2'"),
        ({"lora_alpha": float("nan")}, "lora_alpha: found nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha: found inf"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ["nothing"]}, "none of the target's"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_what_is_not_plain_lora_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_target(base, lora=adapter(tmp_path / "a", factors(base), **change))
    assert named in str(caught.value) and "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, "integers"])
def test_factors_that_are_no_numbers_are_refused(base: Path, tmp_path: Path, value: Any) -> None:
    pairs = factors(base)
    name = next(iter(pairs))
    b, a = pairs[name]
    broken = b.astype(np.int32) if value == "integers" else np.where(np.arange(b.size).reshape(b.shape) == 3, value, b)
    with pytest.raises(CheckpointError, match="expected finite floating-point values"):
        load_target(base, lora=adapter(tmp_path / "a", {**pairs, name: (broken, a)}))


def test_coverage_holds_in_both_directions(base: Path, tmp_path: Path) -> None:
    pairs = factors(base)
    lost = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    name = next(iter(pairs))
    wrong = {**pairs, name: (pairs[name][0][:-1], pairs[name][1])}
    stray = {"base_model.model.lm_head.lora_A.weight": np.zeros((RANK, 16), np.float32)}
    for number, (folder, words) in enumerate(
        (
            ({"pairs": pairs, "without": lost}, f"missing {lost}"),
            ({"pairs": pairs, "more": stray}, "left over base_model.model.lm_head.lora_A.weight"),
            ({"pairs": pairs, "target_modules": ["q_proj"]}, "left over"),
            ({"pairs": pairs, "target_modules": [*MODULES, "k_proj"]}, "missing"),
            ({"pairs": wrong}, "of shape"),
        )
    ):
        with pytest.raises(CheckpointError) as caught:
            load_target(base, lora=adapter(tmp_path / str(number), **folder))
        assert words in str(caught.value)


def test_absent_files_are_one_line(base: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(JaxspecError) as caught:
            load_target(base, lora=folder)
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
