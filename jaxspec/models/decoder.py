"""The target: one pre-norm decoder for the Llama, Qwen2 and Qwen3 families, driven by ModelConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.attention import Attend, Attention, DenseCausal
from jaxspec.models.config import ModelConfig
from jaxspec.models.packed import PackedAttention, PackedMLP, is_packed
from jaxspec.models.rope import rotary, rotate
from jaxspec.parallel.rules import whole

Tap = int | str
FINAL = "final"  # the tap after the final norm (the teacher's hidden state)
EMBEDDING = -1  # the tap of the embedding output


class SelfAttention(nnx.Module):
    """Projections, optional q/k norm (before RoPE) and RoPE; the attention itself is given by the caller."""

    def __init__(self, config: ModelConfig):
        dim = config.head_dim
        self.head_dim = dim
        self.q_proj = ly.Linear(config.hidden_size, config.num_heads * dim, config.qkv_bias)
        self.k_proj = ly.Linear(config.hidden_size, config.num_kv_heads * dim, config.qkv_bias)
        self.v_proj = ly.Linear(config.hidden_size, config.num_kv_heads * dim, config.qkv_bias)
        self.o_proj = ly.Linear(config.num_heads * dim, config.hidden_size, config.o_bias)
        self.q_norm = ly.RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = ly.RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotated queries [*rows, heads, D]."""
        return self._heads(self.q_proj(x), self.q_norm, cos, sin)

    def keys_values(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Rotated keys and plain values [*rows, kv heads, D]."""
        values = self.v_proj(x)
        return self._heads(self.k_proj(x), self.k_norm, cos, sin), values.reshape(*values.shape[:-1], -1, self.head_dim)

    def attend(
        self, x: Array, cos: Array, sin: Array, attend: Callable[[Array, Array, Array], tuple[Array, Any]]
    ) -> tuple[Array, Any]:
        """What the caller's attention makes of the rows."""
        keys, values = self.keys_values(x, cos, sin)
        return attend(self.queries(x, cos, sin), keys, values)

    def output(self, mixed: Array) -> Array:
        """[*rows, heads, D] -> [*rows, H]."""
        return self.o_proj(mixed.reshape(*mixed.shape[:-2], -1))

    def _heads(self, x: Array, norm: ly.RMSNorm | None, cos: Array, sin: Array) -> Array:
        x = x.reshape(*x.shape[:-1], -1, self.head_dim)
        return rotate(norm(x) if norm is not None else x, cos, sin)


class DecoderLayer(nnx.Module):
    """Attention and SwiGLU, each behind a pre-norm and a residual; `packed` is the serving form of the weights."""

    def __init__(self, config: ModelConfig, packed: bool = False):
        self.input_layernorm = ly.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = PackedAttention(config) if packed else SelfAttention(config)
        self.post_attention_layernorm = ly.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            PackedMLP(config) if packed else ly.MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        )

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable[[Array, Array, Array], tuple[Array, Any]]
    ) -> tuple[Array, Any]:
        mixed, cache = self.self_attn.attend(self.input_layernorm(x), cos, sin, attend)
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x)), cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderOutput:
    """hidden [*rows, H] after the final norm; features [*rows, T x H] in tap order (T = 0 gives width 0); new
    caches.
    """

    hidden: Float[Array, "*rows H"]
    features: Float[Array, "*rows TH"]
    caches: Any


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Static half of a target: pure functions of a parameter tree whose paths are the checkpoint's tensor names."""

    config: ModelConfig

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Names and shapes that a checkpoint must have, layers as a list."""
        config = self.config
        leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        _, layer = ly.abstract_module(DecoderLayer, config)
        layer = jax.tree.map(lambda x: leaf(*x.shape), layer)
        params: ly.Params = {
            "model": {
                "embed_tokens": {"weight": leaf(config.vocab_size, config.hidden_size)},
                "layers": [layer] * config.num_layers,
                "norm": {"weight": leaf(config.hidden_size)},
            }
        }
        if not config.tie_word_embeddings:
            params["lm_head"] = {"weight": leaf(config.vocab_size, config.hidden_size)}
        return params

    def init(self, key: Array, dtype: Any = jnp.float32, scale: float = 0.05) -> ly.Params:
        """Random weights (norms around one): for tests and dry runs."""
        return random_params(self.abstract_params(dtype), key, scale)

    def embedding(self, params: ly.Params) -> Float[Array, "V H"]:
        """Input embedding table."""
        return params["model"]["embed_tokens"]["weight"]

    def head(self, params: ly.Params) -> Float[Array, "V H"]:
        """Output head; the embedding when the weights are tied."""
        return self.embedding(params) if self.config.tie_word_embeddings else params["lm_head"]["weight"]

    def logits(self, params: ly.Params, hidden: Float[Array, "*rows H"]) -> Float[Array, "*rows V"]:
        """Float32 logits of final-normed hidden states."""
        return ly.unembed(hidden, self.head(params))

    def forward(
        self,
        params: ly.Params,
        tokens: Int[Array, "*rows"],
        positions: Int[Array, "*rows"],
        attention: Attention,
        caches: Any = None,
        taps: Sequence[Tap] = (),
    ) -> DecoderOutput:
        """Runs the decoder over rows of any shape.

        A tap l captures the raw output of layer l (Hugging Face `hidden_states[l + 1]`, the last layer before the final
        norm), EMBEDDING the embedding output, FINAL the normed hidden state.
        """
        self.check_taps(taps)
        config, body = self.config, params["model"]
        x = ly.embed(body["embed_tokens"]["weight"], tokens)
        cos, sin = rotary(config.rope, config.head_dim, positions)
        graph, _ = ly.abstract_module(DecoderLayer, config, is_packed(body["layers"]))

        def run(hidden: Any, weights: ly.Params, cache: Any, window: Any) -> tuple[Any, Any]:
            return ly.bind(graph, weights)(hidden, cos, sin, Attend(attention, cache, window))

        if isinstance(body["layers"], list) and isinstance(x, jax.core.Tracer):
            run = jax.jit(run, static_argnums=3)  # unrolled layers are traced and lowered once, then inlined

        def layer(carry: Any, weights: ly.Params, index: Any, window: Any, cache: Any) -> tuple[Any, Any]:
            hidden, captured = carry
            hidden, cache = run(hidden, weights, cache, window)
            hidden = whole(hidden)
            return (
                hidden,
                tuple(_capture(tap, index, hidden, held) for tap, held in zip(taps, captured, strict=True)),
            ), cache

        windows = [window or 0 for window in config.layer_windows]
        start = (x, tuple(x for _ in taps))
        (x, captured), caches = ly.run_layers(
            layer, start, body["layers"], list(range(config.num_layers)), windows, caches
        )
        norm, _ = ly.abstract_module(ly.RMSNorm, config.hidden_size, config.rms_norm_eps)
        hidden = ly.bind(norm, body["norm"])(x)
        captured = tuple(hidden if tap == FINAL else held for tap, held in zip(taps, captured, strict=True))
        features = jnp.concatenate(captured, axis=-1) if captured else jnp.zeros((*x.shape[:-1], 0), x.dtype)
        return DecoderOutput(hidden, features, caches)

    def forward_sequences(
        self,
        params: ly.Params,
        tokens: Int[Array, "B S"],
        taps: Sequence[Tap] = (),
        lengths: Int[Array, "B"] | None = None,
        attention: Attention | None = None,
    ) -> DecoderOutput:
        """Causal forward of whole sequences, no cache (training, capture, cache-free checks); `attention` in place of
        the dense one must be causal and know the lengths itself."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.forward(params, tokens, positions, attention or DenseCausal(lengths), None, taps)

    def truncated(self, params: ly.Params, taps: Sequence[Tap]) -> tuple[Decoder, ly.Params]:
        """The decoder up to the deepest of `taps`, and its share of the parameters (layers listed or stacked).

        Features come out the same; the hidden state and the logits mean nothing. Where nobody reads those, the rest of
        the target need not run, nor be held.
        """
        self.check_taps(taps)
        if FINAL in taps or not taps:
            return self, params
        depth = max(1, 1 + max(int(tap) for tap in taps))
        config = dataclasses.replace(self.config, num_layers=depth, layer_windows=self.config.layer_windows[:depth])
        layers = params["model"]["layers"]
        kept = layers[:depth] if isinstance(layers, list) else jax.tree.map(lambda x: x[:depth], layers)
        return Decoder(config), {**params, "model": {**params["model"], "layers": kept}}

    def check_taps(self, taps: Sequence[Tap]) -> None:
        """Raises ConfigError for a tap that this target does not have."""
        for tap in taps:
            if tap != FINAL and not (isinstance(tap, int) and EMBEDDING <= tap < self.config.num_layers):
                raise ConfigError(
                    f"target_layer_ids: found {tap!r}, expected layer ids from {EMBEDDING} (embedding) to "
                    f"{self.config.num_layers - 1}, or 'final'"
                )


def _capture(tap: Tap, index: Any, hidden: Array, held: Array) -> Array:
    if isinstance(index, int):
        return hidden if tap == index else held
    return held if tap == FINAL else jnp.where(index == tap, hidden, held)


def random_params(abstract: Any, key: Array, scale: float) -> Any:
    """Normal weights of the given standard deviation; vectors named `...norm...` are drawn around one, biases around
    zero.
    """
    flat = ly.flatten(abstract)
    keys = jax.random.split(key, len(flat))
    made = {}
    for (name, leaf), one in zip(flat.items(), keys, strict=True):
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        made[name] = (offset + scale * jax.random.normal(one, leaf.shape, jnp.float32)).astype(leaf.dtype)
    return ly.unflatten(made)
