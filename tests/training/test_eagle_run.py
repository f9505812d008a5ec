"""Runs of the EAGLE drafters: their vocabulary from the data, maps that no optimizer touches, export, resuming."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.target import Target
from jaxspec.config import TrainConfig, build
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters import vocabulary
from jaxspec.drafters.eagle3 import Eagle3Objective
from jaxspec.errors import ConfigError
from jaxspec.training import main
from jaxspec.training.build import fresh_drafter
from jaxspec.training.data import load_examples
from jaxspec.training.progress import Reporter
from tests.helpers.marks import REPEATS
from tests.training import world

pytestmark = pytest.mark.ci

SIZE = 12
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "target_layer_ids": [0, 1], "draft_vocab_size": SIZE},
    "eagle": {"method": "eagle"},
}


def target() -> Target:
    """As in `world`, with weights loud enough that its next token is nearly certain: there is something to learn."""
    quiet = world.target()
    return dataclasses.replace(quiet, params=quiet.model.init(jax.random.key(11), jnp.float32, 0.6))


class Quiet(Reporter):
    def say(self, text: str) -> None:
        pass


def config(directory: Path, data: Path, method: str, **changes: Any) -> TrainConfig:
    tree: dict[str, Any] = {
        "version": 1,
        "target": {"source": "tiny", "dtype": "float32"},
        "drafter": {**DRAFTERS[method], "dtype": "float32"},
        "objective": {"ttt_length": 3} if method == "eagle3" else {},
        "data": {"path": str(data), "max_length": 24, "num_anchors": 1},
        "optimizer": {"batch_size": 2, "warmup_ratio": 0.1, "learning_rate": 1e-2},
        "run": {"directory": str(directory), "steps": 12, "checkpoint_every": 6, "log_every": 2, "tensorboard": False},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        tree[section][key] = value
    return build(TrainConfig, tree)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=REPEATS)])
@pytest.mark.parametrize("method", [pytest.param("eagle", marks=REPEATS), "eagle3"])
def test_a_run_lowers_the_loss_and_its_export_serves(method: str, dtype: str, tmp_path: Path) -> None:
    data = world.write_data(tmp_path / "data.npz")
    made = config(tmp_path / "run", data, method, run__steps=30, drafter__dtype=dtype)
    report = main.run(made, target=target(), reporter=Quiet())
    lines = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    assert report["status"] == "finished" and len(lines) >= 10
    losses = [json.loads(line)["loss"] for line in lines]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    served = target()
    draft = load_drafter(report["export"], served)
    if method == "eagle3":
        stored = load_file(Path(report["export"]) / "model.safetensors")
        examples = load_examples(data, max_length=24, vocab_size=world.VOCAB)
        counts = vocabulary.count_supervised([(examples.tokens, examples.loss_mask)], world.VOCAB)
        wanted = vocabulary.most_frequent(counts, SIZE)
        np.testing.assert_array_equal(np.arange(SIZE) + stored["d2t"], wanted)
        np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), wanted)
        assert draft.drafter.taps == (0, 1)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    options = {"num_slots": 2, "max_context": 40, "page_size": 4, "prefill_chunk": 4}
    with_draft, plain = (
        generate(SlotRunner(served, one, **options), [[5, 6, 7], [9]], params) for one in (draft, None)
    )
    assert [one.tokens for one in with_draft] == [one.tokens for one in plain]


@REPEATS
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    """Moments of the floats, the maps as they were."""
    data = world.write_data(tmp_path / "data.npz")
    exports = []
    for name, stops in (("whole", [12]), ("broken", [6, 12])):
        for steps in stops:
            made = config(
                tmp_path / name,
                data,
                "eagle3",
                optimizer__schedule="constant",
                optimizer__warmup_ratio=0.0,
                run__steps=steps,
            )
            report = main.run(made, target=target(), reporter=Quiet())
        exports.append(load_file(Path(report["export"]) / "model.safetensors"))
    assert exports[0].keys() == exports[1].keys()
    for name, value in exports[0].items():
        np.testing.assert_array_equal(value, exports[1][name], err_msg=name)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("eagle3", {"drafter__num_layers": 2}, "drafter.method and drafter.num_layers"),
        ("eagle3", {"drafter__mask_token_id": 3}, "drafter.method and drafter.mask_token_id"),
        ("eagle3", {"drafter__markov_rank": 3}, "drafter.method and drafter.markov_rank"),
        ("eagle3", {"objective__gamma": 4.0}, "drafter.method and objective.gamma"),
        ("eagle3", {"objective__feature_alpha": 1.0}, "drafter.method and objective.feature_alpha"),
        ("eagle3", {"objective__ttt_length": 0}, "drafter.method and objective.ttt_length"),
        ("eagle3", {"objective__kl_scale": 0.5}, "objective.kl_scale and objective.lk"),
        ("eagle", {"drafter__draft_vocab_size": 4}, "drafter.method and drafter.draft_vocab_size"),
        ("eagle", {"drafter__target_layer_ids": [0]}, "drafter.method and drafter.target_layer_ids"),
        ("eagle", {"objective__lk": "tv"}, "drafter.method and objective.lk"),
        ("eagle", {"objective__step_decay": 0.5}, "drafter.method and objective.step_decay"),
        ("eagle", {"objective__ce_alpha": 0.0, "objective__feature_alpha": 0.0}, "ce_alpha and objective"),
    ],
)  # fmt: skip
def test_contradictory_keys_are_refused(method: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, tmp_path / "data.npz", method, **change)


def test_other_methods_have_none_of_it(tmp_path: Path) -> None:
    for key, value in (
        ("drafter__draft_vocab_size", 8),
        ("drafter__fc_norm", True),
        ("objective__ttt_length", 3),
        ("objective__keep_products", False),
    ):
        with pytest.raises(ConfigError, match=key.replace("__", r"\.")):
            world.config(tmp_path, tmp_path / "data.npz", **{key: value})


def test_the_objective_is_the_configs(tmp_path: Path) -> None:
    for kept in (True, False):
        changes = {"step_decay": 0.5, "lk": "lambda", "kl_scale": 0.5, "chunk_blocks": 8, "keep_products": kept}
        made = config(tmp_path, tmp_path / "d.npz", "eagle3", **{f"objective__{k}": v for k, v in changes.items()})
        drafter: Any = fresh_drafter(made, target().config)
        expected = Eagle3Objective(3, 0.5, "lambda", 0.5, 3.0, chunk_rows=8, keep_products=kept)
        assert drafter.objective_config == expected
