"""Kinds 4: DFlash training as SpecForge does it (both generations of its objective)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.drafters.losses import ratio
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.training import Step, batch_of, gradients, metrics, train_step

PLAIN = (None, "dflash", "weighted_ce")  # what the references call the loss without D-PACE


def specforge(case: Case) -> Tensors:
    """The objective that divides a D-PACE loss by the batch size."""
    return _tensors(train_step(case, batch_of(case, "hidden_states"), **objective_settings(case, "batch")))


def specforge_newer(case: Case) -> Tensors:
    """The objective that divides by the weight sum and knows the LK mixtures."""
    return _tensors(train_step(case, batch_of(case, "hidden_states"), **objective_settings(case, "weights")))


def objective_settings(case: Case, normalizer: str) -> dict[str, Any]:
    """Fields of DFlash's objective as a case names them."""
    config = case.config
    loss_type = config.get("loss_type")
    settings = {
        "loss_type": "weighted_ce" if loss_type in PLAIN else loss_type,
        "gamma": config.get("gamma"),
        "lk": config.get("lk"),
    }
    given = {name: config[name] for name in ("dpace_alpha", "kl_scale", "kl_decay") if config.get(name) is not None}
    return {"dpace_normalizer": normalizer, **settings, **given}


def _tensors(step: Step) -> Tensors:
    terms, trace = step.terms, step.trace
    weight = terms["ce"][1]
    # the objective over unit weights is its numerator, whatever mixture of the terms it is
    numerator = step.drafter.objective({**terms, **{name: (terms[name][0], jnp.ones(())) for name in ("ce", "tv")}})
    return {
        **trace,
        **gradients(step),
        **metrics(terms, {"acc": "metric/accuracy", "target_probability": "metric/target_probability"}),
        "loss": step.loss,
        "loss_num": numerator,
        "loss_den": weight,
        "metric.token_loss.num": numerator,
        "metric.token_loss.den": weight,
        "accuracy": ratio(*terms["metric/accuracy"]),
    }


KINDS = {"4.dflash_training_specforge": specforge, "4.dflash_training_specforge_newer": specforge_newer}
