"""int8 targets: what is stored, what a product makes of it, and an engine that says what a lone decode says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten, project, stack_layers, unflatten
from jaxspec.models.quantization import is_quantised, quantise_weight, tree_bytes
from jaxspec.serving.engine import Engine
from tests.helpers.worlds import GOLDEN, tiny_target


def quantised(target: Target) -> Target:
    leaves = {n: quantise_weight(x) if is_quantised(n) else x for n, x in flatten(target.params).items()}
    return dataclasses.replace(target, params=unflatten(leaves))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_the_dequantised_matrix(dtype: Any):
    weight = jax.random.normal(jax.random.key(0), (24, 16), dtype) * jnp.arange(1, 25, dtype=dtype)[:, None]
    x = jax.random.normal(jax.random.key(1), (5, 16), dtype)
    held = quantise_weight(weight)
    assert (held.qvalue.dtype, held.scale.shape, held.scale.dtype) == (jnp.int8, (24, 1), jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(qwix.dequantize(held), np.float64).T
    got = project(x, held)
    assert got.dtype == dtype
    # one rounding of the result (bfloat16: 8 bits), and float32 sums before it
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-5,
                               atol=1e-5 * np.abs(exact).max())  # fmt: skip
    whole = np.asarray(weight, np.float64)
    step = np.abs(whole).max(axis=1, keepdims=True) / 127
    assert (np.abs(np.asarray(qwix.dequantize(held), np.float64) - whole) <= 0.51 * step).all()


@pytest.mark.ci
def test_only_the_matrices_of_the_layers_are_quantised_and_a_scan_runs_them_too():
    target = tiny_target()
    held = quantised(target)
    for name, leaf in flatten(held.params).items():
        matrix = name.startswith("model.layers") and leaf.ndim == 2
        assert hasattr(leaf, "qvalue") == matrix, name
    tokens = jnp.arange(20)[None]
    listed = target.model.forward_sequences(held.params, tokens, (0, 1)).features
    stacked = target.model.forward_sequences(stack_layers(held.params), tokens, (0, 1)).features
    np.testing.assert_allclose(listed, stacked, atol=1e-5)
    whole = target.model.forward_sequences(target.params, tokens, (0, 1)).features
    far = float(jnp.linalg.norm(listed - whole) / jnp.linalg.norm(whole))
    assert 1e-4 < far < 0.1, far


def test_bytes_are_about_half_of_bfloat16():
    """At the 8B shape the layers' matrices are 85 % of the model; the tables, 15 %, keep two bytes."""
    raw = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    whole = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in
             flatten(Decoder(ModelConfig.from_hf(raw)).abstract_params(jnp.bfloat16)).items()}  # fmt: skip
    held = {name: quantise_weight(leaf) if is_quantised(name) else leaf for name, leaf in whole.items()}
    matrices = [name for name in whole if is_quantised(name)]
    layers = tree_bytes([held[name] for name in matrices]) / tree_bytes([whole[name] for name in matrices])
    assert 0.5 < layers < 0.502
    assert 0.56 < tree_bytes(held) / tree_bytes(whole) < 0.59
    assert tree_bytes(held) < 9 * 2**30, "it has to leave room on a 16 GB chip"


@pytest.mark.ci
def test_a_checkpoint_is_quantised_as_it_is_read():
    whole, held = (load_target(GOLDEN / "targets" / "q3a", "float32", quantization=kind) for kind in (None, "int8"))
    expected = quantised(whole)
    for (name, leaf), other in zip(flatten(held.params).items(), flatten(expected.params).values(), strict=True):
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), leaf, other)), name
    assert held.revision != whole.revision, "features of one must not pass for those of the other"
    with pytest.raises(ConfigError, match=r"target\.quantization: .*int4.*expected int8 or null"):
        load_target(GOLDEN / "targets" / "q3a", "float32", quantization="int4")


def lone(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy, cache-free: the whole text through the decoder for every token."""
    text = np.zeros((1, len(prompt) + count), np.int32)
    text[0, : len(prompt)] = prompt

    @jax.jit
    def following(ids: Any) -> Any:
        return jnp.argmax(target.model.logits(target.params, target.model.forward_sequences(target.params, ids).hidden),
                          axis=-1)  # fmt: skip

    for at in range(len(prompt), text.shape[1]):
        text[0, at] = int(following(text)[0, at - 1])
    return text[0, len(prompt) :].tolist()


@pytest.mark.ci
def test_an_engine_over_an_int8_target_says_what_a_lone_decode_of_it_says():
    whole = tiny_target()
    target = quantised(whole)
    draft = Draft(SmallModel(target.model, num_proposals=2), target.params)  # it is right wherever both say the same
    engine = Engine(
        target, draft, num_slots=2, max_context=64, prefill_chunk=16, slot_buckets=(2,), rules=False,
        max_logprobs=None, pause_drafting=False,
    )  # fmt: skip
    prompts = [[3, 9, 27, 4], [50, 1, 7], [11] * 20]
    found: dict[int, list[int]] = {}
    proposed = 0
    owners, waiting = {}, list(enumerate(prompts))
    while waiting or engine.live:
        while waiting and engine.free_slots:
            index, prompt = waiting.pop(0)
            owners[engine.admit(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True))] = index
        for event in engine.step():
            found.setdefault(owners[event.handle], []).extend(event.tokens)
            proposed += event.accepted
    assert proposed > 10, "a drafter that is never right proves nothing"
    answers = [lone(target, prompt, 24) for prompt in prompts]
    assert [found[index] for index in range(3)] == answers
    assert answers != [lone(whole, prompt, 24) for prompt in prompts], "the two targets say the same here"


def test_the_shared_tables_are_the_targets_own():
    target = quantised(tiny_target())
    engine = Engine(target, None, num_slots=1, max_context=32, prefill_chunk=16)
    assert engine.weights.shared.embedding is target.embedding and engine.weights.shared.head is target.head
    assert Path(target.name).name == "tiny-qwen3"
