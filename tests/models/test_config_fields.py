"""A config.json with a wrong type or a nonsense value is one ConfigError that names the key; nothing loads silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

GOLDEN = Path(__file__).parent.parent / "golden"
TARGET = json.loads((GOLDEN / "targets" / "q3a" / "config.json").read_text())
DRAFT = json.loads((GOLDEN / "02_dflash_fwd_q3a" / "draft" / "config.json").read_text())
NAN = float("nan")

TARGET_FAULTS = [
    ("rope_scaling", [1]),
    ("rope_scaling", "yarn"),
    ("rope_scaling", {"rope_type": "yarn", "factor": "x"}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 0}),
    ("rope_scaling", {"rope_type": "linear", "factor": -3}),
    ("rope_theta", "abc"),
    ("rope_theta", 0),
    ("rope_theta", NAN),
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", None),
    ("rms_norm_eps", -1),
    ("eos_token_id", "x"),
    ("eos_token_id", ["x"]),
    ("eos_token_id", {}),
    ("eos_token_id", 2.5),
    ("layer_types", 5),
    ("layer_types", [["x"]] * 8),
    ("quantization_config", {"quant_method": "awq"}),
]
DRAFT_FAULTS = [
    ("block_size", "8"),
    ("block_size", 2.5),
    ("block_size", 10**9),
    ("dflash_config", 5),
    ("is_causal", "x"),
    ("is_causal", 1),
]
NESTED_FAULTS = [
    ("mask_token_id", "x"),
    ("mask_token_id", 1.5),
    ("target_layer_ids", 5),
    ("target_layer_ids", [1, 1, 3]),
    ("target_layer_ids", [True, 3, 5]),
    ("output_multiplier", "x"),
    ("input_embedding_scale", "x"),
    ("final_logit_softcapping", "x"),
]


@pytest.mark.parametrize(("key", "value"), TARGET_FAULTS)
def test_target_config_faults_name_their_key(key, value):
    with pytest.raises(ConfigError, match=key.removeprefix("rope_scaling") or "rope"):
        ModelConfig.from_hf(TARGET | {key: value})


@pytest.mark.parametrize(("key", "value"), DRAFT_FAULTS)
def test_draft_config_faults_name_their_key(key, value):
    with pytest.raises(ConfigError, match=key):
        drafter_from_hf(DRAFT | {key: value}, ModelConfig.from_hf(TARGET))


@pytest.mark.parametrize(("key", "value"), NESTED_FAULTS)
def test_nested_draft_config_faults_name_their_key(key, value):
    nested = DRAFT["dflash_config"] | {key: value}
    with pytest.raises(ConfigError, match=key):
        drafter_from_hf(DRAFT | {"dflash_config": nested}, ModelConfig.from_hf(TARGET))
