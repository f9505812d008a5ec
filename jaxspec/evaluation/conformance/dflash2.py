"""Kinds 6: DFlash 2's training step and greedy generation as SpecForge does them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.drafters.losses import ratio
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.dflash_forward import without_windows
from jaxspec.evaluation.conformance.dflash_training import objective_settings
from jaxspec.evaluation.conformance.generation import Recorder
from jaxspec.evaluation.conformance.material import draft_of
from jaxspec.evaluation.conformance.training import Step, batch_of, gradients, metrics, train_step

SETTINGS = {
    "selector_alpha": "selector_alpha",
    "stop_gradient": "selector_stop_gradient",
    "selector_stop_gradient": "selector_stop_gradient",
}
BASE_METRICS = {"acc": "metric/accuracy", "target_probability": "metric/target_probability"}
SELECTOR_METRICS = {
    "selector_loss": "metric/selector_ce",
    "selector_accuracy": "metric/selector_accuracy",
    "selector_coverage": "metric/selector_coverage",
    "selector_target_probability": "metric/selector_target_probability",
}


def training(case: Case) -> Tensors:
    """Two terms over one weight sum, the convolutions, and the selector's scores, lattice and greedy path."""
    given = {ours: case.config[name] for name, ours in SETTINGS.items() if case.config.get(name) is not None}
    step = train_step(case, batch_of(case, "hidden_states"), **objective_settings(case, "weights"), **given)
    terms = step.terms
    whole, weight = numerators(step)
    found: Tensors = {
        **step.trace,
        **gradients(step),
        **metrics(terms, BASE_METRICS),
        **selector_metrics(terms),
        "loss": step.loss,
        "loss_num": whole["all"],
        "loss_den": weight,
        "metric.token_loss.num": whole["token"],
        "metric.token_loss.den": weight,
        "accuracy": ratio(*terms["metric/accuracy"]),
    }
    return found


def numerators(step: Step) -> tuple[dict[str, Array], Array]:
    """The objective's numerator with and without the selector's term, and the weight sum: the objective over unit
    weights is its numerator, whatever mixture of the terms it is."""
    ones = {name: (total, jnp.ones(())) for name, (total, _) in step.terms.items() if name in ("ce", "tv", "selector")}
    token = {name: pair for name, pair in (step.terms | ones).items() if name != "selector"}
    objective = step.drafter.objective
    return {"all": objective(step.terms | ones), "token": objective(token)}, step.terms["ce"][1]


def selector_metrics(terms: Any) -> Tensors:
    """The reference reports zeros for a selector that its loss leaves out."""
    if "selector" in terms:
        return metrics(terms, SELECTOR_METRICS)
    zero = jnp.zeros(())
    found = {f"metric.{name}.{part}": zero for name in SELECTOR_METRICS for part in ("num", "den")}
    return found | {"metric.selector_coverage.den": terms["metric/accuracy"][1]}


def generation(case: Case) -> Tensors:
    """Greedy answers with and without the drafter; the reference drops answer tokens equal to the mask token."""
    draft = draft_of(case)
    mask = draft.drafter.mask_token_id
    recorder = Recorder(case, dataclasses.replace(draft, drafter=without_windows(draft.drafter)))
    found: Tensors = {}
    for index, answer in enumerate(recorder.run()):
        kept = [token for token in answer.tokens[: recorder.limit] if token != mask]
        found[f"output_ids_{index}"] = recorder.ids(index, kept)
        found[f"draft_tokens_{index}"] = answer.stacked("proposal")
        found[f"draft_hidden_{index}"] = answer.stacked("draft_hidden")
        found[f"acceptance_lengths_{index}"] = answer.new_tokens()
    plain = Recorder(case, None)
    for index, answer in enumerate(plain.run()):
        found[f"ar_output_ids_{index}"] = plain.ids(index, answer.tokens)
    return found


KINDS = {"6.dflash2_training_specforge": training, "6.dflash2_generate_specforge": generation}
