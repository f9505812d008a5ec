"""Tiny GGUF files as llama.cpp's converter writes them, from the Hugging Face tensors they should turn back into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"]
TOKENS = [*CONTROL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models: row i of a head's halves go side by side."""
    out = np.empty_like(rows)
    dim = rows.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            for half in range(2):
                out[head * dim + 2 * i + half] = rows[head * dim + half * dim // 2 + i]
    return out


def hf_tensors(arch: str, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names; values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-64, 65, shape).astype(np.float32) / 64  # noqa: E731
    tensors = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = draw(len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes = {"q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "v": (KV_HEADS * DIM, HIDDEN)}
        for letter, shape in shapes.items():
            tensors[f"{at}self_attn.{letter}_proj.weight"] = draw(*shape)
            if arch == "qwen2":
                tensors[f"{at}self_attn.{letter}_proj.bias"] = draw(shape[0])
        tensors[f"{at}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * DIM)
        tensors[f"{at}mlp.gate_proj.weight"], tensors[f"{at}mlp.up_proj.weight"] = (
            draw(INNER, HIDDEN),
            draw(INNER, HIDDEN),
        )
        tensors[f"{at}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        tensors[f"{at}input_layernorm.weight"], tensors[f"{at}post_attention_layernorm.weight"] = (
            draw(HIDDEN),
            draw(HIDDEN),
        )
        if arch == "qwen3":
            tensors[f"{at}self_attn.q_norm.weight"], tensors[f"{at}self_attn.k_norm.weight"] = draw(DIM), draw(DIM)
    return tensors


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def write_gguf(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    *,
    pre: str = "smollm",
    quantise: gguf.GGMLQuantizationType | None = None,
    fields: dict[str, Any] | None = None,
    raw: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file. `fields` changes or (None) drops key-values, `raw` adds tensors under GGUF names."""
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 1e6,
        "general.name": "Tiny",
        "general.license": "apache-2.0",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    values |= fields or {}
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in tensors.items():
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else 0
        stored = permute(value, heads) if arch == "llama" and heads else value
        if quantise is not None and value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), stored)
    for name, value in (raw or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
