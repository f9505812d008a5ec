"""SmolLM2-135M in float32 with fresh drafters, and the prompts of the recorded answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.smollm2 import MASK_TOKEN_ID
from jaxspec.checkpoints.target import Target
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig

ANSWERS = Path(__file__).resolve().parents[1] / "fixtures" / "smollm2_transformers_answers.json"


def recorded() -> list[dict[str, Any]]:
    """Greedy answers of transformers, with the smallest gap between the best two logits on the way."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))["records"]


def fresh_draft(target: Target, method: str, block_size: int = 5, seed: int = 0) -> Draft:
    """Random weights: nearly every proposal is wrong."""
    config = fresh_config(target.model.config, num_layers=2, block_size=block_size, mask_token_id=MASK_TOKEN_ID)
    drafter = DFlash(config) if method == "dflash" else DSpark(config, MarkovConfig(32))
    return Draft(drafter, drafter.init(jax.random.key(seed), jnp.float32))
