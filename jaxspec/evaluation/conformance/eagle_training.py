"""Kinds 7: EAGLE-3 training as SpecForge does it, EAGLE-1 training as SafeAILab does it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.drafters.base import Batch, Shared
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.evaluation.conformance import training
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import draft_of, shared_of


def eagle3(case: Case) -> Tensors:
    """Losses, overlaps and accuracies of every step, the states and logits behind them, and the gradients.

    The case gives the teacher's logits, already shifted: they are passed as the hidden states of an identity head.
    """
    shifted = case.input("target")
    vocab = shifted.shape[-1]
    logits = np.concatenate([np.zeros_like(shifted[:, :1]), shifted[:, :-1]], axis=1)
    batch = _batch(case, case.input("raw_input_ids"), case.input("loss_mask")[..., 0], logits)
    shared = Shared(shared_of(case).embedding, jnp.eye(vocab, dtype=jnp.float32))
    objective: dict[str, Any] = {"ttt_length": int(case.setting("ttt")), "drop_last_row": False}
    if case.config.get("ploss_decay") is not None:
        objective["step_decay"] = float(case.config["ploss_decay"])
    if case.config.get("lk_loss_type") is not None:
        objective["lk"] = case.config["lk_loss_type"]
        objective |= {name: float(case.config[name]) for name in ("kl_scale", "kl_decay") if name in case.config}
    step = training.train_step(case, batch, shared=shared, **objective)
    terms = step.terms
    overlap, known = terms["overlap"]
    correct, rows = terms["metric/accuracy_step"]
    found = {
        **step.trace,
        **training.gradients(step),
        "plosses": step.drafter.step_losses(terms),
        "loss": step.loss,
        "acceptance_rates": overlap / known,
        "acc_corrects": correct,
        "acc_denoms": rows,
        "acces": correct / rows,
    }
    return found | _maps(case, step.drafter)


def _maps(case: Case, drafter: Eagle3) -> Tensors:
    """The vocabulary maps, as int64 offsets and a mask."""
    params = draft_of(case).params
    found = {name: np.asarray(params[name]) for name in drafter.maps}
    return {name: value.astype(np.int64) if name == "d2t" else value for name, value in found.items()}


def eagle1(case: Case) -> Tensors:
    """Prediction, both losses and the gradients, without input noise."""
    following = case.input("input_ids")
    ids = np.concatenate([case.input("raw_input_ids")[:, :1], following[:, :-1]], axis=1)
    batch = _batch(case, ids, case.input("loss_mask"), None)
    weights: dict[str, Any] = {"feature_alpha": float(case.setting("v_w")), "token_alpha": float(case.setting("p_w"))}
    step = training.train_step(case, batch, _terms, noise=0.0, drop_last_row=False, **weights)
    return {**step.trace, **training.gradients(step), "loss": step.loss}


def _terms(drafter: Any, params: Any, shared: Shared, trace: dict[str, Array]) -> dict[str, Array]:
    return {"out_head": drafter.draft_logits(params, shared, trace["predict"])}


def _batch(case: Case, ids: np.ndarray, mask: np.ndarray, teacher: np.ndarray | None) -> Batch:
    return Batch(
        input_ids=jnp.asarray(ids.astype(np.int32)),
        loss_mask=jnp.asarray(mask > 0.5),
        features=jnp.asarray(case.input("hidden_states")),
        anchors=jnp.zeros((ids.shape[0], 0), jnp.int32),
        keep=jnp.zeros((ids.shape[0], 0), bool),
        teacher_hidden=None if teacher is None else jnp.asarray(teacher),
        lengths=jnp.asarray(case.input("attention_mask").sum(axis=1).astype(np.int32)),
    )


KINDS = {"7.eagle3_training_specforge": eagle3, "7.eagle1_training_safeailab": eagle1}
