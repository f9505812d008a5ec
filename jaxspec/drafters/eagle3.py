"""EAGLE-3 (arXiv 2503.01840): three target layers fused into one state, a layer that feeds itself, a small vocabulary.

g_t = fc([low; mid; high]); the layer attends over [input_layernorm(E(x_{t+1})); hidden_norm(g_t)], its residual is g_t,
and what it returns, un-normed, is the next row's g. Training runs the recurrence as serving does ("training-time
test"): at step i, row t sees the step-0 keys up to t and its own keys of steps 1 … i, at RoPE position t + i.

Checkpoints: the official / SpecForge / AngelSlim / SGLang layout (`midlayer.*`, `d2t` and `t2d`), and DeepSpec's
(`Qwen3Eagle3Model`: `layers.0.*`, q/k norm, the whole vocabulary, frozen copies of embedding and head inside).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters import losses, vocabulary
from jaxspec.drafters.base import Batch, Shared, Terms
from jaxspec.drafters.eagle_config import EagleConfig, default_layer_ids, explicit_layer_ids
from jaxspec.drafters.fresh import fresh_params
from jaxspec.drafters.lookahead import Causal, Lookahead
from jaxspec.drafters.recurrent import RecurrentDrafter, WideAttention, supervised_rows
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig

SPECFORGE, ANGELSLIM, DEEPSPEC = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model"
ARCHITECTURES = (SPECFORGE, ANGELSLIM, DEEPSPEC)
LK = (None, "alpha", "lambda", "tv")


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """Soft cross-entropy of `ttt_length` steps, step i weighed by step_decay ** i, each a mean over all rows.

    `lk` replaces it by the overlap A of the two distributions: "tv" 1 - A, "alpha" -log of each token's, "lambda" a
    mixture whose share of the cross-entropy is kl_scale * exp(-kl_decay * A). `drop_last_row` leaves out each
    sequence's last supervised row, as DeepSpec does. `keep_products` keeps what the layer's matrices gave in each step
    for the gradient, in bfloat16 at Qwen3-4B's shape 56 kB a token and step; without, they are multiplied again.
    """

    ttt_length: int = 7
    step_decay: float = 0.8
    lk: str | None = None
    kl_scale: float = 1.0
    kl_decay: float = 3.0
    drop_last_row: bool = True
    chunk_rows: int = 1024
    keep_products: bool = True

    def __post_init__(self) -> None:
        if self.ttt_length < 1:
            raise ConfigError(f"objective.ttt_length: found {self.ttt_length}, expected at least 1")
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"objective.step_decay: found {self.step_decay}, expected more than 0, at most 1")
        if self.lk not in LK:
            raise ConfigError(f"objective.lk: found {self.lk!r}, expected one of {LK}")


class Eagle3Layer(nnx.Module):
    """The one layer, with two norms before its attention."""

    def __init__(self, config: ModelConfig):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ly.RMSNorm(size, eps)
        self.hidden_norm = ly.RMSNorm(size, eps)
        self.self_attn = WideAttention(config, 2 * size)
        self.post_attention_layernorm = ly.RMSNorm(size, eps)
        self.mlp = ly.MLP(size, config.intermediate_size, config.mlp_bias)

    def __call__(self, states: Array, embedded: Array, cos: Array, sin: Array, attend: Any) -> tuple[Array, Any]:
        both = jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(states)], axis=-1)
        keys, values = self.self_attn.keys_values(both, cos, sin)
        mixed, cache = attend(self.self_attn.queries(both, cos, sin), keys, values)
        x = states + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x)), cache


@dataclasses.dataclass(frozen=True)
class Eagle3(RecurrentDrafter):
    """The method. `maps` are the vocabulary maps that the checkpoint holds, `own_head` says whether it has a head (one
    over the whole vocabulary may be the target's), `fc_norm` norms each tapped layer before fc (EAGLE-3.1), and
    `norm_output` off feeds the head un-normed states."""

    layout: str = SPECFORGE
    maps: tuple[str, ...] = ()
    own_head: bool = True
    fc_norm: bool = False
    norm_output: bool = True
    objective_config: Eagle3Objective = Eagle3Objective()
    method: str = "eagle3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> Eagle3:
        """From a public config.json of either layout."""
        ids = explicit_layer_ids(config)
        deepspec = (config.get("architectures") or [""])[0] == DEEPSPEC
        if deepspec and ids is None:
            raise ConfigError("target_layer_ids: missing in the drafter's config.json, expected five output ids")
        eagle = EagleConfig.from_hf(config, target, default_layer_ids(target.num_layers) if ids is None else ids)
        reduced = eagle.draft_vocab < eagle.model.vocab_size
        if deepspec and reduced:
            raise ConfigError(
                f"draft_vocab_size: found {eagle.draft_vocab}, expected the whole vocabulary of {DEEPSPEC}"
            )
        steps = config.get("ttt_length")
        objective = Eagle3Objective(
            ttt_length=7 if steps is None else steps, step_decay=float(config.get("step_loss_decay") or 0.8)
        )
        return cls(
            eagle,
            chain_length=objective.ttt_length,
            layout=DEEPSPEC if deepspec else SPECFORGE,
            maps=(vocabulary.D2T, vocabulary.T2D) if reduced else (),
            own_head=not deepspec,
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", True)),
            objective_config=objective,
        )

    def with_tensors(self, names: Iterable[str]) -> Eagle3:
        """The drafter that a checkpoint with these tensors holds. Over the whole vocabulary the maps may be written or
        left out; a head may be left out only where the config gives no draft_vocab_size."""
        names = set(names)
        reduced = self.config.draft_vocab < self.config.model.vocab_size
        maps = tuple(name for name in (vocabulary.D2T, vocabulary.T2D) if name in names or (reduced and name == "d2t"))
        said = json.loads(self.config.source_config or "{}").get("draft_vocab_size") is not None
        head = self.own_head and (said or "lm_head.weight" in names)
        return dataclasses.replace(self, maps=maps, own_head=head)

    def to_hf(self) -> dict[str, Any]:
        """config.json; an imported one comes back as it was."""
        if self.config.source_config:
            return json.loads(self.config.source_config)
        ids = list(self.taps)
        base = {"num_target_layers": self.config.num_target_layers, **self.config.model.to_hf()}
        if self.layout == DEEPSPEC:
            steps = {
                "ttt_length": self.objective_config.ttt_length,
                "step_loss_decay": self.objective_config.step_decay,
            }
            return {**base, "architectures": [DEEPSPEC], "target_layer_ids": ids, **steps}
        extra: dict[str, Any] = {"fc_norm": True} if self.fc_norm else {}
        if not self.norm_output:
            extra["norm_output"] = False
        return {
            **base,
            "architectures": [self.layout],
            "draft_vocab_size": self.config.draft_vocab,
            "target_hidden_size": self.config.target_hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
            **extra,
        }

    @property
    def own_embeddings(self) -> bool:
        """Whether the checkpoint carries frozen copies of the target's embedding and head."""
        return self.layout == DEEPSPEC

    @property
    def needs_teacher(self) -> bool:
        """The teacher is the target's own distribution."""
        return True

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Names and shapes of the checkpoint's tensors."""
        model, width = self.config.model, self.config.target_hidden_size
        leaf = lambda *shape: {"weight": jax.ShapeDtypeStruct(shape, dtype)}  # noqa: E731
        _, layer = ly.abstract_module(Eagle3Layer, model)
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), layer)
        params: ly.Params = {
            "fc": leaf(model.hidden_size, len(self.taps) * width),
            "norm": leaf(model.hidden_size),
            **({"layers": [layer]} if self.layout == DEEPSPEC else {"midlayer": layer}),
        }
        if self.own_head:
            params["lm_head"] = leaf(self.config.draft_vocab, model.hidden_size)
        if self.fc_norm:
            params["fc_norm"] = [leaf(width)] * len(self.taps)
        if self.config.own_embedding:
            params["embed_tokens"] = leaf(model.vocab_size, model.hidden_size)
        kinds = {"d2t": ((self.config.draft_vocab,), jnp.int32), "t2d": ((model.vocab_size,), jnp.bool_)}
        return params | {name: jax.ShapeDtypeStruct(*kinds[name]) for name in self.maps}

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> ly.Params:
        """Normal(0, 0.02) matrices, norms at one; the draft vocabulary is the first ids until `with_vocabulary`."""
        flat = ly.flatten(self.abstract_params(dtype))
        drawn = {name: leaf for name, leaf in flat.items() if name not in self.maps}
        fresh = fresh_params(ly.unflatten(drawn), key)
        return self.with_vocabulary(fresh, np.zeros(self.config.model.vocab_size))

    def with_vocabulary(self, params: ly.Params, counts: np.ndarray) -> ly.Params:
        """The parameters with the maps of the most frequent tokens; `counts` [V] of supervised ones."""
        if not self.maps:
            return params
        ids = vocabulary.most_frequent(counts, self.config.draft_vocab)
        made = vocabulary.maps(ids, self.config.model.vocab_size)
        return {**params, **{name: jnp.asarray(made[name]) for name in self.maps}}

    # -- forward ------------------------------------------------------------------------------------------------------

    def fuse(self, params: ly.Params, features: Float[Array, "*rows TH"]) -> Float[Array, "*rows H"]:
        """fc over the tapped layers, each normed before where the checkpoint says so."""
        weight = params["fc"]["weight"]
        features = features.astype(weight.dtype)
        if self.fc_norm:
            chunks = jnp.split(features, len(self.taps), axis=-1)
            normed = [self._norm(own, x) for own, x in zip(params["fc_norm"], chunks, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return ly.project(features, weight)

    def layer(
        self, params: ly.Params, shared: Shared, states: Array, tokens: Array, positions: Array, attention: Any,
        cache: Any = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """One step of the recurrence."""
        graph, _ = ly.abstract_module(Eagle3Layer, self.config.model)
        weights = params["layers"][0] if self.layout == DEEPSPEC else params["midlayer"]
        embedded = self.embed(params, shared, tokens, states.dtype)
        attend = lambda q, k, v: attention(q, k, v, cache, 0)  # noqa: E731
        return ly.bind(graph, weights)(states, embedded, *self.rotary(positions), attend)

    def draft_logits(self, params: ly.Params, shared: Shared, states: Float[Array, "*rows H"]) -> Array:
        """lm_head(norm(x)) over the draft vocabulary."""
        normed = self._norm(params["norm"], states) if self.norm_output else states
        return ly.unembed(normed, params["lm_head"]["weight"] if self.own_head else shared.head)

    def draft_ids(self, params: ly.Params) -> Int[Array, "Vd"] | None:
        """Draft id -> target id."""
        return vocabulary.target_ids(params, self.config.draft_vocab) if self.maps else None

    def _norm(self, weights: ly.Params, x: Array) -> Array:
        graph, _ = ly.abstract_module(ly.RMSNorm, x.shape[-1], self.config.model.rms_norm_eps)
        return ly.bind(graph, weights)(x)

    # -- training -----------------------------------------------------------------------------------------------------

    def training_states(self, params: ly.Params, shared: Shared, batch: Batch) -> Float[Array, "n B S H"]:
        """States of every step: scanned and rematerialised, with the gradient through all of them."""
        steps, (size, length) = self.objective_config.ttt_length, batch.input_ids.shape
        ids = jnp.pad(batch.input_ids, ((0, 0), (0, steps + 1)))
        rows = jnp.broadcast_to(jnp.arange(length), (size, length))
        states, (keys, values) = self.layer(
            params, shared, self.fuse(params, batch.features), ids[:, 1 : length + 1], rows, Causal(batch.lengths)
        )
        if steps == 1:
            return states[None]
        own = jnp.zeros((steps - 1, *keys.shape), keys.dtype)
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.objective_config.keep_products else None

        @functools.partial(jax.checkpoint, policy=kept)
        def step(carry: Any, index: Int[Array, ""]) -> tuple[Any, Array]:
            states, own_keys, own_values = carry
            attention = Lookahead((keys, values, batch.lengths), (own_keys, own_values), index)
            tokens = jax.lax.dynamic_slice_in_dim(ids, index + 1, length, axis=1)
            states, own_rows = self.layer(params, shared, states, tokens, rows + index, attention)
            return (states, *own_rows), states

        _, later = jax.lax.scan(step, (states, own, own), jnp.arange(1, steps))
        return jnp.concatenate([states[None], later])

    def teacher(self, params: ly.Params, shared: Shared, batch: Batch) -> dict[str, Array]:
        """Per position of a sequence that goes on with zeros [B, S + steps]: the target's hidden state, its argmax and
        log normaliser over the whole vocabulary, and the supervised rows."""
        if batch.teacher_hidden is None:
            raise ConfigError("batch.teacher_hidden: missing, expected the target's final hidden states (tap 'final')")
        hidden = jnp.pad(batch.teacher_hidden, ((0, 0), (0, self.objective_config.ttt_length), (0, 0)))

        def row(hidden: Array) -> tuple[Array, Array]:
            logits = ly.unembed(hidden, shared.head)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1)

        best, normaliser = losses.in_chunks(row, self.objective_config.chunk_rows, jax.lax.stop_gradient(hidden))
        mask = supervised_rows(batch, self.objective_config.drop_last_row)
        mask = jnp.pad(mask, ((0, 0), (0, self.objective_config.ttt_length)))
        return jax.lax.stop_gradient({"hidden": hidden, "best": best, "normaliser": normaliser, "mask": mask})

    def token_terms(
        self, ids: Int[Array, "Vd"], logits: Float[Array, "B C Vd"], teacher: Float[Array, "B C Vd"],
        share: Float[Array, "B C"], best: Int[Array, "B C"],
    ) -> dict[str, Array]:  # fmt: skip
        """Per-row terms of a slice at one step.

        `teacher` is the target's softmax over the draft vocabulary alone, that of the cross-entropy; `share` is what
        its own softmax gives these tokens together, since the overlap takes its own probabilities.
        """
        log_q = jax.nn.log_softmax(logits, axis=-1)
        overlap = jnp.sum(jnp.minimum(teacher * share[..., None], jnp.exp(log_q)), axis=-1)
        return {
            "ce": -jnp.sum(teacher * log_q, axis=-1),
            "overlap": overlap,
            "log_overlap": jnp.where(overlap > 0, jnp.log(jnp.where(overlap > 0, overlap, 1.0)), 0.0),
            "correct": (ids[jnp.argmax(logits, axis=-1)] == best).astype(jnp.float32),
        }

    def row_terms(
        self, params: ly.Params, shared: Shared, ids: Int[Array, "Vd"], states: Float[Array, "n B S H"],
        teacher: dict[str, Array], weights: Float[Array, "n B S"],
    ) -> tuple[Float[Array, ""] | None, dict[str, Array]]:  # fmt: skip
        """`token_terms` of every step [n, B, S], in slices of rows: the only place where [., Vd] arrays exist. Step i
        compares row t with the teacher's row t + i + 1, so that a slice's steps share the teacher's rows but for their
        ends, and its logits are made once for all of them.

        First of the two is the cross-entropy summed with `weights`, where that is all that is differentiated: its
        gradient is computed beside it, from the same logits. Otherwise None: the terms have gradients, by
        rematerialisation.
        """
        steps, batch, length, _ = states.shape
        chunk = self.objective_config.chunk_rows
        each = losses.slice_width(chunk, batch, length)
        pieces = -(-length // each)
        index = np.arange(pieces)[:, None] * each + 1 + np.arange(each + steps - 1)
        index = np.minimum(index, length + steps - 1)  # behind the last row of the last slice nothing is read
        windows = {name: jnp.moveaxis(teacher[name][:, index], 1, 0) for name in ("hidden", "normaliser", "best")}

        def split(rows: Array) -> Array:
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, pieces * each - length), *[(0, 0)] * (rows.ndim - 3)])
            return jnp.moveaxis(rows.reshape(steps, batch, pieces, each, *rows.shape[3:]), 2, 0)

        def join(slices: Array) -> Array:
            return jnp.moveaxis(slices, 0, 2).reshape(steps, batch, pieces * each, *slices.shape[4:])[:, :, :length]

        def compared(common: tuple[Array, Array], window: dict[str, Array]) -> Callable[..., dict[str, Array]]:
            """`token_terms` of a step of this slice, given its logits and its number."""
            ids, reduced_head = common
            logits = ly.unembed(window["hidden"], reduced_head)
            known = jax.nn.logsumexp(logits, axis=-1)
            given = jnp.exp(logits - known[..., None]), jnp.exp(known - window["normaliser"]), window["best"]
            given = jax.lax.stop_gradient(given)

            def step(logits: Array, index: Array) -> dict[str, Array]:
                cut = [jax.lax.dynamic_slice_in_dim(x, index, each, axis=1) for x in given]
                return self.token_terms(ids, logits, *cut)

            return step

        common = ids, shared.head[ids] if self.maps else shared.head
        if self.objective_config.lk is None and chunk > 0:
            normed = self._norm(params["norm"], states) if self.norm_output else states
            head = params["lm_head"]["weight"] if self.own_head else shared.head
            total, found = losses.weighed_rows(
                compared, "ce", split(normed), split(weights), head, windows, common, self.own_head
            )
            return total, jax.tree.map(join, found)
        again: Any = jax.checkpoint if pieces > 1 else lambda function: function

        def one(states: Array, window: dict[str, Array]) -> dict[str, Array]:
            terms = compared(common, window)
            step = again(lambda index, states: terms(self.draft_logits(params, shared, states), index))
            return jax.lax.map(lambda xs: step(*xs), (jnp.arange(steps), states))

        return None, jax.tree.map(join, jax.lax.map(lambda xs: again(one)(*xs), (split(states), windows)))

    def loss(self, params: ly.Params, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Terms "ce" (over all rows), "overlap" and "log_overlap" (over rows whose teacher argmax can be drafted), one
        number a step; and "decayed_ce", what `objective` is made of where it is the cross-entropy: one number."""
        steps, length = self.objective_config.ttt_length, batch.input_ids.shape[1]
        states, teacher = self.training_states(params, shared, batch), self.teacher(params, shared, batch)
        ids = vocabulary.target_ids(params, self.config.draft_vocab)
        draftable = vocabulary.in_draft(params, ids, self.config.model.vocab_size)
        later = lambda name, by: jnp.stack([teacher[name][:, i + by : i + by + length] for i in range(steps)])  # noqa: E731
        supervised = later("mask", 0).astype(jnp.float32)  # [n, B, S]
        drafted = supervised * draftable[later("best", 1)]
        decay = self.decay()[:, None, None]
        decayed, terms = self.row_terms(params, shared, ids, states, teacher, drafted * decay)
        total = lambda x: jnp.sum(x, axis=(1, 2))  # noqa: E731
        weighed = lambda name: total(jnp.where(drafted > 0, terms[name] * drafted, 0.0))  # noqa: E731
        known, rows, hits = total(drafted), total(supervised), weighed("correct")
        every = jnp.where(jnp.sum(rows) > 0, float(batch.input_ids.size), 0.0) * jnp.ones(steps)
        if decayed is None:
            decayed = jnp.sum(self.decay() * weighed("ce"))
        return {
            "decayed_ce": (decayed, every[0]),
            "ce": (weighed("ce"), every),
            "overlap": (weighed("overlap"), known),
            "log_overlap": (weighed("log_overlap"), known),
            "metric/accuracy": (jnp.sum(hits), jnp.sum(rows)),
            "metric/accuracy_step": (hits, rows),
            "metric/accept_step": (weighed("overlap"), known),
        }

    def step_losses(self, terms: Terms) -> Float[Array, "n"]:
        """The loss of each step."""
        objective = self.objective_config
        ce, overlap = losses.ratio(*terms["ce"]), losses.ratio(*terms["overlap"])
        seen = jnp.sign(terms["overlap"][1])  # a step without a row that could be drafted adds nothing
        if objective.lk is None:
            return ce
        if objective.lk == "alpha":
            return -losses.ratio(*terms["log_overlap"])
        if objective.lk == "tv":
            return seen * (1 - overlap)
        share = objective.kl_scale * jnp.exp(-objective.kl_decay * jax.lax.stop_gradient(overlap))
        return share * ce + (1 - share) * seen * (1 - overlap)

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """Sum over the steps, decayed."""
        if self.objective_config.lk is None:
            return losses.ratio(*terms["decayed_ce"])
        return jnp.sum(self.decay() * self.step_losses(terms))

    def decay(self) -> Float[Array, "n"]:
        """Weight of each step."""
        return self.objective_config.step_decay ** jnp.arange(self.objective_config.ttt_length)

    def trace(self, params: ly.Params, shared: Shared, batch: Batch) -> dict[str, Array]:
        """The intermediates of `loss`, unchunked (golden cases, debugging)."""
        length = batch.input_ids.shape[1]
        ids = vocabulary.target_ids(params, self.config.draft_vocab)
        draftable = vocabulary.in_draft(params, ids, self.config.model.vocab_size)
        # row t of the teacher predicts token t + 2; the sequence goes on with zeros
        teacher = {
            name: jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))[:, 1:]
            for name, x in self.teacher(params, shared, batch).items()
        }
        logits = ly.unembed(teacher["hidden"], shared.head[ids])
        inside = (jnp.arange(logits.shape[1]) < length)[:, None]
        mask = supervised_rows(batch, self.objective_config.drop_last_row) & draftable[teacher["best"][:, :length]]
        trace = {
            "fused": self.fuse(params, batch.features),
            "target_p_padded": jax.nn.softmax(logits, axis=-1),
            "target_p_on_draft_padded": jnp.where(inside, jnp.exp(logits - teacher["normaliser"][..., None]), 0.0),
            "target_token_ids_padded": teacher["best"],
            "position_mask": mask[..., None].astype(jnp.float32),
        }
        for index, states in enumerate(self.training_states(params, shared, batch)):
            trace |= {
                f"depth{index}_hidden_out": states,
                f"depth{index}_logits": self.draft_logits(params, shared, states),
            }
        return trace
