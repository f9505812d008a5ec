"""Shapes without weights: those of the loaded pair, from its config alone."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.drafting import DraftOptions
from jaxspec.checkpoints.shapes import drafter_shape, target_shape
from jaxspec.checkpoints.target import load_target
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import CheckpointError, ConfigError
from tests.helpers.worlds import GOLDEN

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "configs" / "models"


def shapes(params: object) -> object:
    return jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), params)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("source", ["q3a", "q3a/config.json"])
def test_a_targets_shapes_are_those_of_its_weights(source: str, quantization: str | None):
    folder = GOLDEN / "targets" / "q3a"
    loaded = load_target(folder, "bfloat16", quantization=quantization)
    planned = target_shape(folder.parent / source, "bfloat16", quantization)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(planned.params))
    assert shapes(planned.params) == shapes(loaded.params)


def test_a_drafters_shapes_are_those_of_its_weights():
    target, folder = load_target(GOLDEN / "targets" / "q3a", "float32"), GOLDEN / "02_dflash_fwd_q3a" / "draft"
    loaded = load_drafter(folder, target)
    for source in (folder, folder / "config.json"):
        planned, rest = drafter_shape(str(source), target, DraftOptions(num_proposals=2))
        assert (planned.drafter.num_proposals, rest) == (loaded.drafter.num_proposals, 2)
        assert shapes(planned.params) == shapes(loaded.params)
        assert planned.embedding is None and planned.head is None


def test_other_kinds_of_drafters():
    target = target_shape(GOLDEN / "targets" / "q3a", "float32")
    small, _ = drafter_shape(str(GOLDEN / "targets" / "q3a"), target, DraftOptions())
    assert isinstance(small.drafter, SmallModel) and shapes(small.params) == shapes(target.params)
    ngram, _ = drafter_shape("ngram", target, DraftOptions())
    assert ngram.drafter.method == "ngram" and ngram.params == {}


@pytest.mark.parametrize(("name", "billions"), [("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("smollm2-135m", 0.1345)])
def test_the_shapes_that_come_along_have_the_models_size(name: str, billions: float):
    target = target_shape(MODELS / f"{name}.json", "bfloat16")
    assert sum(leaf.size for leaf in jax.tree.leaves(target.params)) / 1e9 == pytest.approx(billions, rel=2e-3)
    for file in MODELS.glob(f"{name}-*.json"):
        draft, _ = drafter_shape(str(file), target, DraftOptions())
        assert draft.drafter.num_proposals == {"b16": 15, "b7": 7}[file.stem.rpartition("-")[2]]


def test_what_is_no_config_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"target: .*missing\.json: found nothing there"):
        target_shape(tmp_path / "missing.json", "float32")
    (tmp_path / "odd.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match=r"odd\.json: model_type: found 'mamba'"):
        target_shape(tmp_path / "odd.json", "float32")
    with pytest.raises(ConfigError, match=r"odd\.json: architectures: found \[\]"):
        drafter_shape(str(tmp_path / "odd.json"), target_shape(GOLDEN / "targets" / "q3a", "float32"), DraftOptions())
