"""Kinds 1: layer ids, and the target's forward: whole sequences, and prefill, verify, crop, verify over the paged cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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
    model, params = target.model, target.params
    ids = jnp.asarray(case.input("input_ids"), jnp.int32)
    layers = model.config.num_layers
    taps = (EMBEDDING, *range(layers - 1), FINAL)
    out = jax.jit(lambda params, ids: model.forward_sequences(params, ids, taps))(params, ids)
    states = np.asarray(out.features).reshape(*ids.shape, len(taps), -1)
    found: Tensors = {
        "logits": model.logits(params, out.hidden),
        "hidden_states": np.moveaxis(states, 2, 0),
    }
    for depth in case.setting("num_draft_layers"):
        chosen = build_target_layer_ids(layers, int(depth))
        features = model.forward_sequences(params, ids, chosen).features
        found[f"layer_ids_{depth}"], found[f"features_{depth}"] = np.asarray(chosen, np.int64), features
    return found | _verification(case, ids[0])


def _verification(case: Case, ids: jax.Array) -> Tensors:
    """A prefill, a verify block that leaves the sequence after KEPT rows, and the block that follows once it is cut there."""
    prefill, block = int(case.setting("prefill")), int(case.setting("block"))
    paged = PagedTarget(target_of(case), room=prefill + KEPT + block)
    last = paged.run(ids[:prefill], at=0)[-1:]
    strayed = (ids[prefill : prefill + block] + (jnp.arange(block) >= KEPT)) % paged.vocab_size
    first = paged.run(strayed, at=prefill)
    second = paged.run(ids[prefill + KEPT : prefill + KEPT + block], at=prefill + KEPT)
    return {
        "prefill_last_logits": last[None],
        "verify_ids_1": strayed[None],
        "verify_logits_1": first[None],
        "verify_logits_2": second[None],
    }


KINDS = {"1.layer_ids": layer_ids, "1.target_forward": target_forward}
