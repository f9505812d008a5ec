"""EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858): autoregression on the target's last feature.

x_t = fc([E(x_{t+1}); f_t]) goes through one decoder layer without an input norm; what comes out is the next feature
f_{t+1}, and the target's own head reads it. f is the final-normed hidden state, so there is no norm at the end either.
EAGLE proposes a fixed tree of child ranks (`StaticTree`), EAGLE-2 expands and reranks one (`DynamicTree`); the weights
are the same. Checkpoint: the target's own config with one layer, no head, a copy of the input embedding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxspec.drafters import losses
from jaxspec.drafters.base import Batch, Drafter, Shared, Terms
from jaxspec.drafters.draft_tree import DraftTree, DynamicTree
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.drafters.fresh import fresh_params
from jaxspec.drafters.lookahead import Causal
from jaxspec.drafters.recurrent import RecurrentDrafter, supervised_rows
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import FINAL, SelfAttention

ARCHITECTURE = "LlamaForCausalLM"
_NOISE_LENGTH = 512  # the noise is as wide as for a sequence of this length


@dataclasses.dataclass(frozen=True)
class EagleObjective:
    """Smooth L1 to the next feature and soft cross-entropy to the target's distribution, each over the supervised rows.

    `noise` widens uniform noise on the input features: (u - 0.5) * noise * 512 / length of the sequence.
    """

    feature_alpha: float = 1.0
    token_alpha: float = 0.1
    noise: float = 0.2
    denominator_eps: float = 1e-5
    drop_last_row: bool = True
    chunk_rows: int = 1024

    def __post_init__(self) -> None:
        for name in ("feature_alpha", "token_alpha", "noise"):
            if getattr(self, name) < 0:
                raise ConfigError(f"objective.{name}: found {getattr(self, name)}, expected 0 or more")
        if not self.feature_alpha and not self.token_alpha:
            raise ConfigError("objective.feature_alpha and objective.token_alpha: both are 0, expected one to train")


class EagleLayer(nnx.Module):
    """A decoder layer without the norm before its attention."""

    def __init__(self, config: ModelConfig):
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = ly.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = ly.MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Any) -> tuple[Array, Any]:
        keys, values = self.self_attn.keys_values(x, cos, sin)
        mixed, cache = attend(self.self_attn.queries(x, cos, sin), keys, values)
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x)), cache


@dataclasses.dataclass(frozen=True)
class Eagle(RecurrentDrafter):
    """The method. `tree` is EAGLE-2's by default; `StaticTree()` is EAGLE's, None a chain."""

    tree: DraftTree | None = DynamicTree()
    fc_bias: bool = True
    objective_config: EagleObjective = EagleObjective()
    method: str = "eagle"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> Drafter:
        """From a public config.json. The official EAGLE-3 files carry the same architecture and a draft vocabulary."""
        if config.get("draft_vocab_size") is not None:
            return Eagle3.from_hf(config, target)
        eagle = EagleConfig.from_hf(config, target, (FINAL,))
        if eagle.own_embedding:
            raise ConfigError(
                f"hidden_size: found {eagle.model.hidden_size}, expected the target's {target.hidden_size}: its head "
                "reads what the drafter returns"
            )
        return cls(eagle, tree=_fitting(eagle.draft_vocab), fc_bias=bool(config.get("bias", True)))

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was."""
        if self.config.source_config:
            return json.loads(self.config.source_config)
        return {**self.config.model.to_hf(), "architectures": [ARCHITECTURE], "bias": self.fc_bias}

    @property
    def needs_teacher(self) -> bool:
        """The features are the teacher."""
        return False

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Names and shapes of the checkpoint's tensors; its embedding is the target's."""
        size = self.config.model.hidden_size
        leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        _, layer = ly.abstract_module(EagleLayer, self.config.model)
        fc = {"weight": leaf(size, 2 * size)} | ({"bias": leaf(size)} if self.fc_bias else {})
        return {"fc": fc, "layers": [jax.tree.map(lambda x: leaf(*x.shape), layer)]}

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> ly.Params:
        """Normal(0, 0.02) matrices, norms at one, biases at zero."""
        return fresh_params(self.abstract_params(dtype), key)

    # -- forward ------------------------------------------------------------------------------------------------------

    def fuse(self, params: ly.Params, features: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """The target's feature is a state already."""
        return features.astype(params["fc"]["weight"].dtype)

    def layer(
        self, params: ly.Params, shared: Shared, states: Array, tokens: Array, positions: Array, attention: Any,
        cache: Any = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """The next feature from a feature and the token after it; the embedding comes first."""
        graph, _ = ly.abstract_module(EagleLayer, self.config.model)
        embedded = self.embed(params, shared, tokens, states.dtype)
        x = ly.project(jnp.concatenate([embedded, states], axis=-1), params["fc"]["weight"])
        if self.fc_bias:
            x = x + params["fc"]["bias"].astype(x.dtype)
        attend = lambda q, k, v: attention(q, k, v, cache, 0)  # noqa: E731
        return ly.bind(graph, params["layers"][0])(x, *self.rotary(positions), attend)

    def draft_logits(self, params: ly.Params, shared: Shared, states: Float[Array, "*rows H"]) -> Array:
        """The target's head, without a norm."""
        return ly.unembed(states, shared.head)

    # -- training -----------------------------------------------------------------------------------------------------

    def predict(
        self, params: ly.Params, shared: Shared, batch: Batch, features: Float[Array, "B S H"]
    ) -> Float[Array, "B S H"]:
        """The predicted next feature of every row; the last row's next token is 0."""
        tokens = jnp.pad(batch.input_ids[:, 1:], ((0, 0), (0, 1)))
        rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.layer(params, shared, self.fuse(params, features), tokens, rows, Causal(batch.lengths))[0]

    def noisy(self, batch: Batch, key: Key[Array, ""]) -> Float[Array, "B S H"]:
        """The features with uniform noise, narrower on longer sequences."""
        if not self.objective_config.noise:
            return batch.features
        lengths = batch.lengths
        if lengths is None:  # a sequence ends with what is supervised, or soon after
            positions = jnp.arange(1, batch.input_ids.shape[1] + 1)
            lengths = jnp.max(jnp.where(batch.loss_mask, positions, 1), axis=1)
        scale = self.objective_config.noise * _NOISE_LENGTH / lengths[:, None, None]
        noise = (jax.random.uniform(key, batch.features.shape, jnp.float32) - 0.5) * scale
        return batch.features + noise.astype(batch.features.dtype)

    def token_terms(
        self, shared: Shared, predicted: Float[Array, "C H"], target: Float[Array, "C H"]
    ) -> dict[str, Array]:
        """Per-row losses of a slice; the only place where [., V] arrays exist."""
        log_q = jax.nn.log_softmax(ly.unembed(predicted, shared.head), axis=-1)
        teacher = ly.unembed(target, shared.head)
        return {
            "feature": jnp.mean(losses.smooth_l1(predicted.astype(jnp.float32) - target.astype(jnp.float32)), axis=-1),
            "token": -jnp.sum(jax.nn.softmax(teacher, axis=-1) * log_q, axis=-1),
            "correct": (jnp.argmax(log_q, axis=-1) == jnp.argmax(teacher, axis=-1)).astype(jnp.float32),
        }

    def loss(self, params: ly.Params, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Terms "feature" and "token" over the supervised rows."""
        target = jax.lax.stop_gradient(jnp.pad(batch.features[:, 1:], ((0, 0), (0, 1), (0, 0))))
        predicted = self.predict(params, shared, batch, self.noisy(batch, key))
        chunk = self.objective_config.chunk_rows
        rows = losses.in_chunks(lambda *xs: self.token_terms(shared, *xs), chunk, predicted, target)
        mask = supervised_rows(batch, self.objective_config.drop_last_row).astype(jnp.float32)
        total = jnp.sum(mask)
        return {
            "feature": (losses.weighted_sum(rows["feature"], mask), total),
            "token": (losses.weighted_sum(rows["token"], mask), total),
            "metric/accuracy": (losses.weighted_sum(rows["correct"], mask), total),
        }

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """Alpha-weighted sum."""
        objective = self.objective_config
        feature, token = (losses.ratio(*terms[name], objective.denominator_eps) for name in ("feature", "token"))
        return objective.feature_alpha * feature + objective.token_alpha * token

    def trace(self, params: ly.Params, shared: Shared, batch: Batch) -> dict[str, Array]:
        """The prediction without noise and the two losses (golden cases, debugging)."""
        quiet = dataclasses.replace(self, objective_config=dataclasses.replace(self.objective_config, noise=0.0))
        terms, eps = quiet.loss(params, shared, batch, jax.random.key(0)), self.objective_config.denominator_eps
        return {
            "predict": self.predict(params, shared, batch, batch.features),
            "vloss": losses.ratio(*terms["feature"], eps),
            "ploss": losses.ratio(*terms["token"], eps),
        }


def _fitting(vocab: int) -> DynamicTree:
    """EAGLE-2's default tree, narrower where the vocabulary is tiny."""
    tree = DynamicTree()
    if tree.top_k <= vocab:
        return tree
    narrow = DynamicTree(top_k=vocab, nodes=1)
    return dataclasses.replace(narrow, nodes=min(tree.nodes, narrow.candidates))
