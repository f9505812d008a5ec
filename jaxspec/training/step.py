"""The compiled training step: target forward, anchors, loss, gradient, update. One program, the state donated.

Accumulation. The objective is a function of sums and weights over the *whole* batch of the optimizer step, so
gradients of micro-batches must not be averaged: a row with 1 supervised token would then weigh as much as one with
99. Instead

    1. a forward pass adds up the terms T = sum over micro-batches of T_i (and keeps the features),
    2. c = d objective / d T at the total,
    3. a second pass adds up the products c . dT_i / d params.

That is the exact gradient of the objective of the whole batch, for any number of terms and any way of combining them.
It costs one more drafter forward and the features of A micro-batches; with A = 1 both passes fall together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.drafters.base import Batch, Drafter, Shared, Terms
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import cast, join_trainable, split_trainable
from jaxspec.parallel.rules import TENSOR
from jaxspec.parallel.training import BATCH
from jaxspec.training import optimizer as opt
from jaxspec.training.anchors import AnchorRule, anchor_uniforms, sample_anchors, supervised_anchors
from jaxspec.training.features import step_features
from jaxspec.training.state import Placement, TrainState, abstract
from pallas_kernels.anchor_attention.api import use_implementation

__all__ = [
    "Frozen",
    "StepSpec",
    "attention_over",
    "compile_step",
    "forward_backward",
    "gradients",
    "split_terms",
    "train_step",
]

METRIC_PREFIX = "metric/"
_ANCHORS, _LOSS = 0, 1  # purposes folded into the run's key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """Arrays that a step reads and never changes: target parameters (stacked layers; empty where the features are
    stored), shared embedding and head."""

    target: Any
    shared: Shared


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Everything static about a step."""

    model: Decoder
    drafter: Drafter
    optimizer: optax.GradientTransformation
    learning_rate: opt.Schedule
    num_anchors: int
    anchor_rule: AnchorRule = "adjacent"
    block_size: int = 1
    total_steps: int | None = None  # of the run, for objectives that change over it
    dtype: Any = jnp.float32  # the drafter's compute dtype; masters stay float32
    ema_decay: float | None = None


def split_terms(terms: Terms) -> tuple[Terms, Terms]:
    """(objective terms, metrics)."""
    metrics = {name: pair for name, pair in terms.items() if name.startswith(METRIC_PREFIX)}
    return {name: pair for name, pair in terms.items() if name not in metrics}, metrics


def gradients(
    drafter: Drafter, masters: Any, shared: Shared, batches: Batch, keys: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, Terms, Any]:
    """Loss, terms and gradient of the whole batch.

    Args:
      masters: float32 parameters, and the integers and flags among them, which have no gradient.
      batches: a Batch whose arrays have a leading axis A of micro-batches.
      keys: typed keys [A].
      dtype: what the masters are cast to inside the loss.

    Returns:
      loss scalar, terms summed over the micro-batches, float32 gradients (None where there is none).
    """
    masters, fixed = split_trainable(masters)

    def terms_of(moving: Any, batch: Batch, key: jax.Array) -> tuple[Terms, Terms]:
        terms = drafter.loss(cast(join_trainable(moving, fixed), dtype), shared, batch, key)
        return split_terms(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), terms))

    def objective(terms: Terms, metrics: Terms) -> jax.Array:
        return drafter.objective({**terms, **metrics})

    if keys.shape[0] == 1:
        batch = jax.tree.map(lambda leaf: leaf[0], batches)

        def whole(params: Any) -> tuple[jax.Array, tuple[Terms, Terms]]:
            parts = terms_of(params, batch, keys[0])
            return objective(*parts), parts

        (loss, (terms, metrics)), grads = jax.value_and_grad(whole, has_aux=True)(masters)
        return loss, {**terms, **metrics}, grads

    first = jax.tree.map(lambda leaf: leaf[0], batches)
    shapes = jax.eval_shape(terms_of, masters, first, keys[0])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add_terms(total: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, terms_of(masters, *micro)), None

    (terms, metrics), _ = jax.lax.scan(add_terms, zeros, (batches, keys))
    loss, cotangent = jax.value_and_grad(objective)(terms, metrics)

    def add_grads(total: Any, micro: Any) -> tuple[Any, None]:
        _, pull = jax.vjp(lambda params: terms_of(params, *micro)[0], masters)
        return jax.tree.map(jnp.add, total, pull(cotangent)[0]), None

    grads, _ = jax.lax.scan(add_grads, jax.tree.map(jnp.zeros_like, masters), (batches, keys))
    return loss, {**terms, **metrics}, grads


def _prepare(spec: StepSpec, frozen: Frozen, key: jax.Array, step: jax.Array, batch: dict[str, jax.Array]) -> Batch:
    """Anchors and features of one micro-batch: arrays [B, ...]."""
    ids, mask = batch["input_ids"], batch["loss_mask"]
    uniforms = anchor_uniforms(jax.random.fold_in(key, _ANCHORS), batch["example_ids"], batch["epochs"], ids.shape[1])
    anchors, keep = sample_anchors(uniforms, mask, spec.num_anchors, spec.anchor_rule, spec.block_size)
    kind = frozen.shared.embedding.dtype
    features, teacher = step_features(spec.model, spec.drafter, frozen.target, batch, spec.dtype, kind)
    return Batch(
        input_ids=ids,
        loss_mask=mask,
        features=features,
        anchors=anchors,
        keep=keep,
        teacher_hidden=teacher,
        progress=None if spec.total_steps is None else step.astype(jnp.float32) / spec.total_steps,
        epochs=batch["epochs"],
    )


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """`function` of each micro-batch, one after the other; a single one needs no loop."""
    if jax.tree.leaves(batch)[0].shape[0] > 1:
        return jax.lax.map(function, batch)
    return jax.tree.map(lambda leaf: leaf[None], function(jax.tree.map(lambda leaf: leaf[0], batch)))


def forward_backward(
    spec: StepSpec, state: TrainState, frozen: Frozen, batch: dict[str, jax.Array]
) -> tuple[Batch, jax.Array, Terms, Any]:
    """A step without its update: the micro-batches with their anchors [A, B, ...], loss, terms and gradients."""
    batches = _each(lambda micro: _prepare(spec, frozen, state.key, state.step, micro), batch)
    steps_key = jax.random.fold_in(jax.random.fold_in(state.key, _LOSS), state.step)
    keys = jax.random.split(steps_key, batch["input_ids"].shape[0])
    return batches, *gradients(spec.drafter, state.params, frozen.shared, batches, keys, spec.dtype)


def train_step(
    spec: StepSpec, state: TrainState, frozen: Frozen, batch: dict[str, jax.Array]
) -> tuple[TrainState, dict[str, Any]]:
    """One optimizer step over the micro-batches of `batch` (arrays [A, B, ...]; see pipeline.BATCH_FIELDS).

    A batch without a supervised slot has loss 0 and gradient 0 and leaves parameters and moments as they are; so does
    one whose gradient is not finite. Both are counted in the state. The step counter always moves: data and schedule
    go on.
    """
    batches, loss, terms, grads = forward_backward(spec, state, frozen, batch)
    weights = [jnp.sum(weight) for _, weight in split_terms(terms)[0].values()]
    supervised = sum(weights, jnp.zeros(())) > 0
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    use = supervised & finite
    grads = jax.tree.map(lambda grad: jnp.where(use, grad, 0.0), grads)  # a product would keep NaN
    rate = spec.learning_rate(state.step)
    masters, fixed = split_trainable(state.params)
    updated = opt.apply(spec.optimizer, grads, state.opt_state, masters, rate)
    masters, opt_state = jax.tree.map(lambda new, old: jnp.where(use, new, old), updated, (masters, state.opt_state))
    ema = state.ema
    if spec.ema_decay is not None:
        average = opt.averaged(ema, masters, spec.ema_decay, state.step)
        ema = jax.tree.map(lambda new, old: jnp.where(use, new, old), average, ema)
    count = functools.partial(supervised_anchors, num_proposals=spec.drafter.num_proposals)
    teaching = jax.vmap(count)(batches.anchors, batches.keep, batch["loss_mask"])
    state = TrainState(
        params=join_trainable(masters, fixed),
        opt_state=opt_state,
        step=state.step + 1,
        skipped=state.skipped + (~supervised).astype(jnp.int32),
        nonfinite=state.nonfinite + (supervised & ~finite).astype(jnp.int32),
        key=state.key,
        ema=ema,
    )
    return state, {
        "loss": jnp.where(supervised, loss, 0.0),
        "grad_norm": jnp.where(supervised, norm, 0.0),
        "learning_rate": rate,
        "terms": terms,
        "anchors": batches.keep.sum(dtype=jnp.int32),
        "supervised_anchors": teaching.sum(dtype=jnp.int32),
        "supervised_tokens": batch["loss_mask"].sum(dtype=jnp.int32),
        "skipped": state.skipped,
        "nonfinite": state.nonfinite,
    }


def attention_over(name: str, interpret: Any = False) -> contextlib.AbstractContextManager[None]:
    """Selects the attention of the drafter's blocks, each device running the kernel on its share of the mesh."""
    return use_implementation(name, interpret, batch_axes=BATCH, head_axis=TENSOR)


def compile_step(
    spec: StepSpec, state: Any, frozen: Any, batch: Any, placement: Placement
) -> Callable[[TrainState, Frozen, dict[str, jax.Array]], tuple[TrainState, dict[str, Any]]]:
    """Compile the step ahead of time; the result takes these shapes and placements only, so it can never compile again.

    Args:
      state, frozen, batch: arrays or abstract ones, placed as `placement` says.
    """
    states = placement.shardings(state)

    def step(state: TrainState, frozen: Frozen, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
        return train_step(spec, state, frozen, batch)

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(states, placement.replicated))
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):  # what is traced may ask for its size
        return jitted.lower(
            abstract(state, states), abstract(frozen, placement.shardings(frozen)), abstract(batch, placement.rows)
        ).compile()
