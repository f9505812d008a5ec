"""Kinds 1: layer ids, and the target's forward over whole sequences and over the paged cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxspec.drafters.block_config import build_target_layer_ids
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import target_of
from jaxspec.evaluation.conformance.paged import PagedTarget
from jaxspec.models.decoder import EMBEDDING, FINAL

KEPT = 2  # rows of the first verify block that follow the sequence; the cache is cut behind them


def layer_ids(case: Case) -> Tensors:
    """Tap layers of every (target depth, drafter depth), padded with -1 to the deepest drafter."""
    depths, widths = case.input("num_layers"), case.input("num_draft")
    found = np.full((len(depths), len(widths), int(widths.max())), -1, np.int64)
    for row, depth in enumerate(depths):
        for column, width in enumerate(widths):
            found[row, column, : int(width)] = build_target_layer_ids(int(depth), int(width))
    return {"layer_ids": found}


def target_forward(case: Case) -> Tensors:
    """Logits, all hidden states, the features of each drafter depth, and the logits of paged verification."""
    target = target_of(case)
    model, layers = target.model, target.config.num_layers
    ids = case.input("input_ids").astype(np.int32)
    depths = [int(depth) for depth in case.setting("num_draft_layers")]
    chosen = {depth: build_target_layer_ids(layers, depth) for depth in depths}

    @jax.jit
    def forward(params: Any, ids: Array) -> tuple[Array, ...]:
        whole = model.forward_sequences(params, ids, (EMBEDDING, *range(layers - 1), FINAL))
        features = [model.forward_sequences(params, ids, taps).features for taps in chosen.values()]
        return model.logits(params, whole.hidden), whole.features, *features

    logits, states, *features = map(np.asarray, forward(target.params, ids))
    states = states.reshape(*ids.shape, layers + 1, -1)
    found: Tensors = {"logits": logits, "hidden_states": np.moveaxis(states, 2, 0)}
    for depth, captured in zip(depths, features, strict=True):
        found[f"layer_ids_{depth}"], found[f"features_{depth}"] = np.asarray(chosen[depth], np.int64), captured
    return found | _verification(case, ids[0])


def _verification(case: Case, ids: np.ndarray) -> Tensors:
    """A prefill, a verify block that strays after KEPT rows, and the block that follows once it is cut there."""
    prefill, block = int(case.setting("prefill")), int(case.setting("block"))
    paged = PagedTarget(target_of(case), room=prefill + KEPT + block)
    last = paged.run(ids[:prefill], at=0)[-1:]
    strayed = (ids[prefill : prefill + block] + (np.arange(block) >= KEPT)) % target_of(case).config.vocab_size
    first = paged.run(strayed.astype(np.int32), at=prefill)
    second = paged.run(ids[prefill + KEPT : prefill + KEPT + block], at=prefill + KEPT)
    return {
        "prefill_last_logits": last[None],
        "verify_ids_1": strayed[None],
        "verify_logits_1": first[None],
        "verify_logits_2": second[None],
    }


KINDS = {"1.layer_ids": layer_ids, "1.target_forward": target_forward}
