"""DFlare (arXiv 2606.02091): DFlash in which every draft layer reads a mixture of the target's layers of its own.

    w     = softmax over the T taps of layer_fusion_weights [L, T]
    f_d   = hidden_norm(sum over t of w[d, t] feature_t)              one learned norm for all layers, after the mix
    K, V of layer d: k_proj_target / v_proj_target of f_d for the context, k_proj / v_proj for the block; one k_norm

There is no `fc`. Rows, mask, rotation, labels and proposals are DFlash's. Training is AngelSlim's recipe: anchors by
the old rule, a decay that flattens with the epochs, weight sum + 1e-6. Checkpoints: `QwenDFlareDraftModel`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters.block import ContextKV, norm
from jaxspec.drafters.dflash import DFlash, DFlashObjective
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayer, SelfAttention
from jaxspec.models.rope import rotary

ARCHITECTURE = "QwenDFlareDraftModel"
NUM_TAPS = 9  # of the published configuration; spread over the target as DFlash spreads its own
FAVOURED = 2.0  # initial fusion weight of a layer's own tap; the others start at 0


@dataclasses.dataclass(frozen=True)
class DFlareObjective(DFlashObjective):
    """AngelSlim's: gamma grows by a half each epoch."""

    gamma_per_epoch: float = 0.5
    denominator_eps: float = 1e-6


class DFlareAttention(SelfAttention):
    """Self-attention with projections of its own for the context."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        width = config.num_kv_heads * config.head_dim
        self.k_proj_target = ly.Linear(config.hidden_size, width, config.qkv_bias)
        self.v_proj_target = ly.Linear(config.hidden_size, width, config.qkv_bias)

    def context_keys_values(self, context: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Rotated keys and plain values [*rows, kv heads, D] of the context."""
        values = self.v_proj_target(context)
        keys = self._heads(self.k_proj_target(context), self.k_norm, cos, sin)
        return keys, values.reshape(*values.shape[:-1], -1, self.head_dim)


class DFlareLayer(DecoderLayer):
    """A decoder layer with DFlare's attention."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.self_attn = DFlareAttention(config)


@dataclasses.dataclass(frozen=True)
class DFlare(DFlash):
    """The method."""

    objective_config: DFlashObjective = DFlareObjective()
    method: str = "dflare"

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was."""
        source = self.config.source_config
        return json.loads(source) if source else self.config.to_hf(ARCHITECTURE, {})

    def layer_module(self) -> tuple[Any, ly.Params]:
        """A layer with two more projections."""
        return ly.abstract_module(DFlareLayer, self.config.model)

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """DFlash's tensors without `fc`, with the fusion weights."""
        params = {name: leaf for name, leaf in super().abstract_params(dtype).items() if name != "fc"}
        fusion = jax.ShapeDtypeStruct((self.config.model.num_layers, len(self.taps)), dtype)
        return {"layer_fusion_weights": fusion, **params}

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> ly.Params:
        """DFlash's initialisation; layer d of L starts out favouring tap floor(d / L * T) of T."""
        params = super().init(key, dtype)
        layers, taps = params["layer_fusion_weights"].shape
        own = jnp.asarray([min(taps - 1, int(layer / layers * taps)) for layer in range(layers)])
        return params | {"layer_fusion_weights": (FAVOURED * jax.nn.one_hot(own, taps)).astype(dtype)}

    def project_context(self, params: ly.Params, features: Float[Array, "*rows TH"]) -> Float[Array, "L *rows H"]:
        """f_d of every draft layer."""
        model, dtype = self.config.model, params["norm"]["weight"].dtype
        shares = jax.nn.softmax(params["layer_fusion_weights"].astype(jnp.float32), axis=-1)
        taps = features.astype(jnp.float32).reshape(*features.shape[:-1], len(self.taps), -1)
        mixed = jnp.einsum("...th,dt->d...h", taps, shares, precision=jax.lax.Precision.HIGHEST)
        return norm(model, params["hidden_norm"], mixed.astype(dtype))

    def context_kv(
        self, params: ly.Params, context: Float[Array, "L *rows H"], positions: Int[Array, "*rows"]
    ) -> ContextKV:
        """Every layer's K and V of its own mixture."""
        model = self.config.model
        cos, sin = rotary(model.rope, model.head_dim, positions)
        graph, _ = self.layer_module()
        return [
            ly.bind(graph, layer).self_attn.context_keys_values(mixed, cos, sin)
            for layer, mixed in zip(params["layers"], context, strict=True)
        ]
