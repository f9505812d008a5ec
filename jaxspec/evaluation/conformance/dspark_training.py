"""Kinds 4 and 5: DSpark training as SpecForge and DeepSpec do it. DeepSpec's `dflash` is DSpark without heads."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from jaxspec.drafters.base import Shared
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.losses import ratio
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import draft_of
from jaxspec.evaluation.conformance.training import batch_of, gradients, metrics, train_step

PLAIN_METRICS = {
    "acc": "metric/accuracy",
    "confidence_abs_error": "metric/confidence_abs_error",
    "ce_position": "metric/ce_position",
    "accuracy_position": "metric/accuracy_position",
    "teacher_agreement": "metric/teacher_agreement",
    "teacher_top1_prob": "metric/teacher_top1_prob",
    "draft_top1_prob": "metric/draft_top1_prob",
    "tau_probabilistic": "metric/tau_probabilistic",
}


def _objective(case: Case, eps: float) -> dict[str, Any]:
    ce, l1, confidence = map(float, case.setting("alphas"))
    scored = draft_of(case).drafter.heads.confidence  # without a head the references ignore its alpha
    return {
        "gamma": case.config.get("gamma"),
        "denominator_eps": eps,
        "ce_alpha": ce,
        "l1_alpha": l1,
        "confidence_alpha": confidence if scored else 0.0,
    }


def specforge(case: Case) -> Tensors:
    """Three terms over one weight sum, and the greedy walk over the same hidden states."""
    step = train_step(case, batch_of(case, "hidden_states"), _walk, **_objective(case, eps=0.0))
    terms = step.terms
    found = {
        **step.trace,
        **gradients(step),
        **metrics(terms, PLAIN_METRICS),
        "loss": step.loss,
        "accuracy": ratio(*terms["metric/accuracy"]),
    }
    for name in ("ce", "l1", "confidence"):
        found[f"metric.{name}_loss.num"] = terms[name][0]
        found[f"metric.{name}_loss.den"] = terms["ce"][1]  # SpecForge reports one weight sum for all three, used or not
    return found


def _walk(drafter: DSpark, params: Any, shared: Shared, trace: dict[str, Array]) -> dict[str, Array]:
    """What serving would propose from the training batch's hidden states."""
    hidden, previous = trace["output_hidden"][:, :, drafter.first_row :], trace["prev_token_ids"]
    walk = drafter.walk(params, shared, hidden.reshape(-1, *hidden.shape[2:]), previous[:, :, 0].reshape(-1))
    found = {
        "greedy_tokens": walk.tokens.reshape(previous.shape),
        "greedy_corrected_logits": walk.logits.reshape(*previous.shape, -1),
    }
    if walk.confidence_logits is not None:
        found["greedy_confidence_logits"] = walk.confidence_logits.reshape(previous.shape)
    return found


def deepspec(case: Case) -> Tensors:
    """Each term over its own weight sum plus DeepSpec's epsilon."""
    batch, objective = batch_of(case, "target_hidden_states"), _objective(case, eps=1e-6)
    step = train_step(case, batch, **objective)
    terms, trace = step.terms, step.trace
    if step.drafter.heads.confidence and objective["confidence_alpha"] == 0:
        # DeepSpec measures the confidence of a head that its loss leaves out
        terms = train_step(case, batch, **{**objective, "confidence_alpha": 1.0}).terms
    found = {**trace, **gradients(step), "loss": step.loss, "mask": trace["mask_full_attention"]}
    if "teacher_logits" in trace:
        found["aligned_target_logits"] = trace["teacher_logits"]
    for name in ("ce", "l1", "confidence"):
        found[f"term.{name}_loss_num"], found[f"term.{name}_loss_den"] = terms[name]
    return found


KINDS = {
    "4.dflash_training_deepspec": deepspec,
    "5.dspark_training_deepspec": deepspec,
    "5.dspark_training_specforge": specforge,
}
