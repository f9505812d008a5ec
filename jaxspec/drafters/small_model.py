"""A smaller language model as the drafter (Leviathan et al. 2023): any supported target family, as it was trained.

It reads no features: it keeps its own K/V of the committed tokens and is decoded m times a round with the request's own
temperature and filters, so q is exactly the distribution that each token was drawn from. The K/V of its guesses are
scratch; commit writes those of the tokens that stood.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters.base import Batch, Dense, DraftSampling, Proposal, Rows, Shared, Slots, Terms
from jaxspec.drafters.confidence import survival
from jaxspec.drafters.draws import Purpose, inverse_cdf, uniforms
from jaxspec.errors import ConfigError
from jaxspec.models.attention import PagedCausal, Window
from jaxspec.models.cache import KVPool, gather, init_pool
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Tap
from jaxspec.models.layout import RaggedLayout
from jaxspec.parallel.rules import anywhere
from pallas_kernels.softmax import masked_softmax, mix, scores


@dataclasses.dataclass(frozen=True)
class SmallModel:
    """The method. `source_config` is the JSON text of the model's config.json; `survival_confidence` adds a
    confidence."""

    model: Decoder
    num_proposals: int = 5
    survival_confidence: bool = False
    source_config: str | None = None
    method: str = "small_model"
    taps: tuple[Tap, ...] = ()
    tree_nodes: int = 0
    tree_acceptance: str = "rejection"
    needs_teacher: bool = False

    def __post_init__(self) -> None:
        if self.num_proposals < 1:
            raise ConfigError(f"engine.num_proposals: found {self.num_proposals}, expected at least 1")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> SmallModel:
        """From a language model's config.json. Raises ConfigError where its vocabulary is not the target's."""
        model = ModelConfig.from_hf(config)
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"vocab_size: the small model has {model.vocab_size}, expected the target's {target.vocab_size}: it "
                "proposes ids that the target must know by the same numbers"
            )
        return cls(Decoder(model), source_config=json.dumps(dict(config)))

    def to_hf(self) -> dict[str, Any]:
        """The model's own config.json. Raises ConfigError for a model that was made in memory."""
        if self.source_config is None:
            raise ConfigError("config.json: found none, expected that of a loaded model: this one was made in memory")
        return json.loads(self.source_config)

    def abstract_params(self, dtype: Any = jnp.float32) -> Any:
        """The model's."""
        return self.model.abstract_params(dtype)

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> Any:
        """Random weights."""
        return self.model.init(key, dtype)

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> list[KVPool]:
        """One K/V pool a layer, for committed tokens only."""
        config = self.model.config
        return [
            init_pool(num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)
            for _ in range(config.num_layers)
        ]

    def commit(
        self, params: Any, shared: Shared, state: list[KVPool], rows: Rows, layout: RaggedLayout
    ) -> list[KVPool]:
        """Runs the committed tokens over the ones before them; the hidden states are of no use here."""
        out = self.model.forward(params, rows.tokens, layout.positions, PagedCausal(layout), state)
        return out.caches

    def propose(
        self,
        params: Any,
        shared: Shared,
        state: list[KVPool],
        slots: Slots,
        keys: Key[Array, "R"],
        sampling: DraftSampling,
    ) -> Proposal:
        """m tokens a request, one forward each."""
        requests, m, config = slots.anchors.shape[0], self.num_proposals, self.model.config
        u = uniforms(keys, slots.positions[:, None] + 1 + jnp.arange(m), Purpose.DRAFT)
        context = [gather(pool, slots.page_table, slots.positions) for pool in state]
        blank = jnp.zeros((requests, m, config.num_kv_heads, config.head_dim), state[0].dtype)
        scratch = [(blank, blank)] * config.num_layers
        sampled = anywhere(jnp.any(~sampling.greedy))

        def step(carry: Any, now: tuple[Array, Array]) -> tuple[Any, Any]:
            tokens, scratch = carry
            index, u_now = now
            attention = _OverScratch(slots.positions, index)
            caches = [(*known, *own) for known, own in zip(context, scratch, strict=True)]
            out = self.model.forward(params, tokens, slots.positions + index, attention, caches)
            logits = self.model.logits(params, out.hidden)
            # All-greedy rounds never read q, so the softmax over the vocabulary is skipped.
            probs = jax.lax.cond(sampled, sampling.draft_probs, jnp.zeros_like, logits)
            best = jnp.argmax(logits, axis=-1)
            tokens = jnp.where(sampling.greedy, best, inverse_cdf(probs, u_now)).astype(jnp.int32)
            confidence = survival(logits[:, None], sampling)[:, 0] if self.survival_confidence else u_now
            return (tokens, out.caches), (tokens, probs, confidence)

        _, made = jax.lax.scan(step, (slots.anchors.astype(jnp.int32), scratch), (jnp.arange(m), u.T))
        tokens, probs, confidence = (jnp.moveaxis(x, 0, 1) for x in made)
        return Proposal(tokens, Dense(probs), confidence if self.survival_confidence else None)

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Raises ConfigError: a language model is trained elsewhere."""
        raise ConfigError("drafter.method: found 'small_model', expected a method that is trained against a target")

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """Raises ConfigError: a language model is trained elsewhere."""
        raise ConfigError("drafter.method: found 'small_model', expected a method that is trained against a target")


@dataclasses.dataclass(frozen=True)
class _OverScratch:
    """One row a request at position `positions` + `index`, over the committed context and the guesses before it.

    A layer's cache is (context K, context V [R, L, kv heads, D], scratch K, V [R, m, kv heads, D]); the scratch comes
    back.
    """

    positions: Int[Array, "R"]
    index: Int[Array, ""]

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Window) -> tuple[Array, Any]:
        context_keys, context_values, keys, values = cache
        keys, values = _put(keys, k, self.index), _put(values, v, self.index)
        slot, guess = jnp.arange(context_keys.shape[1]), jnp.arange(keys.shape[1])
        start = self.positions[:, None]
        distance = jnp.concatenate(
            [start + self.index - slot, jnp.broadcast_to(self.index - guess, (start.shape[0], guess.shape[0]))], axis=1
        )
        known = jnp.concatenate([slot < start, jnp.ones((start.shape[0], guess.shape[0]), bool)], axis=1)
        mask = known & (distance >= 0) & ((window == 0) | (distance < window))
        every = lambda context, own: jnp.concatenate([context, own], axis=1)  # noqa: E731
        mixed = mix(
            masked_softmax(scores(q[:, None], every(context_keys, keys)), mask[:, None, None, None]),
            every(context_values, values),
        )
        return mixed[:, 0].astype(q.dtype), (keys, values)


def _put(scratch: Array, row: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(scratch, row.astype(scratch.dtype), index, axis=1)
