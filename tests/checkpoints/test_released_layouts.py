"""B43 for every public layout: the names and shapes of released checkpoints, as formulas of their sizes, and what a
missing, left-over or renamed tensor is answered with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.drafters.dspark import DEEPSPEC, DSpark
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import flatten
from tests.drafters import eagle_pairs as pairs
from tests.drafters import family, tiny
from tests.helpers import worlds

pytestmark = pytest.mark.ci

Shapes = dict[str, tuple[int, ...]]
QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA2_7B = {
    **LLAMA3_8B, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32, "rope_theta": 1e4,
}  # fmt: skip
QWEN38_27B = {
    **QWEN3_4B, "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "rope_theta": 1e7, "tie_word_embeddings": False,
}  # fmt: skip
MUSE_30B = {
    **QWEN3_4B, "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
MASK = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
IDS = [1, 5, 9, 13, 17, 21, 25, 29, 33]


def layer(target: dict[str, Any], place: str, inputs: int = 1, head_norms: bool = True) -> Shapes:
    """A decoder layer without its input norm; its projections read `inputs` times the hidden size."""
    size, inner = target["hidden_size"], target["intermediate_size"]
    dim = target.get("head_dim", size // target["num_attention_heads"])
    q, kv = target["num_attention_heads"] * dim, target["num_key_value_heads"] * dim
    shapes = {
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (q, inputs * size),
        "self_attn.k_proj.weight": (kv, inputs * size),
        "self_attn.v_proj.weight": (kv, inputs * size),
        "self_attn.o_proj.weight": (size, q),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return {f"{place}.{name}": shape for name, shape in shapes.items()}


def backbone(target: dict[str, Any], layers: int, taps: int) -> Shapes:
    """DFlash: CONTRACTS 1.1."""
    size = target["hidden_size"]
    shapes: Shapes = {"fc.weight": (size, taps * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for index in range(layers):
        shapes |= layer(target, f"layers.{index}") | {f"layers.{index}.input_layernorm.weight": (size,)}
    return shapes


def markov(target: dict[str, Any], rank: int, kind: str) -> Shapes:
    """DSpark's heads: CONTRACTS 3.1."""
    size, vocab = target["hidden_size"], target["vocab_size"]
    extra: Shapes = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (rank, size + rank), "gate_proj.bias": (rank,)},
        "rnn": {"joint_proj.weight": (3 * rank, 2 * rank + size), "joint_proj.bias": (3 * rank,)},
    }[kind]
    head = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (vocab, rank), **extra}
    confidence = {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
    return {f"markov_head.{name}": shape for name, shape in head.items()} | confidence


def dflash2(
    target: dict[str, Any], layers: int, taps: int, rank: int = 256, group: int = 16, kernel: int = 2
) -> Shapes:
    """CONTRACTS 2.1."""
    size, vocab = target["hidden_size"], target["vocab_size"]
    shapes = backbone(target, layers, taps) | {
        "candidate_selector.hidden_projection.weight": (rank, size),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
    }
    for index in range(layers):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{conv}.base_kernel"] = (2, kernel, size)
            shapes[f"layers.{index}.{conv}.kernel_projection.weight"] = (2 * kernel * size // group, size)
    return shapes


def dflare(target: dict[str, Any], layers: int, taps: int) -> Shapes:
    """CONTRACTS 5.2: no fc; a mixture a layer and projections of its own for the context."""
    shapes = backbone(target, layers, taps) | {"layer_fusion_weights": (layers, taps)}
    del shapes["fc.weight"]
    for index in range(layers):
        for name in ("k_proj", "v_proj"):
            own = shapes[f"layers.{index}.self_attn.{name}.weight"]
            shapes[f"layers.{index}.self_attn.{name}_target.weight"] = own
    return shapes


def tables(target: dict[str, Any]) -> Shapes:
    return {name: (target["vocab_size"], target["hidden_size"]) for name in ("embed_tokens.weight", "lm_head.weight")}


def eagle1(target: dict[str, Any], bias: bool) -> Shapes:
    """CONTRACTS 4.1: neither an input norm nor a final one, no head."""
    size = target["hidden_size"]
    fc: Shapes = {"fc.weight": (size, 2 * size)} | ({"fc.bias": (size,)} if bias else {})
    return fc | layer(target, "layers.0", head_norms=False)


def eagle3(target: dict[str, Any], place: str, taps: int, vocab: int, deepspec: bool) -> Shapes:
    """CONTRACTS 4.2, layouts (a) and (b)."""
    size = target["hidden_size"]
    norms = {f"{place}.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")}
    shapes = {"fc.weight": (size, taps * size), "norm.weight": (size,)} | norms
    shapes |= layer(target, place, inputs=2, head_norms=deepspec)
    return shapes if deepspec else shapes | {"lm_head.weight": (vocab, size)}


def flat(target: dict[str, Any], name: str, layers: int, **more: Any) -> dict[str, Any]:
    return {**target, "architectures": [name], "num_hidden_layers": layers, "tie_word_embeddings": False, **more}


def nested(target: dict[str, Any], name: str, layers: int, **more: Any) -> dict[str, Any]:
    known = {key: more.pop(key) for key in ("block_size", "is_causal") if key in more}
    return flat(target, name, layers, **known, dflash_config={**MASK, **more}, num_target_layers=target_layers(target))


def target_layers(target: dict[str, Any]) -> int:
    return target["num_hidden_layers"]


SPARK: dict[str, Any] = {"block_size": 7, "num_target_layers": 36, **MASK}
HEADS = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
MUSE_IDS = {"mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49]}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# layout -> (target, config.json, shapes, tables that the file holds beside them)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], Shapes, Shapes]] = {
    "z-lab DFlash of Qwen3-4B": (
        QWEN3_4B, nested(QWEN3_4B, "DFlashDraftModel", 5, block_size=16), backbone(QWEN3_4B, 5, 5), {},
    ),
    "DFlash that shares only width and vocabulary with its target": (
        {**QWEN3_4B, "intermediate_size": 6144, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 64},
        nested(QWEN3_4B, "DFlashDraftModel", 5, block_size=16), backbone(QWEN3_4B, 5, 5), {},
    ),
    "EAGLE-3 that shares only width and vocabulary with its target": (
        {**LLAMA3_8B, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 2},
        flat(LLAMA3_8B, "LlamaForCausalLM", 1, draft_vocab_size=32000),
        eagle3(LLAMA3_8B, "midlayer", 3, 32000, False) | {"d2t": (32000,), "t2d": (128256,)}, {},
    ),
    "DeepSpec DSpark of Qwen3-4B": (
        QWEN3_4B, flat(QWEN3_4B, "Qwen3DSparkModel", 5, **SPARK, markov_head_type="vanilla", **HEADS),
        backbone(QWEN3_4B, 5, 5) | markov(QWEN3_4B, 256, "vanilla"), tables(QWEN3_4B),
    ),
    "DeepSpec DFlash of Qwen3-4B": (
        QWEN3_4B, flat(QWEN3_4B, "Qwen3DSparkModel", 5, **SPARK, markov_rank=0, enable_confidence_head=False),
        backbone(QWEN3_4B, 5, 5), tables(QWEN3_4B),
    ),
    "SpecForge DSpark, gated": (
        QWEN3_4B,
        nested(QWEN3_4B, "DSparkDraftModel", 5, block_size=7, markov_head_type="gated", **HEADS),
        backbone(QWEN3_4B, 5, 5) | markov(QWEN3_4B, 256, "gated"), {},
    ),
    "SpecForge DSpark, rnn": (
        QWEN3_4B,
        nested(QWEN3_4B, "DSparkDraftModel", 5, block_size=7, markov_head_type="rnn", **HEADS),
        backbone(QWEN3_4B, 5, 5) | markov(QWEN3_4B, 256, "rnn"), {},
    ),
    "DFlash 2 of Qwen3.8-27B": (
        QWEN38_27B,
        nested(QWEN38_27B, "DFlash2DraftModel", 5, is_causal=False, **SELECTOR) | {"dflash_config": {
            **SELECTOR, "block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]}},
        dflash2(QWEN38_27B, 5, 5), {},
    ),
    "DFlash 2 of Muse Glimmer": (
        MUSE_30B,
        nested(MUSE_30B, "DFlash2DraftModel", 5, is_causal=False) | {"dflash_config": {
            **SELECTOR, **MUSE_IDS, "block_size": 16, "output_multiplier": 26**-0.5, "final_logit_softcapping": 20}},
        dflash2(MUSE_30B, 5, 5) | {
            f"layers.{index}.{conv}.kernel_projection.weight": (1664, 6656)
            for index in range(5) for conv in ("attention_conv", "mlp_conv")},
        {},
    ),
    "AngelSlim DFlare of Qwen3-4B": (
        QWEN3_4B,
        nested(QWEN3_4B, "QwenDFlareDraftModel", 7, block_size=16) | {"dflash_config": {
            "mask_token_id": 151669, "target_layer_ids": IDS}},
        dflare(QWEN3_4B, 7, 9), {},
    ),
    "EAGLE of LLaMA-2-7B": (
        LLAMA2_7B, flat(LLAMA2_7B, "LlamaForCausalLM", 1), eagle1(LLAMA2_7B, True),
        {"embed_tokens.weight": (32000, 4096)},
    ),
    "EAGLE without a bias": (
        LLAMA2_7B, flat(LLAMA2_7B, "LlamaForCausalLM", 1, bias=False), eagle1(LLAMA2_7B, False), {},
    ),
    "EAGLE-3 of LLaMA-3.1-8B": (
        LLAMA3_8B, flat(LLAMA3_8B, "LlamaForCausalLM", 1, draft_vocab_size=32000),
        eagle3(LLAMA3_8B, "midlayer", 3, 32000, False) | {"d2t": (32000,), "t2d": (128256,)}, {},
    ),
    "EAGLE-3 over the whole vocabulary": (
        LLAMA3_8B, flat(LLAMA3_8B, "LlamaForCausalLMEagle3", 1, draft_vocab_size=128256),
        eagle3(LLAMA3_8B, "midlayer", 3, 128256, False), {},
    ),
    "EAGLE-3.1": (
        LLAMA3_8B, flat(LLAMA3_8B, "LlamaForCausalLMEagle3", 1, draft_vocab_size=32000, fc_norm=True),
        eagle3(LLAMA3_8B, "midlayer", 3, 32000, False)
        | {"d2t": (32000,), "t2d": (128256,), **{f"fc_norm.{tap}.weight": (4096,) for tap in range(3)}}, {},
    ),
    "DeepSpec EAGLE-3 of Qwen3-4B": (
        QWEN3_4B,
        flat(QWEN3_4B, "Qwen3Eagle3Model", 1, num_target_layers=36, target_layer_ids=MASK["target_layer_ids"],
             ttt_length=7, step_loss_decay=0.8, draft_num_hidden_layers=1),
        eagle3(QWEN3_4B, "layers.0", 5, 151936, True), tables(QWEN3_4B),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_B43_names_and_shapes_of_a_released_checkpoint(layout: str) -> None:
    """Every parameter is one of the file's tensors and the other way round; tables the file may hold are known too."""
    target, config, shapes, own = LAYOUTS[layout]
    drafter: Any = drafter_from_hf(config, ModelConfig.from_hf(target))
    if hasattr(drafter, "with_tensors"):
        drafter = drafter.with_tensors({*shapes, *own})
    found = {name: tuple(leaf.shape) for name, leaf in flatten(drafter.abstract_params()).items()}
    assert found == shapes
    assert getattr(drafter, "own_embeddings", False) == (len(own) == 2)


# -- damage -----------------------------------------------------------------------------------------------------------

TINY_TARGET = worlds.tiny_target()


def block_draft(drafter: Any) -> tuple[Any, Draft]:
    from jaxspec.checkpoints.target import Target
    from jaxspec.models.decoder import Decoder

    model = Decoder(tiny.TARGET)
    target = Target("tiny", model, model.init(jax.random.key(0), jnp.float32))
    own = isinstance(drafter, DSpark) and drafter.layout == DEEPSPEC
    tables = (target.embedding, target.head) if own else (None, None)
    return target, Draft(drafter, drafter.init(jax.random.key(1), jnp.float32), *tables)


def eagle_draft(drafter: Any) -> tuple[Any, Draft]:
    made = pairs.draft(drafter)
    if getattr(drafter, "own_embeddings", False):
        made = dataclasses.replace(made, embedding=TINY_TARGET.embedding, head=TINY_TARGET.head)
    return TINY_TARGET, made


DRAFTS: dict[str, Callable[[], tuple[Any, Draft]]] = {
    "dflash": lambda: block_draft(tiny.dflash()),
    "dspark": lambda: block_draft(tiny.dspark()),
    "dspark-rnn": lambda: block_draft(tiny.dspark(kind="rnn")),
    "dspark-deepspec": lambda: block_draft(tiny.dspark(layout=DEEPSPEC)),
    "dflash2": lambda: block_draft(family.dflash2()),
    "dflare": lambda: block_draft(family.dflare()),
    "eagle": lambda: eagle_draft(pairs.eagle(TINY_TARGET)),
    "eagle3": lambda: eagle_draft(pairs.eagle3(TINY_TARGET)),
    "eagle3-deepspec": lambda: eagle_draft(pairs.eagle3(TINY_TARGET, reduced=False, layout=pairs.DEEPSPEC)),
}


@pytest.mark.parametrize("method", DRAFTS)
def test_B43_every_missing_renamed_or_left_over_tensor_is_named(method: str, tmp_path: Path) -> None:
    """Each tensor in turn, whatever its place in the file. A table that a file may leave out is the target's."""
    target, draft = DRAFTS[method]()
    folder = save_drafter(tmp_path / "out", draft)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    load_drafter(folder, target)
    optional = {"embed_tokens.weight", "lm_head.weight", "t2d"} - ({"lm_head.weight"} if method == "eagle3" else set())
    for name in sorted(tensors.keys() - optional):
        rest = {other: value for other, value in tensors.items() if other != name}
        for damaged in (rest, rest | {f"{name}_x": tensors[name]}):
            save_file(damaged, file)
            with pytest.raises(CheckpointError, match=rf"(?<![\w.]){re.escape(name)}(?!\.?\w)"):
                load_drafter(folder, target)
    for name in sorted(tensors):  # the tables that a file may hold among them
        save_file({**tensors, name: np.concatenate([tensors[name]] * 2)}, file)
        with pytest.raises(CheckpointError, match=rf"(?<![\w.]){re.escape(name)}(?!\.?\w)"):
            load_drafter(folder, target)
    save_file({**tensors, "layers.9.self_attn.q_proj.weight": np.zeros((2, 2), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.q_proj\.weight"):
        load_drafter(folder, target)
