"""What every training kind does: a batch with given anchors, the drafter's own loss, its gradients and its trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.drafters.base import Batch, Shared, Terms
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import draft_of, shared_of
from jaxspec.models.layers import flatten, join_trainable, split_trainable

More = Callable[[Any, Any, Shared, dict[str, Array]], dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step of a case: the drafter as configured, its terms, loss, gradients by tensor name, and trace."""

    drafter: Any
    terms: Terms
    loss: Float[Array, ""]
    gradients: Tensors
    trace: dict[str, Array]


def batch_of(case: Case, features: str, teacher: str = "target_last_hidden_states") -> Batch:
    """The case's sequences with its anchors in place of the sampler's."""
    last = case.inputs.get(teacher)
    return Batch(
        input_ids=jnp.asarray(case.input("input_ids").astype(np.int32)),
        loss_mask=jnp.asarray(case.input("loss_mask") > 0.5),
        features=jnp.asarray(case.input(features)),
        anchors=jnp.asarray(case.input("anchor_positions").astype(np.int32)),
        keep=jnp.asarray(case.input("block_keep_mask").astype(bool)),
        teacher_hidden=None if last is None else jnp.asarray(last),
    )


def train_step(
    case: Case, batch: Batch, more: More | None = None, shared: Shared | None = None, **objective: Any
) -> Step:
    """Loss, gradients and trace of one batch. `objective` replaces fields of the drafter's objective config, `more`
    adds what else is to be computed from (drafter, params, shared, trace) in the same program, `shared` stands in for
    the pair's own tables."""
    draft, shared = draft_of(case), shared_of(case) if shared is None else shared
    config = dataclasses.replace(draft.drafter.objective_config, **objective)
    drafter = dataclasses.replace(draft.drafter, objective_config=config)

    def scalar(moving: Any, fixed: Any) -> tuple[Array, Terms]:
        params = join_trainable(moving, fixed)
        terms = drafter.loss(params, shared, batch, jax.random.key(0))
        return drafter.objective(terms), terms

    @jax.jit
    def step(params: Any) -> tuple[Any, ...]:
        trace = drafter.trace(params, shared, batch)
        extra = more(drafter, params, shared, trace) if more is not None else {}
        return jax.value_and_grad(scalar, has_aux=True)(*split_trainable(params)), trace | extra

    ((loss, terms), gradients), trace = step(draft.params)
    found = {name: value for name, value in flatten(gradients).items() if value is not None}
    return Step(drafter, terms, loss, found, trace)


def gradients(step: Step) -> Tensors:
    """Gradients under the names of the cases."""
    return {f"grad.{name}": value for name, value in step.gradients.items()}


def metrics(terms: Terms, names: dict[str, str]) -> Tensors:
    """`metric.<name>.num` and `.den` of the given entries of the terms."""
    found: Tensors = {}
    for name, entry in names.items():
        found[f"metric.{name}.num"], found[f"metric.{name}.den"] = terms[entry]
    return found
