"""Published recipes by name: `preset: dspark` stands for a whole set of values, each of which an explicit key replaces.

A preset says what its authors say and nothing else; what they leave open (where the data lies, how long DFlash 2
trains) stays open. Values that belong to each other move together: the accumulation follows the micro-batch, so that
the published batch of a step is kept, and the layers' types follow their number.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxspec.config.schema import MAX_LAYERS, contradiction
from jaxspec.errors import ConfigError, problem

__all__ = ["PRESETS", "Preset", "fill"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """`values`: section -> key -> value. `step_batch`: sequences of an optimizer step, where they are published, with
    optimizer.batch_size among the values. `sliding`: every layer of the drafter is a sliding one."""

    source: str
    values: Mapping[str, Mapping[str, Any]]
    step_batch: int | None = None
    sliding: bool = False


_ADAMW = {"schedule": "cosine", "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_LONG_RATE = {"learning_rate": 6e-4, "warmup_ratio": 0.04, "warmup_offset": 1, "clip_norm": 1.0}

PRESETS: dict[str, Preset] = {
    "dflash": Preset(
        "the DFlash paper's appendix; sizes it leaves out from SpecForge's recipe",
        {
            "drafter": {"method": "dflash", "num_layers": 5, "block_size": 16},
            "objective": {"loss_type": "weighted_ce", "chunk_blocks": 128},  # gamma follows the block size: 7 for 16
            "data": {"max_length": 3072, "num_anchors": 512, "anchor_rule": "adjacent"},
            "optimizer": {**_ADAMW, **_LONG_RATE, "batch_size": 4},
            "run": {"epochs": 6, "seed": 42},
        },
    ),
    "dspark": Preset(
        "DeepSpec's training defaults",
        {
            "drafter": {
                "method": "dspark",
                "num_layers": 5,
                "block_size": 7,
                "markov_rank": 256,
                "markov_head_type": "vanilla",
                "confidence_head": True,
                "sample_from_anchor": True,
            },
            "objective": {"gamma": 4.0, "ce_alpha": 0.1, "l1_alpha": 0.9},  # confidence_alpha follows the head: 1.0
            "data": {"max_length": 4096, "min_loss_tokens": 14, "num_anchors": 512, "anchor_rule": "adjacent"},
            "optimizer": {**_ADAMW, **_LONG_RATE, "batch_size": 8},
            "run": {"epochs": 10, "seed": 42, "checkpoint_every": 3000, "log_every": 10},
        },
        step_batch=512,
    ),
    "eagle3": Preset(
        "SpecForge's recipe",
        {
            "drafter": {"method": "eagle3", "draft_vocab_size": 32000},
            "objective": {"ttt_length": 7, "step_decay": 0.8},
            "data": {"max_length": 4096},
            "optimizer": {**_ADAMW, "learning_rate": 1e-4, "warmup_ratio": 0.015, "clip_norm": 0.5, "batch_size": 1},
            "run": {"epochs": 10},
        },
    ),
    "dflash2": Preset(
        "SpecForge's recipe for Qwen3.8-27B (the method's authors published none)",
        {
            "drafter": {
                "method": "dflash2",
                "num_layers": 5,
                "block_size": 8,
                "is_causal": False,
                "sliding_window": 2048,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
            "objective": {"gamma": 7.0, "selector_alpha": 1.0, "selector_stop_gradient": False, "chunk_blocks": 128},
            "data": {"max_length": 8192, "num_anchors": 512, "anchor_rule": "adjacent"},
            "optimizer": {
                **_ADAMW,
                "schedule": "constant",
                "learning_rate": 5e-4,
                "warmup_ratio": 0.05,
                "clip_norm": 1.0,
                "batch_size": 8,
            },
        },
        step_batch=512,
        sliding=True,
    ),
    "dflare": Preset(
        "AngelSlim's trainer, online features",
        {
            "drafter": {"method": "dflare", "num_layers": 7, "block_size": 16},  # gamma 7 + 0.5 an epoch: the method's
            "data": {
                "max_length": 3072,
                "num_anchors": 512,
                "anchor_rule": "legacy",
            },  # gamma 7 + 0.5 an epoch: method's
            "optimizer": {**_ADAMW, **_LONG_RATE, "batch_size": 2},
            "run": {"epochs": 6},
        },
    ),
}


def fill(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with its preset's values where it says nothing itself (an explicit null is something).

    Raises ConfigError for a name that is no preset (naming the nearest), for another drafter.method than the preset's,
    and for an optimizer.batch_size that does not divide the published batch.
    """
    name = data.get("preset")
    if name is None:
        return data
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0)[0]
        expected = f"one of {', '.join(PRESETS)} (the nearest is {near}) or null"
        raise ConfigError(problem("preset", f"found {name!r}", expected))
    preset = PRESETS[name]
    filled = dict(data)
    for section in ("drafter", "objective", "data", "optimizer", "run"):
        given = {} if filled.get(section) is None else filled[section]
        if not isinstance(given, Mapping):
            continue  # the schema names what is wrong with it
        filled[section] = {**_for(preset, section, given), **given}
    method, published = _method(filled), preset.values["drafter"]["method"]
    if method != published:
        raise contradiction(
            "preset",
            "drafter.method",
            f"the recipe {name} trains a {published} and not a {method}",
            f"leave drafter.method out or choose another preset ({', '.join(PRESETS)})",
        )
    return filled


def _method(data: Mapping[str, Any]) -> Any:
    drafter = data.get("drafter")
    return drafter.get("method") if isinstance(drafter, Mapping) else None


def _for(preset: Preset, section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's part of a section, those values derived that follow from what is given."""
    values = dict(preset.values.get(section, {}))
    if section == "drafter" and preset.sliding:
        layers = given.get("num_layers", values["num_layers"])
        if isinstance(layers, int) and layers <= MAX_LAYERS and given.get("sliding_window", 1) is not None:
            values["layer_types"] = ["sliding_attention"] * layers
        types = given.get("layer_types", values.get("layer_types"))
        if not isinstance(types, list) or "sliding_attention" not in types:
            del values["sliding_window"]
    if section == "run" and given.get("steps") is not None:
        values.pop("epochs", None)  # a length of one's own replaces the published one; run.seconds only ends it early
    if section == "optimizer" and preset.step_batch is not None:
        values |= _batch(preset.step_batch, values["batch_size"], given)
    return values


def _batch(total: int, usual: int, given: Mapping[str, Any]) -> dict[str, int]:
    """batch_size and accumulation whose product is the published batch; whichever is given decides the other."""
    named, other = "batch_size", "accumulation"
    if other in given and named not in given:
        named, other = other, named
    size = given.get(named, usual)
    if other in given or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return {}  # both are given, or the schema names what is wrong
    if total % size:
        expected = f"a divisor of {total}, the recipe's sequences a step"
        raise ConfigError(problem(f"optimizer.{named}", size, expected, f"or set optimizer.{other} too"))
    return {named: size, other: total // size}
