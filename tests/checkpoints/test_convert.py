"""`jaxspec inspect` and `jaxspec convert` on the golden drafts: every layout there and back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.convert import LAYOUTS, convert
from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.inspection import inspect, target_config
from jaxspec.checkpoints.target import load_target
from jaxspec.cli import main
from jaxspec.commands.convert import _LAYOUTS
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.layers import flatten

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DRAFTS = sorted(path.parent for path in GOLDEN.rglob("draft/config.json"))
Q3A = GOLDEN / "targets" / "q3a"
# case -> the layouts that can express it; every other one refuses
EXPRESSIBLE = {
    "03_dflash_gen_q3a": {"zlab", "specforge", "speculators"},
    "04_dflash_train_sliding": {"zlab", "specforge", "speculators"},
    "06_dflash2_gen": {"zlab", "specforge", "speculators"},
    "05_dspark_train_vanilla": {"specforge", "deepspec"},
    "05_deepspec_dspark_gen": {"specforge", "deepspec"},
    "04_deepspec_dflash_train": {"specforge", "deepspec"},
    "07_eagle3_train_q3a": {"specforge", "eagle3", "speculators"},
    "07_eagle2_infer_llama": set(),
}


def target_of(case: str) -> Path:
    said = json.loads((GOLDEN / case / "case.json").read_text())
    return (GOLDEN / case / said["target_dir"]).resolve()


def copied(source: Path, to: Path, change: Any = None, **config: Any) -> Path:
    """A folder with changed tensors or config keys."""
    to.mkdir()
    tensors = load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    said = json.loads((source / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(said))
    return to


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda path: path.parent.name)
def test_every_golden_draft_is_whole_with_and_without_its_target(draft: Path) -> None:
    target, _ = target_config(target_of(draft.parent.name))
    guessed, known = inspect(draft), inspect(draft, target)
    for found in (guessed, known):
        assert found.whole and found.parameters()["total"] == sum(
            value.size for value in load_file(draft / "model.safetensors").values()
        )
    assert guessed.taps in (known.taps, None)
    assert (guessed.drafter.method, guessed.layout) == (known.drafter.method, known.layout)
    assert known.layout != "unknown"


@pytest.mark.parametrize("to", sorted(LAYOUTS))
@pytest.mark.parametrize("case", sorted(EXPRESSIBLE))
def test_there_and_back_or_a_reason(case: str, to: str, tmp_path: Path) -> None:
    source, target = GOLDEN / case / "draft", target_of(case)
    if to not in EXPRESSIBLE[case]:
        with pytest.raises(ConfigError, match=rf"layout {to} cannot express this \w+ drafter: \w+"):
            convert(source, target, to, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    made = convert(source, target, to, tmp_path / "out")
    assert "float" in json.loads((made.directory / "config.json").read_text())["dtype"]  # the maps' is none
    model, _ = target_config(target)
    first = inspect(source, model)
    back = convert(made.directory, target, first.layout, tmp_path / "back")
    for again in (made, back):
        assert again.whole
        assert (again.drafter.method, again.taps) == (first.drafter.method, first.taps)
        assert again.drafter.num_proposals == first.drafter.num_proposals
    assert set(back.names) == set(first.names)
    for name, stored in first.names.items():
        kept = back.folder.read(back.names[name])
        assert kept.dtype == first.folder.dtype(stored)
        np.testing.assert_array_equal(kept, first.folder.read(stored), err_msg=name)
    block = getattr(first.drafter.config, "layer_masks", None)
    if block is not None:  # windows, causality and rope survive, not only the weights
        assert back.drafter.config.layer_masks == block
        assert back.drafter.config.model.rope == first.drafter.config.model.rope
    if to != "speculators":  # whatever is written, the loader reads: same parameters
        loaded = load_target(target, "float32")
        ours, theirs = (flatten(load_drafter(one, loaded).params) for one in (source, made.directory))
        assert set(ours) == set(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_layouts_look_as_their_readers_want_them(tmp_path: Path) -> None:
    case = "06_dflash2_gen"
    config = lambda to: json.loads(  # noqa: E731
        (convert(GOLDEN / case / "draft", target_of(case), to, tmp_path / to).directory / "config.json").read_text()
    )
    zlab, specforge, speculators = config("zlab"), config("specforge"), config("speculators")
    assert "rope_parameters" not in zlab and zlab["rope_theta"] and "block_size" not in zlab
    assert zlab["dflash_config"]["block_size"] == specforge["block_size"]
    assert specforge["rope_parameters"]["rope_theta"] == specforge["rope_theta"] == zlab["rope_theta"]
    assert speculators["speculators_model_type"] == "dflash2" and speculators["sample_from_anchor"] is False
    ids = zlab["dflash_config"]["target_layer_ids"]
    assert speculators["aux_hidden_state_layer_ids"] == [tap + 1 for tap in ids]  # these count the embedding
    case = "07_eagle3_train_q3a"
    names = convert(GOLDEN / case / "draft", target_of(case), "speculators", tmp_path / "e").folder.names()
    assert "layers.0.hidden_norm.weight" in names and not any(name.startswith("midlayer") for name in names)
    case = "05_dspark_train_vanilla"
    made = convert(GOLDEN / case / "draft", target_of(case), "deepspec", tmp_path / "d")
    stored = load_file(target_of(case) / "model.safetensors")
    np.testing.assert_array_equal(made.folder.read("embed_tokens.weight"), stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(made.folder.read("lm_head.weight"), stored["lm_head.weight"])
    flat = json.loads((made.directory / "config.json").read_text())
    assert flat["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in flat and flat["mask_token_id"]


def test_B42_a_table_of_its_own_is_not_dropped_silently(tmp_path: Path) -> None:
    def other(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1

    draft = copied(GOLDEN / "05_deepspec_dspark_gen" / "draft", tmp_path / "in", other)
    with pytest.raises(ConfigError, match=r"'embed_tokens\.weight' differs from the target's: layout specforge shares"):
        convert(draft, Q3A, "specforge", tmp_path / "out")
    kept = convert(draft, Q3A, "deepspec", tmp_path / "kept")
    expected = load_file(draft / "model.safetensors")["embed_tokens.weight"]
    np.testing.assert_array_equal(kept.folder.read("embed_tokens.weight"), expected)


def test_B43_tensors_that_do_not_fit_are_listed_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(tensors: dict[str, np.ndarray]) -> None:
        del tensors["hidden_norm.weight"]
        tensors["layers.0.extra.weight"] = np.zeros(3, np.float32)
        tensors["norm.weight"] = np.zeros(7, np.float32)

    draft = copied(GOLDEN / "03_dflash_gen_q3a" / "draft", tmp_path / "in", broken)
    found = inspect(draft)
    assert found.missing == ("hidden_norm.weight",) and found.left_over == ("layers.0.extra.weight",)
    assert found.wrong_shape == ("norm.weight: found [7], expected [64]",)
    with pytest.raises(CheckpointError, match=r"missing: hidden_norm\.weight; left over: layers\.0\.extra\.weight"):
        convert(draft, Q3A, "zlab", tmp_path / "out")
    assert main(["inspect", str(draft)]) == 1
    out = capsys.readouterr().out
    assert "missing      hidden_norm.weight" in out and "left over    layers.0.extra.weight" in out


def test_bfloat16_stays_bfloat16_and_own_tables_follow_it(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for name, value in tensors.items():
            tensors[name] = value.astype(ml_dtypes.bfloat16)

    draft = copied(GOLDEN / "05_dspark_train_vanilla" / "draft", tmp_path / "in", narrow)
    made = convert(draft, target_of("05_dspark_train_vanilla"), "deepspec", tmp_path / "out")
    assert {str(made.folder.dtype(name)) for name in made.folder.names()} == {"bfloat16"}
    assert made.config["dtype"] == "bfloat16"


def test_speculators_refuses_what_it_has_no_key_for(tmp_path: Path) -> None:
    nested = json.loads((GOLDEN / "03_dflash_gen_q3a" / "draft" / "config.json").read_text())["dflash_config"]
    draft = copied(
        GOLDEN / "03_dflash_gen_q3a" / "draft", tmp_path / "in", dflash_config={**nested, "output_multiplier": 0.5}
    )
    with pytest.raises(ConfigError, match=r"output_multiplier: found 0\.5, but speculators has no key for it"):
        convert(draft, Q3A, "speculators", tmp_path / "out")
    causal = copied(GOLDEN / "03_dflash_gen_q3a" / "draft", tmp_path / "causal", is_causal=True)
    with pytest.raises(ConfigError, match="is_causal: found true"):
        convert(causal, Q3A, "speculators", tmp_path / "out")


def test_a_headless_dspark_with_dflashs_rows_is_a_dflash(tmp_path: Path) -> None:
    source = GOLDEN / "04_deepspec_dflash_train"
    draft = copied(source / "draft", tmp_path / "in", sample_from_anchor=False)
    made = convert(draft, target_of(source.name), "zlab", tmp_path / "out")
    assert made.drafter.method == "dflash" and made.own_tables == ()
    with pytest.raises(ConfigError, match="anchor row predicts nothing, but DeepSpec's model always"):
        convert(draft, target_of(source.name), "deepspec", tmp_path / "d")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(LAYOUTS) == _LAYOUTS
    draft = GOLDEN / "03_dflash_gen_q3a" / "draft"
    assert main(["inspect", str(draft), "--target", str(Q3A), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["layout"], report["taps"]) == ("dflash", "zlab", [1, 3, 5])
    assert report["missing"] == report["left_over"] == [] and report["parameters"]["fc"] == 64 * 3 * 64
    assert main(["inspect", str(draft)]) == 0
    text = capsys.readouterr().out
    assert "method       dflash" in text and "embedding and head are the target's" in text
    assert main(["inspect", str(GOLDEN / "07_eagle3_infer_llama" / "draft")]) == 0
    assert "follow from the target's depth (give --target)" in capsys.readouterr().out
    assert main(["inspect", str(Q3A), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "small_model"
    out = tmp_path / "out"
    arguments = ["convert", str(draft), "--target", str(Q3A), "--to", "specforge", "--out", str(out)]
    assert main(arguments) == 0 and "layout specforge" in capsys.readouterr().out
    arguments[arguments.index("specforge")] = "deepspec"
    assert main(arguments) == 2 and "layout deepspec cannot express" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


def test_convert_never_replaces_a_model_or_its_own_source(tmp_path: Path) -> None:
    import shutil

    victim, source = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(Q3A, victim)
    shutil.copytree(GOLDEN / "02_dflash_fwd_q3a" / "draft", source)
    before = {path: path.read_bytes() for path in sorted(victim.iterdir())}
    with pytest.raises(CheckpointError, match="expected a free place or an earlier drafter"):
        convert(source, victim, "specforge", victim)
    assert {path: path.read_bytes() for path in sorted(victim.iterdir())} == before
    with pytest.raises(ConfigError, match=r"--out: found .*, the drafter that is converted"):
        convert(source, Q3A, "specforge", source)


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(GOLDEN / "03_dflash_gen_q3a" / "draft", draft)
    weights = load_file(draft / "model.safetensors")
    name = next(iter(weights))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, draft / "model.safetensors")
    found = inspect(draft)
    assert not found.whole and len(found.report()["not_finite"]) == 1 and name.endswith(found.not_finite[0])
