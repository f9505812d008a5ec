"""DSpark: a DFlash backbone whose rows all predict, a Markov head that makes the slots depend on each other, and a
confidence per slot.

Slot k predicts the token at anchor + 1 + k from row k (`sample_from_anchor`, the default), or from row k + 1 as DFlash
does. Checkpoints: DeepSpec (`Qwen3DSparkModel`, flat config, frozen copies of embedding and head inside; its `dflash_*`
releases are this class with rank 0 and no confidence head) and SpecForge / SGLang (`DSparkDraftModel`, nested config).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.drafters import losses, markov
from jaxspec.drafters.base import Batch, Dense, DraftSampling, Proposal, Shared, Slots, Terms
from jaxspec.drafters.block import BlockDrafter
from jaxspec.drafters.block_config import BlockConfig, NestedKeys
from jaxspec.drafters.draws import Purpose, inverse_cdf, uniforms
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.errors import ConfigError
from jaxspec.models import fields
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig
from jaxspec.parallel.rules import anywhere

SPECFORGE, DEEPSPEC = "DSparkDraftModel", "Qwen3DSparkModel"

Draw = Callable[[int, Array], Array]  # (slot, logits [R, V]) -> tokens [R]


@dataclasses.dataclass(frozen=True)
class DSparkObjective:
    """alpha-weighted CE, L1 to the teacher and confidence BCE, each over the decayed weights of its supervised prefix.

    `denominator_eps` is what a recipe adds to the weight sum (DeepSpec 1e-6, SpecForge 0).
    """

    gamma: float | None = 4.0
    ce_alpha: float = 0.1
    l1_alpha: float = 0.9
    confidence_alpha: float = 1.0
    denominator_eps: float = 0.0
    chunk_blocks: int = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """Slots decided left to right: tokens, corrected logits (before any temperature), raw confidence logits."""

    tokens: Int[Array, "R m"]
    logits: Float[Array, "R m V"]
    confidence_logits: Float[Array, "R m"] | None


@dataclasses.dataclass(frozen=True)
class DSpark(BlockDrafter):
    """The method."""

    heads: MarkovConfig = MarkovConfig()
    sample_from_anchor: bool = True
    layout: str = SPECFORGE
    objective_config: DSparkObjective = DSparkObjective()
    temperatures: tuple[float, ...] = ()  # of the confidence, one a slot (drafters.calibration); none: 1
    method: str = "dspark"

    def __post_init__(self) -> None:
        if self.num_proposals < 1:
            raise ConfigError(f"block_size: found {self.config.block_size}, expected room for at least one proposal")
        if self.temperatures and (not self.heads.confidence or len(self.temperatures) != self.num_proposals):
            raise ConfigError(
                f"temperatures: found {len(self.temperatures)}, expected {self.num_proposals}, one a slot of a drafter "
                "with a confidence head"
            )
        if (
            not self.heads.confidence
            and self.objective_config.confidence_alpha
            and self.objective_config != DSparkObjective()
        ):
            raise ConfigError("objective.confidence_alpha: expected 0, since the drafter has no confidence head")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> DSpark:
        """From a public config.json of either layout."""
        key = NestedKeys(config)
        deepspec = (config.get("architectures") or [""])[0] != SPECFORGE

        def enabled(name: str, default: bool) -> bool:
            return bool(fields.flag(name, key(name, default)))

        confidence = enabled("enable_confidence_head", False)
        rank = fields.integer("markov_rank", key("markov_rank", 0), least=0)
        heads = MarkovConfig(
            rank=rank,
            kind=key("markov_head_type", "vanilla"),
            confidence=confidence,
            confidence_with_markov=confidence and enabled("confidence_head_with_markov", rank > 0),
        )
        speculators = config.get("speculators_model_type") == "dspark" or enabled("dspark_bonus_anchor", False)
        eps = 1e-6 if deepspec else 0.0
        return cls(
            BlockConfig.from_hf(config, target),
            heads=heads,
            sample_from_anchor=enabled("sample_from_anchor", not speculators),
            layout=DEEPSPEC if deepspec else SPECFORGE,
            objective_config=DSparkObjective(denominator_eps=eps, confidence_alpha=1.0 if confidence else 0.0),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was. DeepSpec's layout is flat."""
        if self.config.source_config:
            return json.loads(self.config.source_config)
        heads: dict[str, Any] = {"markov_rank": self.heads.rank, "enable_confidence_head": self.heads.confidence}
        if self.heads.rank:
            heads["markov_head_type"] = self.heads.kind
        if self.heads.confidence:
            heads["confidence_head_with_markov"] = self.heads.confidence_with_markov
        if not self.sample_from_anchor:
            heads["sample_from_anchor"] = False
        if self.layout == SPECFORGE:
            return self.config.to_hf(SPECFORGE, {"projector_type": "dspark", "attention_mode": "gqa", **heads})
        flat = self.config.to_hf(DEEPSPEC, heads)
        nested = flat.pop("dflash_config")
        return {**flat, **nested}

    @property
    def own_embeddings(self) -> bool:
        """Whether the checkpoint carries frozen copies of the target's embedding and head."""
        return self.layout == DEEPSPEC

    @property
    def first_row(self) -> int:
        """Block row of slot 0."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_proposals(self) -> int:
        """m = B, or B - 1 where the anchor row predicts nothing."""
        return self.config.block_size - self.first_row

    @property
    def needs_teacher(self) -> bool:
        """L1 and confidence compare with the target's own distribution."""
        objective = self.objective_config
        return objective.l1_alpha > 0 or (self.heads.confidence and objective.confidence_alpha > 0)

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Backbone and heads."""
        model = self.config.model
        heads = markov.abstract_params(self.heads, model.vocab_size, model.hidden_size, dtype)
        return super().abstract_params(dtype) | heads

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """m tokens a request, drawn left to right; q is the softmax each was drawn from (a point for greedy
        requests).
        """
        hidden = self.block_hidden(params, shared, state, slots)[:, self.first_row :]
        positions = slots.positions[:, None] + 1 + jnp.arange(self.num_proposals)
        u = uniforms(keys, positions, Purpose.DRAFT)
        probs: list[Array] = []

        sampled = jnp.any(~sampling.greedy)

        def draw(slot: int, logits: Array) -> Array:
            # All-greedy rounds never read q: neither the softmax over the vocabulary nor its cumulative sum is run.
            best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

            def drawn(logits: Array) -> tuple[Array, Array]:
                q = sampling.draft_probs(logits)
                return q, jnp.where(sampling.greedy, best, inverse_cdf(q, u[:, slot]))

            q, token = jax.lax.cond(anywhere(sampled), drawn, lambda logits: (jnp.zeros_like(logits), best), logits)
            probs.append(q)
            return token

        walk = self.walk(params, shared, hidden, slots.anchors, draw)
        q, trace = Dense(jnp.stack(probs, axis=1)), {"draft_hidden": hidden}
        if walk.confidence_logits is None:
            return Proposal(walk.tokens, q, trace=trace)
        trace["confidence_logits"] = walk.confidence_logits
        return Proposal(walk.tokens, q, self._confidence(walk.confidence_logits), trace=trace)

    def _confidence(self, logits: Float[Array, "R m"]) -> Float[Array, "R m"]:
        temperatures = jnp.asarray(self.temperatures, jnp.float32) if self.temperatures else None
        return markov.calibrate(logits, temperatures)

    def walk(
        self,
        params: Any,
        shared: Shared,
        hidden: Float[Array, "R m H"],
        anchors: Int[Array, "R"],
        draw: Draw | None = None,
    ) -> Walk:
        """Decides the slots one after the other; each sees the token before it. No `draw` = argmax."""
        base = self.block_logits(shared, hidden)
        state = jnp.zeros((hidden.shape[0], self.heads.rank), hidden.dtype)
        prev, tokens, logits, confidence = anchors, [], [], []
        for slot in range(hidden.shape[1]):
            corrected = base[:, slot]
            if self.heads.rank:
                state, z = markov.step(self.heads, params, state, hidden[:, slot], prev)
                corrected = corrected + markov.correction(params, z)
            if self.heads.confidence:
                confidence.append(markov.confidence_logits(self.heads, params, hidden[:, slot], prev))
            prev = (jnp.argmax(corrected, axis=-1) if draw is None else draw(slot, corrected)).astype(jnp.int32)
            tokens.append(prev)
            logits.append(corrected)
        stack = lambda xs: jnp.stack(xs, axis=1)  # noqa: E731
        return Walk(stack(tokens), stack(logits), stack(confidence) if confidence else None)

    # -- training -----------------------------------------------------------------------------------------------------

    def labels(
        self, batch: Batch
    ) -> tuple[Int[Array, "B N m"], Int[Array, "B N m"], Bool[Array, "B N m"], Int[Array, "B N m"]]:
        """Labels (token at anchor + 1 + k), previous tokens, supervised prefix (the first hole ends a block), and the
        teacher's row for each label (label position - 1). Dropped blocks point at position 0."""
        index = batch.anchors[:, :, None] + 1 + jnp.arange(self.num_proposals)
        last = batch.input_ids.shape[1] - 1
        label_index = jnp.where(batch.keep[:, :, None], jnp.minimum(index, last), 0)
        flat = label_index.reshape(index.shape[0], -1)
        labels = jnp.take_along_axis(batch.input_ids, flat, axis=1).reshape(index.shape)
        supervised = jnp.take_along_axis(batch.loss_mask, flat, axis=1).reshape(index.shape)
        anchors = jnp.take_along_axis(batch.input_ids, batch.anchors, axis=1)
        prev = jnp.concatenate([anchors[:, :, None], labels[:, :, :-1]], axis=-1)
        mask = losses.contiguous(batch.keep[:, :, None] & (index <= last) & supervised)
        return labels, prev, mask, jnp.maximum(label_index - 1, 0)

    def token_terms(
        self,
        params: Any,
        shared: Shared,
        hidden: Float[Array, "C m H"],
        z: Float[Array, "C m r"],
        labels: Int[Array, "C m"],
        confidence: Float[Array, "C m"],
        teacher_hidden: Float[Array, "C m H"],
    ) -> dict[str, Array]:
        """Per-token losses and statistics of a slice of blocks; the only place where [., V] arrays exist."""
        objective = self.objective_config
        logits = self.draft_logits(params, shared, hidden, z)
        best = jnp.argmax(logits, axis=-1)
        terms = {
            "ce": losses.negative_log_likelihood(logits, labels),
            "correct": (best == labels).astype(jnp.float32),
            "draft_top1": jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1),
        }
        zero = jnp.zeros(labels.shape, jnp.float32)
        if not self.needs_teacher:
            return terms | {
                name: zero for name in ("l1", "bce", "accept", "confidence_error", "agreement", "teacher_top1")
            }
        teacher = jax.lax.stop_gradient(ly.unembed(teacher_hidden, shared.head))
        p = jax.nn.softmax(teacher, axis=-1)
        l1 = jnp.sum(jnp.abs(p - jax.nn.softmax(logits, axis=-1)), axis=-1)
        accept = jax.lax.stop_gradient(jnp.clip(1 - 0.5 * l1, 0, 1))
        scored = self.heads.confidence and objective.confidence_alpha > 0
        return terms | {
            "l1": l1 if objective.l1_alpha > 0 else zero,
            "bce": losses.binary_cross_entropy(confidence, accept) if scored else zero,
            "accept": accept,
            "confidence_error": jnp.abs(jax.nn.sigmoid(confidence) - accept) if scored else zero,
            "agreement": (best == jnp.argmax(teacher, axis=-1)).astype(jnp.float32),
            "teacher_top1": jnp.max(p, axis=-1),
        }

    def draft_logits(
        self, params: Any, shared: Shared, hidden: Float[Array, "*b m H"], z: Float[Array, "*b m r"]
    ) -> Float[Array, "*b m V"]:
        """Block logits corrected by the Markov head."""
        base = self.block_logits(shared, hidden)
        return base + markov.correction(params, z) if self.heads.rank else base

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Terms "ce", "l1", "confidence" over the decayed weights, and metrics over the supervised slots."""
        inputs, mask = self._token_inputs(params, shared, batch)
        chunk = self.objective_config.chunk_blocks
        tokens = losses.in_chunks(lambda *xs: self.token_terms(params, shared, *xs), chunk, *inputs)
        supervised = mask.astype(jnp.float32)
        weights = supervised * losses.position_decay(self.num_proposals, self.objective_config.gamma)
        total, count, axes = jnp.sum(weights), jnp.sum(supervised), (0, 1)
        blocks = jnp.any(mask, axis=-1).astype(jnp.float32)
        tau = 1 + jnp.sum(jnp.cumprod(tokens["accept"] * supervised, axis=-1), axis=-1)
        plain = lambda name: (losses.weighted_sum(tokens[name], supervised), count)  # noqa: E731
        decayed = lambda name, on: (losses.weighted_sum(tokens[name], weights), total * on)  # noqa: E731
        by_slot = lambda name: (jnp.sum(jnp.where(mask, tokens[name], 0.0), axes), jnp.sum(supervised, axes))  # noqa: E731
        return {
            "ce": decayed("ce", 1.0),
            "l1": decayed("l1", float(self.objective_config.l1_alpha > 0)),
            "confidence": decayed("bce", float(self.heads.confidence and self.objective_config.confidence_alpha > 0)),
            "metric/accuracy": plain("correct"),
            "metric/confidence_abs_error": decayed("confidence_error", 1.0),
            "metric/ce_position": by_slot("ce"),
            "metric/accuracy_position": by_slot("correct"),
            "metric/accept_position": by_slot("accept"),
            "metric/teacher_agreement": plain("agreement"),
            "metric/teacher_top1_prob": plain("teacher_top1"),
            "metric/draft_top1_prob": plain("draft_top1"),
            "metric/tau_probabilistic": (jnp.sum(tau * blocks), jnp.sum(blocks)),
            **losses.greedy_acceptance(tokens["correct"], supervised),
        }

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """alpha-weighted sum of the three ratios; a term that nothing weighs adds 0."""
        objective = self.objective_config
        alphas = {"ce": objective.ce_alpha, "l1": objective.l1_alpha, "confidence": objective.confidence_alpha}
        parts = [
            alpha * losses.ratio(*terms[name], objective.denominator_eps) for name, alpha in alphas.items() if alpha
        ]
        return sum(parts, jnp.zeros(()))

    def trace(self, params: Any, shared: Shared, batch: Batch) -> dict[str, Array]:
        """The intermediates of `loss`, unchunked (golden cases, debugging)."""
        (hidden, z, labels, confidence, teacher_hidden), mask = self._token_inputs(params, shared, batch)
        tokens = self.token_terms(params, shared, hidden, z, labels, confidence, teacher_hidden)
        rows = self.training_hidden(params, shared, batch)
        weights = mask * losses.position_decay(self.num_proposals, self.objective_config.gamma)
        trace = self.layout_trace(shared, batch, rows.dtype) | {
            "output_hidden": rows,
            "base_logits": self.block_logits(shared, hidden),
            "draft_logits": self.draft_logits(params, shared, hidden, z),
            "target_ids": labels,
            "prev_token_ids": self.labels(batch)[1],
            "eval_mask": mask,
            "loss_weights": weights,
            "ce_per_token": tokens["ce"],
            "l1_per_token": tokens["l1"],
            "confidence_bce_per_token": tokens["bce"],
        }
        if batch.teacher_hidden is not None:
            trace["aligned_target_hidden"] = teacher_hidden
            trace["teacher_logits"] = ly.unembed(teacher_hidden, shared.head)
        return trace | ({"confidence_logits": confidence} if self.heads.confidence else {})

    def _token_inputs(self, params: Any, shared: Shared, batch: Batch) -> tuple[tuple[Array, ...], Array]:
        labels, prev, mask, teacher_index = self.labels(batch)
        hidden = self.training_hidden(params, shared, batch)[:, :, self.first_row :]
        z = markov.latents(self.heads, params, hidden, prev) if self.heads.rank else hidden[..., :0]
        confidence = jnp.zeros(labels.shape, jnp.float32)
        if self.heads.confidence:
            confidence = markov.confidence_logits(self.heads, params, hidden, prev)
        teacher = hidden[..., :0]
        if batch.teacher_hidden is not None:
            flat = teacher_index.reshape(labels.shape[0], -1, 1)
            teacher = jnp.take_along_axis(batch.teacher_hidden, flat, axis=1).reshape(*labels.shape, -1)
        elif self.needs_teacher:
            raise ConfigError(
                "batch.teacher_hidden: missing, expected the target's final hidden states (tap 'final'): the L1 "
                "and confidence terms compare with the target's own distribution"
            )
        return (hidden, z, labels, confidence, teacher), mask


def with_fresh_heads(
    drafter: BlockDrafter, params: ly.Params, key: Key[Array, ""], heads: MarkovConfig
) -> tuple[DSpark, ly.Params]:
    """A DSpark that computes exactly what a DFlash with these weights does, to be trained further: `key` draws its
    heads, and a zero W2 keeps them silent.

    Every row predicts what it did: DeepSpec's `dflash_*` (a DSpark without heads) uses the anchor's, a z-lab DFlash
    does not.
    """
    deepspec = isinstance(drafter, DSpark) and drafter.layout == DEEPSPEC
    grown = DSpark(
        dataclasses.replace(drafter.config, source_config=None),
        heads=heads,
        sample_from_anchor=isinstance(drafter, DSpark) and drafter.sample_from_anchor,
        layout=DEEPSPEC if deepspec else SPECFORGE,
        objective_config=DSparkObjective(
            denominator_eps=1e-6 if deepspec else 0.0, confidence_alpha=1.0 if heads.confidence else 0.0
        ),
    )
    fresh = {**grown.init(key, params["norm"]["weight"].dtype), **params}
    if heads.rank:
        silent = jax.tree.map(jnp.zeros_like, fresh["markov_head"]["markov_w2"])
        fresh["markov_head"] = {**fresh["markov_head"], "markov_w2": silent}
    return grown, fresh
