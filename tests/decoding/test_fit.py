"""A runner that cannot be right is refused when it is built: options out of range, drafters of other targets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.target import Target
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle_config import EagleConfig, fresh_model
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import FINAL, Decoder
from tests.helpers.worlds import TINY, tiny_draft, tiny_target

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def other(**changes: Any) -> Target:
    """A target of another shape; only its config is looked at."""
    config = ModelConfig.from_hf({**TINY, "model_type": "qwen3", **changes})
    return Target("other", Decoder(config), {"model": {"embed_tokens": {"weight": jnp.zeros((1, 1))}}})


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("acceptance", ["raito", "", None]),
        ("confidence_threshold", [float("nan"), -0.1, 1.5, float("inf"), "0.5", None]),
        ("eos_token_ids", [[64], [-1], [1, 64], [1.0], [True], ["1"]]),
    ],
)
def test_an_option_out_of_range_is_named_at_construction(target, option, values):
    for value in values:
        with pytest.raises(ConfigError, match=option):
            SlotRunner(target, **{option: value})


def test_options_at_their_limits_are_taken(target):
    draft = tiny_draft(target)
    for options in (
        {"acceptance": "block", "confidence_threshold": 1},
        {"eos_token_ids": (), "confidence_threshold": np.float32(0)},
        {"eos_token_ids": np.array([0, 63])},
    ):
        SlotRunner(target, draft, num_slots=1, max_context=16, **options)


def drafts(made_for: Target) -> dict[str, Draft]:
    """A draft of each family for a target."""
    config = made_for.model.config
    block = tiny_draft(dataclasses.replace(made_for, params=tiny_target().params)).drafter
    eagle = Eagle(EagleConfig(fresh_model(config), (FINAL,), config.vocab_size, config.num_layers, config.hidden_size))
    drafters = (block, DDTree(block, 8), eagle, NGram(config.vocab_size), SmallModel(made_for.model))
    return {drafter.method: Draft(drafter, {}) for drafter in drafters}


READERS = ("dflash", "ddtree", "eagle")  # of features; of the target of the others only the vocabulary matters


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        *(
            (name, {"vocab_size": 80}, "vocab_size 80, expected the target's 64")
            for name in (*READERS, "ngram", "small_model")
        ),
        *((name, {"hidden_size": 48}, "target_hidden_size 48, expected the target's 32") for name in READERS),
        *((name, {"num_hidden_layers": 3}, "num_target_layers 3, expected the target's 2") for name in READERS),
    ],
)
def test_a_drafter_of_another_target_is_refused_at_construction(target, method, changes, named):
    draft = drafts(other(**changes))[method]
    with pytest.raises(ConfigError, match=named):
        SlotRunner(target, draft)


def test_a_tap_that_the_target_lacks_is_refused_at_construction(target):
    draft = tiny_draft(target)
    config = dataclasses.replace(draft.drafter.config, num_target_layers=9, taps=(0, 7))
    with pytest.raises(ConfigError, match="target_layer_ids: found 7"):
        SlotRunner(target, dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, config=config)))


@pytest.mark.parametrize("table", ["embedding", "head"])
def test_a_table_of_another_shape_is_refused_at_construction(target, table):
    draft = tiny_draft(target)
    for shape in ((64, 48), (80, 32)):
        with pytest.raises(ConfigError, match=rf"{table} of shape .*expected \(64, 32\)"):
            SlotRunner(target, dataclasses.replace(draft, **{table: jnp.zeros(shape)}))
