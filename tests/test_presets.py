"""Every number of a published recipe, written down a second time beside the section of the notes it comes from."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.config import TrainConfig, load_config, presets, render
from jaxspec.config.presets import PRESETS
from jaxspec.errors import ConfigError

BASE = ["target.source=t", "data.path=d", "run.directory=r"]
ADAMW = {"optimizer.b1": 0.9, "optimizer.b2": 0.999, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0}
LONG = {**ADAMW, "optimizer.learning_rate": 6e-4, "optimizer.warmup_ratio": 0.04, "optimizer.warmup_offset": 1,
        "optimizer.clip_norm": 1.0, "optimizer.schedule": "cosine", "data.num_anchors": 512}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    # paper: 6 epochs, length 3072, gamma 7 for blocks of 16; SpecForge: 5 layers, batches of 4, seed 42, chunks of 128
    "dflash": {
        **LONG, "drafter.method": "dflash", "drafter.num_layers": 5, "drafter.block_size": 16, "objective.gamma": 7.0,
        "objective.loss_type": "weighted_ce", "objective.lk": None, "objective.chunk_blocks": 128,
        "data.anchor_rule": "adjacent", "data.max_length": 3072, "run.epochs": 6, "run.seed": 42, "step": 4,
    },
    # DeepSpec: 0.1 CE + 0.9 L1 + 1.0 confidence, gamma 4, blocks of 7, 512 sequences a step, 14 supervised tokens
    "dspark": {
        **LONG, "drafter.method": "dspark", "drafter.num_layers": 5, "drafter.block_size": 7,
        "drafter.markov_rank": 256, "drafter.markov_head_type": "vanilla", "drafter.confidence_head": True,
        "drafter.confidence_head_with_markov": True, "drafter.sample_from_anchor": True, "objective.gamma": 4.0,
        "objective.ce_alpha": 0.1, "objective.l1_alpha": 0.9, "objective.confidence_alpha": 1.0,
        "data.anchor_rule": "adjacent", "data.max_length": 4096, "data.min_loss_tokens": 14, "run.epochs": 10,
        "run.seed": 42, "run.checkpoint_every": 3000, "run.log_every": 10, "step": 512,
    },
    # SpecForge: rate 1e-4, warm-up 0.015, clip 0.5, 7 steps that count 0.8 of the one before, 32,000 draft tokens
    "eagle3": {
        **ADAMW, "drafter.method": "eagle3", "drafter.num_layers": 1, "drafter.draft_vocab_size": 32000,
        "objective.ttt_length": 7, "objective.step_decay": 0.8, "optimizer.learning_rate": 1e-4,
        "optimizer.warmup_ratio": 0.015, "optimizer.clip_norm": 0.5, "optimizer.schedule": "cosine",
        "data.max_length": 4096, "run.epochs": 10, "step": 1,
    },
    # SpecForge's recipe for Qwen3.8-27B: constant 5e-4 after 0.05, blocks of 8 with gamma 7, length 8192, 512 a step
    "dflash2": {
        **ADAMW, "drafter.method": "dflash2", "drafter.num_layers": 5, "drafter.block_size": 8,
        "drafter.is_causal": False, "drafter.layer_types": ("sliding_attention",) * 5, "drafter.sliding_window": 2048,
        "drafter.conv_kernel_size": 2, "drafter.conv_group_size": 16, "drafter.selector_rank": 256,
        "drafter.selector_top_k": 16, "objective.gamma": 7.0, "objective.selector_alpha": 1.0,
        "objective.selector_warmup_ratio": 0.0, "objective.selector_ramp_ratio": 0.0,
        "objective.selector_stop_gradient": False, "objective.chunk_blocks": 128, "optimizer.learning_rate": 5e-4,
        "optimizer.warmup_ratio": 0.05, "optimizer.clip_norm": 1.0, "optimizer.schedule": "constant",
        "data.num_anchors": 512, "data.anchor_rule": "adjacent", "data.max_length": 8192,
        "run.epochs": None, "step": 512,
    },
    # AngelSlim: 7 layers, the old anchor rule, batches of 2, length 3072, 6 epochs, gamma 7 + 0.5 an epoch
    "dflare": {
        **LONG, "drafter.method": "dflare", "drafter.num_layers": 7, "drafter.block_size": 16, "objective.gamma": 7.0,
        "objective.gamma_per_epoch": 0.5, "data.anchor_rule": "legacy", "data.max_length": 3072, "run.epochs": 6,
        "step": 2,
    },
}  # fmt: skip


def resolved(name: str, *overrides: str) -> TrainConfig:
    limit = ["run.steps=100"] if name == "dflash2" else []
    return load_config(TrainConfig, None, [*BASE, f"preset={name}", *limit, *overrides])


def value(config: TrainConfig, dotted: str) -> Any:
    if dotted == "step":
        return config.optimizer.batch_size * config.optimizer.accumulation
    section, key = dotted.split(".")
    return getattr(getattr(config, section), key)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_is_the_published_one(name: str) -> None:
    config = resolved(name)
    assert {key: value(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert PUBLISHED.keys() == PRESETS.keys()
    stated = {f"{section}.{key}" for section, keys in PRESETS[name].values.items() for key in keys}
    assert stated - {"optimizer.batch_size"} <= PUBLISHED[name].keys()  # nothing stands in a preset unchecked


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_resolved_config_shows_the_outcome_and_loads_back(name: str, tmp_path: Any) -> None:
    config = resolved(name)
    text = render(config)
    assert f"preset: {name}" in text and f"learning_rate: {config.optimizer.learning_rate}" in text
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(TrainConfig, tmp_path / "c.yaml") == config


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_explicit_key_replaces_any_value(name: str) -> None:
    config = resolved(name, "optimizer.learning_rate=0.5", "data.max_length=99", "run.steps=3")
    assert (config.optimizer.learning_rate, config.data.max_length) == (0.5, 99)
    assert config.run.steps == 3 and config.run.epochs is None  # the published length gives way too


def test_values_that_belong_together_move_together() -> None:
    many = resolved("dspark", "optimizer.batch_size=64")
    assert (many.optimizer.batch_size, many.optimizer.accumulation) == (64, 8)
    few = resolved("dspark", "optimizer.accumulation=4")
    assert (few.optimizer.batch_size, few.optimizer.accumulation) == (128, 4)
    both = resolved("dspark", "optimizer.batch_size=3", "optimizer.accumulation=1")
    assert (both.optimizer.batch_size, both.optimizer.accumulation) == (3, 1)
    assert resolved("dflash2", "drafter.num_layers=2").drafter.layer_types == ("sliding_attention",) * 2
    full = resolved("dflash2", "drafter.layer_types=null").drafter
    assert full.layer_types is None and full.sliding_window is None
    assert resolved("dflash", "drafter.block_size=8").objective.gamma == 4.0
    assert resolved("dspark", "objective.gamma=null").objective.gamma is None
    assert resolved("dflash", "run.seconds=60").run.epochs == 6


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preset=dsprak"], ["preset: found 'dsprak'", "nearest is dspark", "eagle3"]),
        (["preset=3"], ["preset: found"]),
        (["preset=dflash2", "drafter.layer_types=3"], ["drafter.layer_types"]),
        (["preset=dflash2", "drafter.num_layers=10000000"], ["drafter.num_layers", "1000"]),
        (["preset=dflash", "drafter.method=dspark"], ["preset", "drafter.method"]),
        (["preset=dspark", "optimizer.batch_size=3"], ["optimizer.batch_size: found 3", "divisor of 512"]),
        (["preset=dflash2"], ["run.steps, run.epochs and run.seconds"]),
    ],
)
def test_what_cannot_be_is_named(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, None, [*BASE, *overrides])
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", [["dflash"], {"dflash": 1}, True])
def test_a_preset_that_is_no_name_is_one_error(name: Any) -> None:
    with pytest.raises(ConfigError, match="preset: found"):
        presets.fill({"preset": name})
