"""Drafters in and out: own or shared tables, coverage, names of other exporters, byte-equal export."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.checkpoints.store import TensorFolder, read_config, write_folder
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.drafters.registry import ARCHITECTURES
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.layers import flatten, unflatten

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def _known(draft: Path) -> bool:
    """Drafts of methods that this version reads; the others follow with their method, and then they are tested here
    too.
    """
    return any(name in ARCHITECTURES for name in read_config(draft)["architectures"])


DRAFTS = [path.parent for path in sorted(GOLDEN.glob("*/draft/config.json")) if _known(path.parent)]


def _target_of(draft: Path, dtype: str = "float32") -> Target:
    case = json.loads((draft.parent / "case.json").read_text())
    return load_target(draft.parent / case["target_dir"], dtype)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDEN / "targets" / "q3a", "float32")


@pytest.fixture
def plain() -> Path:
    return GOLDEN / "02_dflash_fwd_q3a" / "draft"


@pytest.fixture
def full() -> Path:
    return GOLDEN / "05_deepspec_dspark_train" / "draft"


def _tensors(folder: Path) -> dict[str, Any]:
    reader = TensorFolder(folder)
    return {name: reader.read(name) for name in reader.names()}


def _copy(source: Path, out: Path, change: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    values = _tensors(source) | tensors
    kept = {name: value for name, value in values.items() if value is not None}
    return write_folder(out, kept, read_config(source) | (change or {}))


def test_there_are_drafts_to_test() -> None:
    assert len(DRAFTS) >= 15


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.parent.name)
def test_import_then_export_is_byte_equal(draft: Path, tmp_path: Path) -> None:
    loaded = load_drafter(draft, _target_of(draft))
    out = save_drafter(tmp_path / "out", loaded)
    before, after = TensorFolder(draft), TensorFolder(out)
    assert after.names() == before.names()
    assert all(
        after.dtype(name) == before.dtype(name) and after.shape(name) == before.shape(name) for name in before.names()
    )
    assert all(after.read(name).tobytes() == before.read(name).tobytes() for name in before.names())
    assert read_config(out) == read_config(draft)


def test_export_after_a_narrowing_load_is_still_byte_equal(full: Path, tmp_path: Path) -> None:
    loaded = load_drafter(full, _target_of(full, "bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    out = save_drafter(tmp_path / "out", loaded)
    assert (out / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()


def test_a_changed_weight_is_exported_and_the_others_stay(plain: Path, target: Target, tmp_path: Path) -> None:
    loaded = load_drafter(plain, target, "bfloat16")
    flat = flatten(loaded.params)
    flat["norm.weight"] = flat["norm.weight"] + 1
    out = save_drafter(tmp_path / "out", dataclasses.replace(loaded, params=unflatten(flat)))
    before, after = _tensors(plain), _tensors(out)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == ["norm.weight"]
    assert after["norm.weight"].dtype == np.float32


def test_export_in_another_dtype(plain: Path, target: Target, tmp_path: Path) -> None:
    out = save_drafter(tmp_path / "out", load_drafter(plain, target), dtype="bfloat16")
    assert {str(TensorFolder(out).dtype(name)) for name in TensorFolder(out).names()} == {"bfloat16"}


def test_B43_export_reload_is_bitwise_equal(plain: Path, target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(plain, target).drafter
    rng = np.random.default_rng(0)
    abstract = flatten(drafter.abstract_params(jnp.float32))
    made = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in abstract.items()}
    fresh = Draft(drafter, unflatten(made))
    again = load_drafter(save_drafter(tmp_path / "out", fresh), target)
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh.params, again.params))
    assert sorted(TensorFolder(tmp_path / "out").names()) == sorted(TensorFolder(plain).names())


def test_fresh_export_with_own_tables_writes_them(full: Path, tmp_path: Path) -> None:
    target = _target_of(full)
    loaded = load_drafter(full, target)
    fresh = Draft(loaded.drafter, loaded.params, target.embedding, target.head)
    tensors = _tensors(save_drafter(tmp_path / "out", fresh, extra_files={"note.txt": "hello"}))
    assert np.array_equal(tensors[EMBED], target.embedding) and np.array_equal(tensors[HEAD], target.head)
    assert (tmp_path / "out" / "note.txt").read_text() == "hello"


@pytest.mark.parametrize("own_head", [False, True], ids=["target_head", "own_head"])
@pytest.mark.parametrize("own_embedding", [False, True], ids=["target_embedding", "own_embedding"])
def test_B42_own_table_if_the_file_has_it_else_the_targets(
    own_embedding: bool, own_head: bool, plain: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {EMBED: np.asarray(target.embedding) * 2, HEAD: np.asarray(target.head) * 3}
    present = {name: value for name, value in tables.items() if {EMBED: own_embedding, HEAD: own_head}[name]}
    folder = _copy(plain, tmp_path / "m", **present)
    with caplog.at_level(logging.INFO, "jaxspec.checkpoints.drafter"):
        draft = load_drafter(folder, target)
    shared = draft.shared(target)
    assert np.array_equal(shared.embedding, tables[EMBED]) if own_embedding else shared.embedding is target.embedding
    assert np.array_equal(shared.head, tables[HEAD]) if own_head else shared.head is target.head
    for what, own in (("input embedding", own_embedding), ("output head", own_head)):
        lines = [record.getMessage() for record in caplog.records if what in record.getMessage()]
        assert len(lines) == 1 and ("from its own file" if own else "shared with the target") in lines[0]
    out = save_drafter(tmp_path / "out", draft)
    assert TensorFolder(out).names() == TensorFolder(folder).names()


def test_B42_a_copy_of_the_targets_table_is_kept_once(full: Path, tmp_path: Path) -> None:
    target = _target_of(full)
    tensors = {EMBED: np.asarray(target.embedding), HEAD: np.asarray(target.head)}
    draft = load_drafter(_copy(full, tmp_path / "m", **tensors), target)
    assert draft.embedding is target.embedding and draft.head is target.head
    assert {EMBED, HEAD} <= set(TensorFolder(save_drafter(tmp_path / "out", draft)).names())


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_B42_a_reduced_table_is_never_taken(name: str, plain: Path, target: Target, tmp_path: Path) -> None:
    folder = _copy(plain, tmp_path / "m", **{name: np.zeros((96, 64), np.float32)})
    with pytest.raises(CheckpointError, match=rf"wrong shape: {name} \(found \[96, 64\], expected \[256, 64\]\)"):
        load_drafter(folder, target)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "norm.weight"])
def test_B43_missing_tensor_is_named(name: str, plain: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"1 missing: {name}\."):
        load_drafter(_copy(plain, tmp_path / "m", **{name: None}), target)


def test_B43_left_over_tensor_is_named(plain: Path, target: Target, tmp_path: Path) -> None:
    extra = {"markov_head.markov_w1.weight": np.zeros((256, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"1 left over: markov_head\.markov_w1\.weight\."):
        load_drafter(_copy(plain, tmp_path / "m", **extra), target)


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.parent.name)
def test_B43_no_leaf_keeps_its_init_value(draft: Path) -> None:
    loaded = load_drafter(draft, _target_of(draft))
    start = {
        name: np.full(leaf.shape, np.nan) for name, leaf in flatten(loaded.drafter.abstract_params(jnp.float32)).items()
    }
    flat = start | {name: np.asarray(value) for name, value in flatten(loaded.params).items()}
    assert flat.keys() == start.keys()
    assert not any(np.isnan(value).any() for value in flat.values())


def test_heads_nested_under_logit_head_are_found_and_exported_so(full: Path, tmp_path: Path) -> None:
    nested = {name: None for name in _tensors(full) if name.startswith(("markov_head", "confidence_head"))}
    moved = {f"logit_head.{name}": _tensors(full)[name] for name in nested}
    folder = _copy(full, tmp_path / "m", **nested, **moved)
    target = _target_of(full)
    draft = load_drafter(folder, target)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), draft.params, load_drafter(full, target).params)
    )
    out = save_drafter(tmp_path / "out", draft)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_muse_names_are_read_and_written_back(plain: Path, target: Target, tmp_path: Path) -> None:
    tensors = _tensors(plain)
    renamed = {
        "fc.weight": None,
        "hidden_norm.weight": None,
        "encoder.fc.weight": tensors["fc.weight"],
        "encoder.output_norm_enc.weight": tensors["hidden_norm.weight"],
    }
    folder = _copy(plain, tmp_path / "m", **renamed)
    draft = load_drafter(folder, target)
    assert np.array_equal(draft.params["fc"]["weight"], tensors["fc.weight"])
    assert np.array_equal(draft.params["hidden_norm"]["weight"], tensors["hidden_norm.weight"])
    assert TensorFolder(save_drafter(tmp_path / "out", draft)).names() == TensorFolder(folder).names()


def test_two_names_for_one_tensor_are_refused(plain: Path, target: Target, tmp_path: Path) -> None:
    folder = _copy(plain, tmp_path / "m", **{"encoder.fc.weight": _tensors(plain)["fc.weight"]})
    with pytest.raises(CheckpointError, match=r"found both fc\.weight and encoder\.fc\.weight"):
        load_drafter(folder, target)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_B46_an_odd_mask_row_is_a_loud_warning(
    scale: float, plain: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = np.asarray(target.embedding).copy()
    folder = _copy(plain, tmp_path / "m", **{EMBED: table})
    load_drafter(folder, target)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    table[read_config(plain)["dflash_config"]["mask_token_id"]] *= scale
    load_drafter(_copy(plain, tmp_path / "m", **{EMBED: table}), target)
    assert any("mask_token_id 254: found an embedding row of norm" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mask", [None, -1, 256])
def test_B46_mask_token_is_required_and_in_range(mask: int | None, plain: Path, target: Target, tmp_path: Path) -> None:
    nested = read_config(plain)["dflash_config"] | {"mask_token_id": mask}
    folder = _copy(plain, tmp_path / "m", {"dflash_config": nested})
    with pytest.raises(ConfigError, match=r"config\.json: mask_token_id"):
        load_drafter(folder, target)


def test_B39_layer_ids_are_never_guessed(plain: Path, target: Target, tmp_path: Path) -> None:
    nested = {k: v for k, v in read_config(plain)["dflash_config"].items() if k != "target_layer_ids"}
    with pytest.raises(ConfigError, match=r"config\.json: target_layer_ids: missing"):
        load_drafter(_copy(plain, tmp_path / "m", {"dflash_config": nested}), target)


def test_B40_a_reduced_vocabulary_without_its_map_is_refused(plain: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"draft_vocab_size: found 96 and no d2t, expected the map"):
        load_drafter(_copy(plain, tmp_path / "m", {"draft_vocab_size": 96}), target)


def test_wrong_target_is_a_config_error_that_names_the_file(plain: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: num_target_layers"):
        load_drafter(plain, load_target(GOLDEN / "targets" / "q3b_tied", "float32"))


def test_unknown_architecture_is_a_config_error(plain: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: architectures"):
        load_drafter(_copy(plain, tmp_path / "m", {"architectures": ["Nobody"]}), target)


def test_diverged_or_stacked_weights_are_not_exported(plain: Path, target: Target, tmp_path: Path) -> None:
    draft = load_drafter(plain, target)
    flat = flatten(draft.params)
    flat["fc.weight"] = np.full(flat["fc.weight"].shape, np.nan, np.float32)
    with pytest.raises(CheckpointError, match=r"tensor 'fc\.weight': found NaN or infinity"):
        save_drafter(tmp_path / "out", dataclasses.replace(draft, params=unflatten(flat)))
    stacked = {**draft.params, "layers": jax.tree.map(lambda *x: np.stack(x), *draft.params["layers"])}
    with pytest.raises(CheckpointError, match=r"drafter\.params: tensors do not match the config"):
        save_drafter(tmp_path / "out", dataclasses.replace(draft, params=stacked))
    assert list(tmp_path.iterdir()) == []


def test_gguf_is_no_drafter(target: Target, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"found a GGUF file, expected a drafter's folder"):
        load_drafter(tmp_path / "x.gguf", target)


@pytest.mark.parametrize("target", ["q3a", "q3b_tied", "llama_a", "llama_b"])
def test_export_never_replaces_a_target(tmp_path, target):
    """A folder with another model's config.json is somebody's model, even where a drafter shares its name."""
    import shutil

    from jaxspec.checkpoints.drafter import check_export_folder

    golden = Path(__file__).parent.parent / "golden"
    place = tmp_path / "model"
    shutil.copytree(golden / "targets" / target, place)
    with pytest.raises(CheckpointError, match="ForCausalLM"):
        check_export_folder(place)


@pytest.mark.parametrize(
    "case", ["02_dflash_fwd_q3a", "05_deepspec_dspark_gen", "07_eagle1_train", "07_eagle3_train_q3a"]
)
def test_export_may_replace_an_earlier_drafter(tmp_path, case):
    import shutil

    from jaxspec.checkpoints.drafter import check_export_folder

    place = tmp_path / "draft"
    shutil.copytree(Path(__file__).parent.parent / "golden" / case / "draft", place)
    check_export_folder(place)


def test_export_deletes_no_file_that_no_export_wrote(tmp_path):
    import shutil

    from jaxspec.checkpoints.drafter import check_export_folder

    place = tmp_path / "draft"
    shutil.copytree(Path(__file__).parent.parent / "golden" / "02_dflash_fwd_q3a" / "draft", place)
    (place / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"README\.md, which no export wrote"):
        check_export_folder(place)
