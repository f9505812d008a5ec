"""The serving form of a target's layers: q, k and v in one matrix, gate and up in another.

A row or a few of them read the weights once, so a layer's time is its number of launches as much as its bytes. Files
and the trainer keep the checkpoint's names; `pack` copies, at load.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxspec.models import layers as ly
from jaxspec.models.attention import Joined
from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import rotate


class PackedAttention(nnx.Module):
    """`SelfAttention` with one product for q, k and v, and one norm and rotation for q and k."""

    def __init__(self, config: ModelConfig):
        dim, self.heads, self.kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = dim, config.rms_norm_eps
        rotated = self.heads + self.kv_heads
        self.qkv_proj = ly.Linear(config.hidden_size, (rotated + self.kv_heads) * dim, config.qkv_bias)
        self.o_proj = ly.Linear(self.heads * dim, config.hidden_size, config.o_bias)
        self.qk_norm = nnx.Param(jnp.ones((rotated, dim))) if config.qk_norm else None

    def attend(self, x: Array, cos: Array, sin: Array, attend: Any) -> tuple[Array, Any]:
        """What the caller's attention makes of the rows: by its kernel for the joined product where it has one."""
        heads = self.qkv_proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
        norm = None if self.qk_norm is None else self.qk_norm[...]
        if getattr(attend, "joins", False):
            return attend.joined(Joined(heads, norm, self.eps, cos, sin))
        rotated, values = jnp.split(heads, [self.heads + self.kv_heads], axis=-2)
        if norm is not None:
            rotated = ly.rms_norm(rotated, norm, self.eps)
        queries, keys = jnp.split(rotate(rotated, cos, sin), [self.heads], axis=-2)
        return attend(queries, keys, values)

    def output(self, mixed: Array) -> Array:
        """[*rows, heads, D] -> [*rows, H]."""
        return self.o_proj(mixed.reshape(*mixed.shape[:-2], -1))


class PackedMLP(nnx.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, config: ModelConfig):
        self.gate_up_proj = ly.Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = ly.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


def is_packed(layers: Any) -> bool:
    """Whether a target's layers are in the serving form, which a stack of them never is."""
    return isinstance(layers, list) and bool(layers) and "qkv_proj" in layers[0]["self_attn"]


def pack(params: ly.Params, config: ModelConfig) -> ly.Params:
    """The same target with every layer of its list packed, once; tables and norms by reference."""
    body = params["model"]
    if is_packed(body["layers"]):
        return params
    pack_layer = jax.jit(_pack_layer, static_argnums=1)
    return {**params, "model": {**body, "layers": [pack_layer(layer, config) for layer in body["layers"]]}}


def _pack_layer(layer: ly.Params, config: ModelConfig) -> ly.Params:
    attention, mlp = layer["self_attn"], layer["mlp"]
    packed = {"qkv_proj": _joined(attention, "q_proj", "k_proj", "v_proj"), "o_proj": attention["o_proj"]}
    if config.qk_norm:
        counts = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        rows = [jnp.tile(attention[name]["weight"], (count, 1)) for name, count in counts.items()]
        packed["qk_norm"] = jnp.concatenate(rows)
    wide = {"gate_up_proj": _joined(mlp, "gate_proj", "up_proj"), "down_proj": mlp["down_proj"]}
    return {**layer, "self_attn": packed, "mlp": wide}


def _joined(params: ly.Params, *names: str) -> ly.Params:
    """One linear map to the outputs of several."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *(params[name] for name in names))
