"""A decoder written once more, in plain float64 numpy loops: one sequence, one head, one query at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers import flatten, unflatten


def random_weights(decoder: Any, scale: float, seed: int = 5) -> Any:
    """Parameters drawn in numpy, norm weights around one: nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    drawn = {
        name: (1.0 if "norm" in name else 0.0) + scale * rng.normal(size=leaf.shape)
        for name, leaf in flatten(decoder.abstract_params()).items()
    }
    return unflatten({name: jnp.asarray(value, jnp.float32) for name, value in drawn.items()})


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(vector: np.ndarray, position: int, frequencies: np.ndarray, amplitude: float) -> np.ndarray:
    half = len(vector) // 2
    out = np.empty_like(vector)
    for i in range(half):
        c, s = np.cos(position * frequencies[i]) * amplitude, np.sin(position * frequencies[i]) * amplitude
        out[i] = vector[i] * c - vector[i + half] * s
        out[i + half] = vector[i + half] * c + vector[i] * s
    return out


def decode(
    flat: dict, hf: dict, tokens: list[int], windows: list, frequencies: np.ndarray, amplitude: float = 1.0
) -> dict:
    """`flat`: checkpoint names -> arrays. Returns {"embedding", 0, 1, …, "final", "logits"}: [S, …] each."""
    w = {name: np.asarray(value, np.float64) for name, value in flat.items()}
    eps, heads, kv_heads = hf["rms_norm_eps"], hf["num_attention_heads"], hf["num_key_value_heads"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    x = w["model.embed_tokens.weight"][tokens]
    out = {"embedding": x.copy()}

    def linear(name: str, rows: np.ndarray) -> np.ndarray:
        y = rows @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    for layer in range(hf["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
        q, k, v = (linear(f"{at}.self_attn.{name}_proj", normed).reshape(len(tokens), -1, dim) for name in "qkv")
        if f"{at}.self_attn.q_norm.weight" in w:
            q = rms_norm(q, w[f"{at}.self_attn.q_norm.weight"], eps)
            k = rms_norm(k, w[f"{at}.self_attn.k_norm.weight"], eps)
        mixed = np.zeros((len(tokens), heads, dim))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            for i in range(len(tokens)):
                first = 0 if windows[layer] is None else max(0, i - windows[layer] + 1)
                query = turn(q[i, head], i, frequencies, amplitude)
                seen = range(first, i + 1)
                row = np.array([query @ turn(k[j, kv], j, frequencies, amplitude) for j in seen])
                weights = softmax(row / np.sqrt(dim))
                mixed[i, head] = sum(weight * v[j, kv] for weight, j in zip(weights, seen, strict=True))
        x = x + linear(f"{at}.self_attn.o_proj", mixed.reshape(len(tokens), -1))
        normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate = linear(f"{at}.mlp.gate_proj", normed)
        x = x + linear(f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{at}.mlp.up_proj", normed))
        out[layer] = x.copy()
    out["final"] = rms_norm(x, w["model.norm.weight"], eps)
    head = w["lm_head.weight"] if "lm_head.weight" in w else w["model.embed_tokens.weight"]
    out["logits"] = out["final"] @ head.T
    return out
