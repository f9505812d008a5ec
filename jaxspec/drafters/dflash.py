"""DFlash (arXiv 2602.06036): a block of mask rows behind the anchor, all proposals in one forward.

Row 0 (the anchor) is fed but predicts nothing; row j predicts the token at anchor + j, so a block of B rows gives B - 1
proposals. Checkpoints: z-lab and SpecForge (`DFlashDraftModel`), without embedding and head.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters import losses
from jaxspec.drafters.base import Batch, Dense, DraftSampling, Point, Proposal, Shared, Slots, Terms
from jaxspec.drafters.block import BlockDrafter
from jaxspec.drafters.block_config import BlockConfig
from jaxspec.drafters.confidence import survival
from jaxspec.drafters.draws import Purpose, inverse_cdf, uniforms
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
LK = (None, "alpha", "lambda", "tv")


@dataclasses.dataclass(frozen=True)
class DFlashObjective:
    """Weighted CE; gamma decays with the position (None: flat), D-PACE replaces the decay, LK adds total variation.

    `gamma_per_epoch` makes the decay progressive: gamma + gamma_per_epoch x (passes through the data so far).
    `denominator_eps` is what a recipe adds to the weight sum (AngelSlim 1e-6, SpecForge 0).
    """

    gamma: float | None = 7.0
    gamma_per_epoch: float = 0.0
    loss_type: str = "weighted_ce"
    dpace_alpha: float = 0.5
    dpace_normalizer: str = "weights"  # or "batch": divide by the number of sequences
    lk: str | None = None
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    denominator_eps: float = 0.0
    chunk_blocks: int = 128

    def __post_init__(self) -> None:
        if self.loss_type not in ("weighted_ce", *losses.DPACE):
            raise ConfigError(
                f"objective.loss_type: found {self.loss_type!r}, expected weighted_ce or {', '.join(losses.DPACE)}"
            )
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"objective.dpace_alpha: found {self.dpace_alpha}, expected 0 to 1")
        if self.dpace_normalizer not in ("weights", "batch"):
            raise ConfigError(f"objective.dpace_normalizer: found {self.dpace_normalizer!r}, expected weights or batch")
        if self.lk not in LK:
            raise ConfigError(f"objective.lk: found {self.lk!r}, expected one of {LK}")
        if self.gamma_per_epoch and (self.gamma is None or self.loss_type != "weighted_ce"):
            raise ConfigError(
                f"objective.gamma_per_epoch: found {self.gamma_per_epoch}, expected 0: there is no decay to change"
            )


@dataclasses.dataclass(frozen=True)
class DFlash(BlockDrafter):
    """The method. `draft_sampling` decides what sampled requests get: the argmax (q is a point; better where a block's
    rows cannot see each other's draws) or draws from each row's own softmax (q dense)."""

    objective_config: DFlashObjective = DFlashObjective()
    draft_sampling: str = "argmax"
    survival_confidence: bool = False  # proposals carry the mass of each row's mode as their confidence
    method: str = "dflash"

    def __post_init__(self) -> None:
        if self.config.block_size < 2:
            raise ConfigError(
                f"block_size: found {self.config.block_size}, expected at least 2 (row 0 predicts nothing)"
            )
        if self.draft_sampling not in ("argmax", "sample"):
            raise ConfigError(f"draft_sampling: found {self.draft_sampling!r}, expected argmax or sample")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> DFlash:
        """From a public config.json."""
        if config.get("architectures") == ["MuseGlimmerAssistantModel"]:
            config = {**config, "is_causal": False}
        return cls(BlockConfig.from_hf(config, target))

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was."""
        source = self.config.source_config
        return json.loads(source) if source else self.config.to_hf(ARCHITECTURES[0], {})

    @property
    def num_proposals(self) -> int:
        """m = B - 1."""
        return self.config.block_size - 1

    @property
    def needs_teacher(self) -> bool:
        """The labels are tokens: no teacher."""
        return False

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """m tokens a request from rows 1 … B - 1 of one forward."""
        hidden = self.block_hidden(params, shared, state, slots)
        logits = self.block_logits(shared, hidden[:, 1:])
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        trace = {"draft_hidden": hidden}
        confidence = survival(logits, sampling) if self.survival_confidence else None
        if self.draft_sampling == "argmax":
            return Proposal(best, Point(best, logits.shape[-1]), confidence, trace=trace)
        probs = sampling.draft_probs(logits)
        positions = slots.positions[:, None] + 1 + jnp.arange(self.num_proposals)
        drawn = inverse_cdf(probs, uniforms(keys, positions, Purpose.DRAFT))
        return Proposal(jnp.where(sampling.greedy[:, None], best, drawn), Dense(probs), confidence, trace=trace)

    # -- training -----------------------------------------------------------------------------------------------------

    def labels(self, batch: Batch) -> tuple[Int[Array, "B N block"], Float[Array, "B N block"]]:
        """Token at anchor + j for row j, and 1 where it is supervised. A hole drops its own label only; row 0 has
        none.
        """
        index = batch.anchors[:, :, None] + jnp.arange(self.config.block_size)
        inside = index < batch.input_ids.shape[1]
        index = jnp.minimum(index, batch.input_ids.shape[1] - 1)
        flat = index.reshape(index.shape[0], -1)
        ids = jnp.take_along_axis(batch.input_ids, flat, axis=1).reshape(index.shape)
        supervised = jnp.take_along_axis(batch.loss_mask, flat, axis=1).reshape(index.shape)
        weights = batch.keep[:, :, None] & inside & supervised & (jnp.arange(self.config.block_size) > 0)
        return ids, weights.astype(jnp.float32)

    def token_terms(self, shared: Shared, hidden: Float[Array, "C b H"], labels: Int[Array, "C b"]) -> dict[str, Array]:
        """Per-token negative log-likelihood and whether the argmax hits."""
        logits = self.block_logits(shared, hidden)
        return {
            "nll": losses.negative_log_likelihood(logits, labels),
            "correct": (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32),
        }

    def weights(
        self, nll: Float[Array, "B N b"], mask: Float[Array, "B N b"], epochs: Int[Array, "B"] | None = None
    ) -> Float[Array, "B N b"]:
        """Position weights of rows 1 …, before the mask: D-PACE, or exp(-(j - 1) / gamma)."""
        objective = self.objective_config
        if objective.gamma_per_epoch:
            if epochs is None:
                raise ConfigError("batch.epochs: missing, expected each sequence's epoch (objective.gamma_per_epoch)")
            gamma = (objective.gamma or 0.0) + objective.gamma_per_epoch * epochs[:, None, None]
            return jnp.broadcast_to(jnp.exp(-jnp.arange(nll.shape[-1]) / gamma), nll.shape)
        if objective.loss_type == "weighted_ce":
            return jnp.broadcast_to(losses.position_decay(nll.shape[-1], objective.gamma), nll.shape)
        return losses.dpace_weights(nll, mask, objective.dpace_alpha, objective.loss_type)

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Terms "ce" and "tv" over one weight, and metrics; sums over all blocks of the batch."""
        labels, mask = (x[:, :, 1:] for x in self.labels(batch))
        hidden = self.training_hidden(params, shared, batch)[:, :, 1:]
        tokens = self._chunked_terms(shared, hidden, labels)
        weights = mask * self.weights(tokens["nll"], mask, batch.epochs)
        return self.terms(tokens["nll"], tokens["correct"], mask, weights)

    def _chunked_terms(
        self, shared: Shared, hidden: Float[Array, "B N b H"], labels: Int[Array, "B N b"]
    ) -> dict[str, Array]:
        """`token_terms` of all blocks. The likelihood is all that is differentiated, so its gradient comes with it."""

        def one(rows: Array, labels: Array, shared: Shared) -> tuple[Array, Array]:
            tokens = self.token_terms(shared, rows, labels)
            return tokens["nll"], tokens["correct"]

        chunk = self.objective_config.chunk_blocks
        run = one if chunk <= 0 else lambda *xs: losses.with_row_gradients(one, *xs)
        nll, correct = losses.in_chunks(lambda h, y: run(h, y, shared), chunk, hidden, labels, again=False)
        return {"nll": nll, "correct": correct}

    def terms(
        self,
        nll: Float[Array, "B N b"],
        correct: Float[Array, "B N b"],
        mask: Float[Array, "B N b"],
        weights: Float[Array, "B N b"],
    ) -> Terms:
        """The sums of rows 1 …: `mask` says what is supervised, `weights` is mask times position weight."""
        by_batch = (
            self.objective_config.loss_type != "weighted_ce" and self.objective_config.dpace_normalizer == "batch"
        )
        total = jnp.asarray(float(nll.shape[0])) if by_batch else jnp.sum(weights)
        hit = jnp.exp(-nll)
        supervised, axes = jnp.sum(mask), (0, 1)
        return {
            "ce": (losses.weighted_sum(nll, weights), total),
            "tv": (losses.weighted_sum(1 - hit, weights), total),
            "metric/accuracy": (jnp.sum(correct * mask), supervised),
            "metric/target_probability": (losses.weighted_sum(hit, mask), supervised),
            "metric/accuracy_position": (jnp.sum(correct * mask, axes), jnp.sum(mask, axes)),
            "metric/ce_position": (jnp.sum(jnp.where(mask > 0, nll, 0.0), axes), jnp.sum(mask, axes)),
            **losses.greedy_acceptance(correct, mask),
        }

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """CE, or its LK mixture with the total variation 1 - p(label)."""
        objective = self.objective_config
        ce, tv = (losses.ratio(*terms[name], objective.denominator_eps) for name in ("ce", "tv"))
        if objective.lk in (None, "alpha"):
            return ce
        if objective.lk == "tv":
            return tv
        hit, count = terms["metric/target_probability"]
        share = objective.kl_scale * jnp.exp(-objective.kl_decay * jax.lax.stop_gradient(hit / jnp.maximum(count, 1.0)))
        return share * ce + (1 - share) * tv

    def trace(self, params: Any, shared: Shared, batch: Batch) -> dict[str, Array]:
        """The intermediates of `loss`, unchunked, with row 0 (golden cases, debugging)."""
        labels, mask = self.labels(batch)
        hidden = self.training_hidden(params, shared, batch)
        nll = self.token_terms(shared, hidden, labels)["nll"]
        return self.layout_trace(shared, batch, hidden.dtype) | {
            "output_hidden": hidden,
            "base_logits": self.block_logits(shared, hidden),
            "target_ids": labels,
            "predecessor_ids": jnp.concatenate([labels[:, :, :1], labels[:, :, :-1]], axis=-1),
            "weight_mask": mask,
            "neg_log_q": nll,
            "decay_weights": jnp.concatenate(
                [jnp.ones(1), losses.position_decay(nll.shape[-1] - 1, self.objective_config.gamma)]
            ),
            "dpace_weights": losses.dpace_weights(
                nll, mask, self.objective_config.dpace_alpha, self.objective_config.loss_type
            ),
        }
