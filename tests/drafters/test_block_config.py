"""Configs of the block drafters: which row predicts what (B45), the mask token (B46), keys in both places, exports."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Shared
from jaxspec.drafters.block_config import BlockConfig, build_target_layer_ids
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.decoder import Decoder
from tests.drafters import tiny


def dspark_hf(nested=None, **changes):
    base = tiny.draft_hf(architectures=["DSparkDraftModel"], **changes)
    return {**base, "dflash_config": {**base["dflash_config"], **(nested or {})}}


# -- B45: is the anchor's row a prediction? ---------------------------------------------------------------------------


class Rows:
    """A toy backbone: row j of every block has a hidden state whose logits peak at token 4 + j."""

    @staticmethod
    def block_hidden(params, shared, state, slots):
        size = params["rows"]
        return jnp.broadcast_to(
            jax.nn.one_hot(4 + jnp.arange(size), tiny.VOCAB), (slots.anchors.shape[0], size, tiny.VOCAB)
        )


def proposals(drafter):
    class Toy(type(drafter)):
        block_hidden = staticmethod(Rows.block_hidden)

    toy = Toy(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)})
    identity = jnp.eye(tiny.VOCAB)
    slots = tiny.slots([7, 9], [5, 6], tiny.page_tables(2, 2))
    params = {"rows": drafter.config.block_size}
    run = jax.jit(lambda: toy.propose(params, Shared(identity, identity), (), slots, tiny.keys(2), tiny.greedy(2)))
    return run()


PLAIN = {"rank": 0, "confidence": False}


@pytest.mark.parametrize(
    ("drafter", "first"),
    [
        (tiny.dflash(block_size=8), 1),
        (tiny.dspark(block_size=8, sample_from_anchor=False, **PLAIN), 1),
        (tiny.dspark(block_size=8, **PLAIN), 0),
    ],
    ids=["dflash", "dspark-bonus-anchor", "dspark"],
)
def test_B45_block_of_8_gives_7_or_8_drafts_from_the_documented_rows(drafter, first):
    proposal = proposals(drafter)
    assert drafter.num_proposals == 8 - first
    assert proposal.tokens.tolist() == [[4 + row for row in range(first, 8)]] * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dspark_hf(), 4),
        (dspark_hf({"sample_from_anchor": False}), 3),
        (dspark_hf(sample_from_anchor=False), 3),
        (dspark_hf(dspark_bonus_anchor=True), 3),
        (dspark_hf(speculators_model_type="dspark"), 3),
        (dspark_hf({"sample_from_anchor": True}, speculators_model_type="dspark"), 4),
        (tiny.draft_hf(), 3),
        (tiny.draft_hf(architectures=["Qwen3DSparkModel"], markov_rank=0, enable_confidence_head=False), 4),
    ],
)
def test_B45_row_convention_is_read_from_the_config(config, expected):
    assert drafter_from_hf(config, tiny.TARGET).num_proposals == expected


def test_B45_nested_and_flat_keys_read_alike_and_a_conflict_is_refused():
    nested = tiny.draft_hf(block_size=None)
    nested["dflash_config"] = {**nested["dflash_config"], "block_size": 4}
    flat = {**tiny.draft_hf(), "dflash_config": None, "mask_token_id": tiny.MASK_ID, "target_layer_ids": [1, 3]}
    both = {**tiny.draft_hf(), "mask_token_id": tiny.MASK_ID}
    configs = [
        dataclasses.replace(BlockConfig.from_hf(hf, tiny.TARGET), source_config=None) for hf in (nested, flat, both)
    ]
    assert configs[0] == configs[1] == configs[2]
    for key, value in (("block_size", 8), ("target_layer_ids", [1, 2]), ("mask_token_id", 20)):
        hf = tiny.draft_hf()
        hf["dflash_config"] = {**hf["dflash_config"], "block_size": 4}
        with pytest.raises(ConfigError, match=key):
            BlockConfig.from_hf({**hf, key: value}, tiny.TARGET)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "block_size"])
def test_B39_B46_a_missing_key_is_an_error_never_a_guess(key):
    hf = tiny.draft_hf()
    hf["dflash_config"] = {name: value for name, value in hf["dflash_config"].items() if name != key}
    hf.pop(key, None)
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        BlockConfig.from_hf(hf, tiny.TARGET)


@pytest.mark.parametrize("count", [0, 4, 99])
def test_B45_more_proposals_than_a_block_gives_are_refused(count):
    drafter = tiny.dflash()
    decoder = Decoder(tiny.TARGET)
    target = SimpleNamespace(model=decoder, params=decoder.abstract_params())
    draft = SimpleNamespace(drafter=drafter, params={}, embedding=None, head=None)
    with pytest.raises(ConfigError, match=f"num_proposals: found {count}, expected 1 to 3"):
        SlotRunner(target, draft, num_proposals=count)


@pytest.mark.parametrize("size", [0, 1])
def test_B45_a_block_that_proposes_nothing_is_refused(size):
    with pytest.raises(ConfigError, match="block_size"):
        tiny.dflash(block_size=size)


# -- B46: the mask token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [-1, tiny.VOCAB, 10**6])
def test_B46_mask_id_outside_the_vocabulary_is_refused(mask):
    with pytest.raises(ConfigError, match="mask_token_id"):
        tiny.dflash(mask_token_id=mask)


@pytest.mark.parametrize(
    ("mask", "name"), [(0, "bos_token_id"), (1, "eos_token_id"), (2, "eos_token_id"), (3, "pad_token_id")]
)
def test_B46_a_fresh_drafter_refuses_special_ids_and_an_imported_one_warns(mask, name, caplog):
    with pytest.raises(ConfigError, match=f"mask_token_id: {mask} is also {name}"):
        tiny.dflash(mask_token_id=mask)
    hf = tiny.draft_hf(dflash_config={"mask_token_id": mask, "target_layer_ids": [1, 3]})
    with caplog.at_level(logging.WARNING):
        assert drafter_from_hf(hf, tiny.TARGET).mask_token_id == mask
    assert name in caplog.text


def test_B46_a_fresh_drafter_needs_a_mask_token_and_feeds_it_in_training_and_serving():
    with pytest.raises(ConfigError, match="mask_token_id: missing"):
        tiny.dflash(mask_token_id=None)
    drafter, data = tiny.dflash(), tiny.batch([[2, 5]], 9, keep=[[True, False]])
    ids = np.asarray(drafter.noise_ids(data))
    assert ids[0, 0].tolist() == [int(data.input_ids[0, 2]), *[tiny.MASK_ID] * 3]
    assert drafter.block_ids(jnp.asarray([7])).tolist() == [[7, *[tiny.MASK_ID] * 3]]
    assert ids[0, 1].tolist() == [tiny.MASK_ID] * 4  # a dropped block starts with the mask, too


# -- the rest of the config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 20}, "hidden_size"),
        ({"vocab_size": 30}, "vocab_size"),
        ({"num_target_layers": 7}, "num_target_layers"),
        ({"dflash_config": {"mask_token_id": 23, "target_layer_ids": [1, 5]}}, "target_layer_ids.*5"),
        ({"dflash_config": {"mask_token_id": 23, "target_layer_ids": []}}, "target_layer_ids"),
        ({"output_multiplier": 0.0}, "output_multiplier"),
        ({"output_multiplier": -2.0}, "output_multiplier"),
        ({"architectures": ["Eagle9"]}, "architectures.*Eagle9"),
    ],
)
def test_a_config_that_does_not_fit_its_target_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        drafter_from_hf(tiny.draft_hf(**changes), tiny.TARGET)


@pytest.mark.parametrize("cap", [None, 0, -3.0])
def test_softcap_that_is_not_positive_is_off(cap):
    assert BlockConfig.from_hf(tiny.draft_hf(final_logit_softcapping=cap), tiny.TARGET).final_logit_softcapping is None


def test_muse_assistants_are_bidirectional_whatever_their_config_says():
    hf = tiny.draft_hf(architectures=["MuseGlimmerAssistantModel"], is_causal=None)
    assert drafter_from_hf(hf, tiny.TARGET).config.is_causal is False


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (24, 1, (12,)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (64, 5, (1, 16, 31, 46, 61)),
        (52, 5, (1, 13, 25, 37, 49)),
        (64, 2, (1, 61)),
        (9, 3, (1, 4, 6)),  # 3.5 rounds to even, down to 4 with the offset: floor(x + .5) would agree here
        (11, 3, (1, 4, 8)),  # 4.5 rounds to even, to 4: floor(x + .5) would give 5
    ],
)
def test_default_taps_use_bankers_rounding(layers, count, ids):
    assert build_target_layer_ids(layers, count) == ids


def test_default_taps_of_a_target_that_is_too_shallow_are_refused():
    with pytest.raises(ConfigError, match="target_layer_ids"):
        build_target_layer_ids(3, 2)


ROPES = {
    "default": RopeConfig(theta=1e6, original_max_position=128),
    "linear": RopeConfig("linear", 100.0, 4.0, 128),
    "yarn": RopeConfig("yarn", 100.0, 4.0, 32, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3),
    "yarn-mscale": RopeConfig("yarn", 100.0, 4.0, 32, mscale=0.7, mscale_all_dim=1.2, truncate=False),
    "llama3": RopeConfig("llama3", 5e5, 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("make", [tiny.dflash, tiny.dspark, lambda **c: tiny.dspark(layout="Qwen3DSparkModel", **c)])
def test_to_hf_and_back_is_the_same_drafter(make, rope):
    drafter = make(layer_types=("sliding_attention", "full_attention"), sliding_window=6, is_causal=False)
    model = dataclasses.replace(drafter.config.model, rope=ROPES[rope])
    drafter = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, model=model, output_multiplier=0.5)
    )
    target = dataclasses.replace(tiny.TARGET, rope=ROPES[rope])
    hf = drafter.to_hf()
    back = drafter_from_hf(hf, target)
    config = dataclasses.replace(back.config, source_config=None)
    model = dataclasses.replace(config.model, eos_token_ids=drafter.config.model.eos_token_ids)  # one id is written
    assert dataclasses.replace(config, model=model) == drafter.config
    assert back.num_proposals == drafter.num_proposals and type(back) is type(drafter)
    assert back.to_hf() == hf  # an imported config comes back as it was
    old = {key: value for key, value in hf.items() if key != "rope_parameters"}
    new = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")}
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope == ROPES[rope]


def test_methods_are_frozen_and_hashable():
    for drafter in (tiny.dflash(), tiny.dspark()):
        assert hash(drafter) == hash(dataclasses.replace(drafter))
        with pytest.raises(dataclasses.FrozenInstanceError):
            drafter.method = "other"
    assert isinstance(tiny.dflash(), DFlash) and isinstance(tiny.dspark(), DSpark)
