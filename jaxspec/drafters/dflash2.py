"""DFlash 2: DFlash whose layers convolve along the block, and whose proposals are a path through K candidates a slot.

The block, its rows and its labels are DFlash's: row 0 (the anchor) predicts nothing, row j predicts the token at anchor
+ j. A fresh DFlash 2 computes what DFlash computes, bit for bit. Checkpoints: `DFlash2DraftModel` (z-lab, SpecForge,
SGLang), without embedding and head.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters import grouped_conv, losses, selector
from jaxspec.drafters.base import Batch, DraftSampling, Proposal, Shared, Slots, Sparse, Terms
from jaxspec.drafters.block_config import BlockConfig, NestedKeys
from jaxspec.drafters.dflash import DFlash, DFlashObjective
from jaxspec.drafters.draws import Purpose, uniforms
from jaxspec.drafters.grouped_conv import ConvConfig, ConvolvedLayer
from jaxspec.drafters.selector import Candidates, SelectorConfig
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig

ARCHITECTURE = "DFlash2DraftModel"


@dataclasses.dataclass(frozen=True)
class DFlash2Objective(DFlashObjective):
    """DFlash's objective plus alpha times the selector's cross-entropy over the same weight sum.

    alpha is 0 for the first `selector_warmup_ratio` of the optimizer steps and grows linearly to `selector_alpha` over
    the next `selector_ramp_ratio`. `selector_alpha` = 0 leaves the selector out of the program: nothing trains it.
    `selector_stop_gradient` keeps its term from moving the backbone.
    """

    selector_alpha: float = 1.0
    selector_warmup_ratio: float = 0.0
    selector_ramp_ratio: float = 0.0
    selector_stop_gradient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector_alpha < 0:
            raise ConfigError(f"objective.selector_alpha: found {self.selector_alpha}, expected 0 (frozen) or more")
        for name in ("selector_warmup_ratio", "selector_ramp_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"objective.{name}: found {getattr(self, name)}, expected a share from 0 to 1")

    @property
    def scheduled(self) -> bool:
        """Whether alpha changes over the run."""
        return self.selector_alpha > 0 and (self.selector_warmup_ratio > 0 or self.selector_ramp_ratio > 0)

    def alpha(self, progress: Float[Array, ""] | None) -> Float[Array, ""]:
        """alpha after a share of the optimizer steps. Raises ConfigError where it needs the share and has none."""
        if not self.scheduled:
            return jnp.asarray(self.selector_alpha, jnp.float32)
        if progress is None:
            raise ConfigError("batch.progress: missing, expected the share of optimizer steps done (selector warm-up)")
        beyond = progress - self.selector_warmup_ratio
        if not self.selector_ramp_ratio:
            return self.selector_alpha * (beyond >= 0).astype(jnp.float32)
        return self.selector_alpha * jnp.clip(beyond / self.selector_ramp_ratio, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class DFlash2(DFlash):
    """The method. Sampled requests draw along the path (`draft_sampling` "sample") or take the greedy path
    ("argmax"); q is over the K candidates of each slot, given the token before it."""

    conv: ConvConfig = ConvConfig()
    selector: SelectorConfig = SelectorConfig()
    objective_config: DFlash2Objective = DFlash2Objective()
    draft_sampling: str = "sample"
    method: str = "dflash2"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.conv.check(self.config.model.hidden_size, self.config.block_size)
        self.selector.check(self.config.model.vocab_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> DFlash2:
        """From a public config.json. Raises ConfigError where a size of the convolution or the selector is missing."""
        key = NestedKeys(config)
        conv = ConvConfig(
            key.required("conv_kernel_size", "the taps of the grouped convolution"),
            key.required("conv_group_size", "the channels that share a coefficient"),
        )
        paths = SelectorConfig(
            key.required("selector_rank", "the width of the selector's codebooks"),
            key.required("selector_top_k", "the candidates of a slot"),
        )
        return cls(BlockConfig.from_hf(config, target), conv=conv, selector=paths)

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was."""
        if self.config.source_config:
            return json.loads(self.config.source_config)
        sizes = {
            "conv_kernel_size": self.conv.kernel_size,
            "conv_group_size": self.conv.group_size,
            "selector_rank": self.selector.rank,
            "selector_top_k": self.selector.top_k,
        }
        return self.config.to_hf(ARCHITECTURE, sizes)

    def layer_module(self) -> tuple[Any, ly.Params]:
        """A layer with both sublayers inside grouped convolutions."""
        return ly.abstract_module(ConvolvedLayer, self.config.model, self.conv)

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Backbone, convolutions and selector."""
        model = self.config.model
        extra = selector.abstract_params(self.selector, model.vocab_size, model.hidden_size, dtype)
        return super().abstract_params(dtype) | extra

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> ly.Params:
        """DFlash's initialisation, convolutions that are the identity and a selector that changes no score."""
        params = selector.silent(super().init(key, dtype))
        return params | {"layers": [grouped_conv.identity(layer) for layer in params["layers"]]}

    # -- the path -----------------------------------------------------------------------------------------------------

    def candidates(self, raw: Float[Array, "*b m V"]) -> Candidates:
        """The K best of raw logits, transformed. The transform is increasing, so the ids are those of the transformed
        logits; ranked before it, ids that a softcap presses together stay apart."""
        best = selector.top_candidates(raw, self.selector.top_k)
        return Candidates(best.ids, self.transform_logits(best.unary))

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """m tokens a request, left to right through the candidates of rows 1 … B - 1."""
        hidden = self.block_hidden(params, shared, state, slots)
        rows = hidden[:, 1:]
        found = self.candidates(ly.unembed(rows, shared.head))
        table = selector.lattice(params, found, rows, slots.anchors)
        positions = slots.positions[:, None] + 1 + jnp.arange(self.num_proposals)
        greedy = sampling.greedy | (self.draft_sampling == "argmax")
        u = uniforms(keys, positions, Purpose.DRAFT)
        path = selector.walk(table, found.ids, greedy, sampling.temperature, u)
        q = Sparse(found.ids, path.probs, shared.head.shape[0])
        confidence = path.modes if self.survival_confidence else None
        return Proposal(path.tokens, q, confidence, trace={"draft_hidden": hidden})

    # -- training -----------------------------------------------------------------------------------------------------

    def block_terms(
        self, params: Any, shared: Shared, hidden: Float[Array, "C b H"], tokens: Int[Array, "C block"]
    ) -> dict[str, Array]:
        """Per-token terms of rows 1 …, from the block's true tokens (anchor first)."""
        labels, raw = tokens[:, 1:], ly.unembed(hidden, shared.head)
        logits = self.transform_logits(raw)
        terms = {
            "nll": losses.negative_log_likelihood(logits, labels),
            "correct": (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32),
        }
        if not self.objective_config.selector_alpha:
            return terms
        found = self.candidates(raw)
        if self.objective_config.selector_stop_gradient:
            found, hidden = jax.lax.stop_gradient((found, hidden))
        # The label is never added to the candidates: serving could not choose it either.
        match = found.ids == labels[..., None]
        scores = selector.scores(params, found, hidden, tokens[:, :-1])
        label = jnp.argmax(match, axis=-1)
        table = jax.lax.stop_gradient(selector.lattice(params, found, hidden, tokens[:, 0]))
        return terms | {
            "covered": jnp.any(match, axis=-1).astype(jnp.float32),
            "selector_nll": losses.negative_log_likelihood(scores, label),
            "selected": (jnp.argmax(scores, axis=-1) == label).astype(jnp.float32),
            "served": (selector.greedy_path(table, found.ids) == labels).astype(jnp.float32),
        }

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """DFlash's terms and "selector", over one weight, and metrics."""
        tokens, mask = self.labels(batch)
        mask = mask[:, :, 1:]
        hidden = self.training_hidden(params, shared, batch)[:, :, 1:]
        found = losses.in_chunks(
            lambda h, y: self.block_terms(params, shared, h, y), self.objective_config.chunk_blocks, hidden, tokens
        )
        weights = mask * self.weights(found["nll"], mask, batch.epochs)
        terms = self.terms(found["nll"], found["correct"], mask, weights)
        if (
            not self.objective_config.selector_alpha
        ):  # the server walks through the selector, the unary argmax says less
            return {name: term for name, term in terms.items() if not name.startswith("metric/accepted_")}
        served = losses.greedy_acceptance(found["served"], mask)
        return terms | served | self.selector_terms(found, mask, weights, terms["ce"][1], batch)

    def selector_terms(self, found: dict[str, Array], mask: Array, weights: Array, total: Array, batch: Batch) -> Terms:
        """The K-way cross-entropy where the label is a candidate, divided by the whole weight sum; coverage, accuracy
        given coverage, and the tokens a round would commit (anchor's successor counted as in tau): served by the
        greedy path, by an oracle among the candidates, and expected from the unary probabilities."""
        nll, covered, selected = found["selector_nll"], found["covered"], found["selected"]
        seen, weighed, axes = covered * mask, covered * weights, (0, 1)
        blocks = jnp.any(mask > 0, axis=-1).astype(jnp.float32)
        number = losses.weighted_sum(nll, weighed)

        def length(chance: Float[Array, "B N b"]) -> tuple[Array, Array]:
            run = 1 + jnp.sum(jnp.cumprod(chance * mask, axis=-1), axis=-1)
            return jnp.sum(run * blocks), jnp.sum(blocks)

        return {
            "selector": (number, total),
            "metric/selector_alpha": (self.objective_config.alpha(batch.progress), jnp.ones(())),
            "metric/selector_ce": (number, jnp.sum(weighed)),
            "metric/selector_accuracy": (jnp.sum(selected * weighed), jnp.sum(weighed)),
            "metric/selector_coverage": (jnp.sum(seen), jnp.sum(mask)),
            "metric/selector_coverage_position": (jnp.sum(seen, axes), jnp.sum(mask, axes)),
            "metric/selector_conditional_accuracy_position": (jnp.sum(selected * seen, axes), jnp.sum(seen, axes)),
            "metric/selector_target_probability": (losses.weighted_sum(jnp.exp(-nll), seen), jnp.sum(seen)),
            "metric/served_length": length(found["served"]),
            "metric/oracle_length": length(covered),
            "metric/expected_length": length(jnp.exp(-found["nll"])),
        }

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """DFlash's objective + alpha * selector."""
        base = super().objective(terms)
        if "selector" not in terms:
            return base
        alpha = losses.ratio(*terms["metric/selector_alpha"])
        return base + alpha * losses.ratio(*terms["selector"], self.objective_config.denominator_eps)

    def trace(self, params: Any, shared: Shared, batch: Batch) -> dict[str, Array]:
        """DFlash's, the rows around every convolution, candidates, teacher-forced scores, lattice and greedy path."""
        trace = super().trace(params, shared, batch)
        hidden, notes = self.training_forward(params, shared, batch)
        for index, note in enumerate(notes):
            for name, steps in note.items():
                for step, rows in steps.items():
                    trace[f"conv.layers.{index}.{name}.{step}"] = rows.reshape(rows.shape[0], -1, rows.shape[-1])
        found = self.candidates(ly.unembed(hidden, shared.head))
        best, rows = jax.tree.map(lambda x: x[:, :, 1:].reshape(-1, x.shape[2] - 1, x.shape[3]), (found, hidden))
        table = selector.lattice(params, best, rows, trace["target_ids"][:, :, 0].reshape(-1))
        return trace | {
            "unary_topk": found.unary,
            "candidate_ids": found.ids,
            "selector_scores": selector.scores(params, found, hidden, trace["predecessor_ids"]),
            "lattice": table,
            "greedy_path": selector.greedy_path(table, best.ids),
        }


def from_dflash(
    drafter: DFlash,
    params: ly.Params,
    key: Key[Array, ""],
    conv: ConvConfig = ConvConfig(),
    paths: SelectorConfig = SelectorConfig(),
) -> tuple[DFlash2, ly.Params]:
    """A DFlash 2 that computes exactly what a DFlash with these weights does, to be trained further.

    Its convolutions are the identity and its selector adds nothing; `key` draws the parts of the selector that a zero
    successor keeps silent.
    """
    grown = DFlash2(dataclasses.replace(drafter.config, source_config=None), conv=conv, selector=paths)
    fresh = grown.init(key, params["norm"]["weight"].dtype)
    layers = [ours | theirs for ours, theirs in zip(fresh["layers"], params["layers"], strict=True)]
    return grown, fresh | params | {"layers": layers}
