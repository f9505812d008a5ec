"""Targets: exactly the tensors of the config, every leaf from the file, stop tokens of both configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoints.store import TensorFolder, read_config, write_folder
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.layers import flatten

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def targets(root: Path) -> Path:
    return root / "tests" / "golden" / "targets"


def _copy(source: Path, out: Path, change: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    """A copy of a folder with config keys changed, and tensors replaced, added or (None) left out."""
    folder = TensorFolder(source)
    values: dict[str, Any] = {name: folder.read(name) for name in folder.names()}
    values |= tensors
    kept = {name: value for name, value in values.items() if value is not None}
    extra = {p.name: p.read_bytes() for p in source.glob("generation_config.json")}
    return write_folder(out, kept, read_config(source) | (change or {}), extra)


@pytest.mark.parametrize("name", ["llama_a", "llama_b", "q3a", "q3b_tied"])
def test_B43_every_leaf_comes_from_the_file(name: str, targets: Path) -> None:
    target = load_target(targets / name, "float32")
    folder = TensorFolder(targets / name)
    # What an initialiser would have left behind is NaN here, so any leaf that loading forgot shows.
    start = {
        key: np.full(leaf.shape, np.nan) for key, leaf in flatten(target.model.abstract_params(jnp.float32)).items()
    }
    flat = start | {key: np.asarray(value) for key, value in flatten(target.params).items()}
    assert flat.keys() == start.keys() == set(folder.names())
    assert not any(np.isnan(value).any() for value in flat.values())
    assert all(value.tobytes() == folder.read(key).tobytes() for key, value in flat.items())
    assert isinstance(target.params["model"]["layers"], list)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(target.params))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16])
def test_dtype_is_converted(dtype: Any, targets: Path) -> None:
    target = load_target(targets / "q3a", dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(dtype)} == {target.dtype}
    wide = TensorFolder(targets / "q3a").read(EMBEDDING)
    assert np.array_equal(target.embedding, wide.astype(jnp.dtype(dtype)))


def test_unknown_dtype_names_the_field(targets: Path) -> None:
    for dtype in ("int8", "fp32"):
        with pytest.raises(ConfigError, match=rf"target\.dtype: found '{dtype}', expected one of float32, bfloat16"):
            load_target(targets / "q3a", dtype)


def test_tied_target_shares_one_array(targets: Path) -> None:
    target = load_target(targets / "q3b_tied", "float32")
    assert target.head is target.embedding
    assert "lm_head" not in target.params


def test_tied_target_with_the_head_written_as_well(targets: Path, tmp_path: Path) -> None:
    source = targets / "q3b_tied"
    same = _copy(source, tmp_path / "same", **{"lm_head.weight": TensorFolder(source).read(EMBEDDING)})
    target = load_target(same, "float32")
    assert target.head is target.embedding
    other = _copy(source, tmp_path / "other", **{"lm_head.weight": TensorFolder(source).read(EMBEDDING) + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs .* tie_word_embeddings is true"):
        load_target(other, "float32")
    short = _copy(source, tmp_path / "short", **{"lm_head.weight": np.zeros((32, 64), np.float32)})
    with pytest.raises(
        CheckpointError, match=r"1 of the wrong shape: lm_head\.weight \(found \[32, 64\], expected \[256, 64\]\)"
    ):
        load_target(short, "float32")


def test_B43_missing_tensor_is_named(targets: Path, tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=rf"1 missing: {name}\."):
        load_target(_copy(targets / "q3a", tmp_path / "m", **{name: None}), "float32")
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight\."):
        load_target(_copy(targets / "q3a", tmp_path / "n", **{"lm_head.weight": None}), "float32")


def test_B43_left_over_and_misshapen_tensors_are_named(targets: Path, tmp_path: Path) -> None:
    extra = {
        "model.layers.8.mlp.up_proj.weight": np.zeros((1, 1), np.float32),
        "model.norm.weight": np.zeros(3, np.float32),
    }
    with pytest.raises(
        CheckpointError, match=r"1 left over: model\.layers\.8.*1 of the wrong shape: model\.norm\.weight"
    ):
        load_target(_copy(targets / "q3a", tmp_path / "m", **extra), "float32")


def test_old_rotary_buffers_are_ignored(targets: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    load_target(_copy(targets / "llama_a", tmp_path / "m", **extra), "float32")


def test_stop_tokens_of_both_configs_are_merged(targets: Path, tmp_path: Path) -> None:
    folder = _copy(targets / "q3a", tmp_path / "m", {"eos_token_id": 255})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [250, 255, 7]}))
    assert load_target(folder, "float32").config.eos_token_ids == (255, 250, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 999}))
    with pytest.raises(ConfigError, match=r"eos_token_id: found \[999\], expected ids below vocab_size = 256"):
        load_target(folder, "float32")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id: found 'x'"):
        load_target(folder, "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: found 'dynamic'"),
        ({"model_type": "gpt2"}, "model_type: found 'gpt2'"),
        ({"hidden_size": "64"}, "hidden_size: found '64'"),
    ],
)
def test_config_errors_name_the_file(change: dict[str, Any], words: str, targets: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{words}"):
        load_target(_copy(targets / "q3a", tmp_path / "m", change), "float32")


def test_truncated_weights_are_one_clear_error(targets: Path, tmp_path: Path) -> None:
    path = _copy(targets / "q3a", tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated: found \d+ bytes, expected \d+"):
        load_target(tmp_path / "m", "float32")


def test_sharded_and_whole_folders_give_the_same_model(targets: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    source = TensorFolder(targets / "q3a")
    weight_map = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(source.names())}
    for shard in set(weight_map.values()):
        save_file({n: source.read(n) for n, s in weight_map.items() if s == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(read_config(targets / "q3a")))
    one, other = load_target(targets / "q3a", "float32"), load_target(tmp_path, "float32")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one.params, other.params))


def test_bfloat16_file_loads_exactly(targets: Path, tmp_path: Path) -> None:
    source = TensorFolder(targets / "llama_a")
    bf16 = {name: source.read(name).astype(ml_dtypes.bfloat16) for name in source.names()}
    folder = write_folder(tmp_path / "m", bf16, read_config(targets / "llama_a"))
    target = load_target(folder, "float32")
    assert np.array_equal(np.asarray(target.embedding), bf16[EMBEDDING].astype(np.float32))


def test_identity_of_a_plain_folder(targets: Path) -> None:
    first, again = (load_target(targets / "q3a", "float32") for _ in range(2))
    assert isinstance(first, Target) and first.name == "q3a" and first.directory == targets / "q3a"
    assert first.revision == again.revision and first.revision.startswith("content:")
