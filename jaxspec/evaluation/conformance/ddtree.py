"""Kind 10: DDTree's tree over given logits with its greedy walk, and whole generations at several budgets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.decoding.trees import accept_tree, tree_layout
from jaxspec.drafters.ddtree import DDTree, best_first_tree
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.dflash_forward import without_windows
from jaxspec.evaluation.conformance.generation import Answer, Recorder
from jaxspec.evaluation.conformance.material import draft_of

# How the case's author plants a partially accepted path (input preparation, not the method): at each depth the walk
# ends below PLANT_STOP, else the uniform picks a child, whose token becomes the row's posterior.
PLANT_STOP, PLANT_SPREAD = 0.15, 997


def build(case: Case) -> Tensors:
    """Rows of one budget are built together, padded to the largest budget of the case."""
    budgets = case.input("budgets")
    widest = int(case.input("posterior").shape[1]) - 1
    found: Tensors = {}
    for budget in np.unique(budgets):
        rows = np.flatnonzero(budgets == budget)
        for name, values in _build(case, rows, int(budget), widest).items():
            found.setdefault(name, np.zeros((len(budgets), *values.shape[1:]), values.dtype))[rows] = values
    return found


def _build(case: Case, rows: np.ndarray, budget: int, widest: int) -> Tensors:
    logits = case.input("draft_logits")[rows]
    start, root = (case.input(name)[rows].astype(np.int32) for name in ("start", "root"))
    tokens, tree = jax.jit(best_first_tree, static_argnums=1)(logits, budget)
    valid, parents = np.asarray(tree.valid), np.asarray(tree.parents)
    used = case.input("posterior")[rows].copy()
    for one, plant in enumerate(case.input("plant")[rows]):
        _plant(used[one], plant, np.asarray(tokens)[one], parents[one], valid[one])
    said = np.where(np.arange(widest + 1) <= budget, used, 0)[:, : budget + 1]

    @jax.jit
    def walk(tokens: Array, tree: Any, said: Array) -> tuple[Any, ...]:
        count = tokens.shape[0]
        pages = jnp.zeros((count, 1), jnp.int32)
        layout = tree_layout(start, jnp.ones(count, bool), tree, pages)
        target = jax.nn.one_hot(said, max(logits.shape[-1], int(used.max()) + 1))
        u, last = jnp.zeros(said.shape), jnp.zeros(count)
        limit = jnp.full(count, tree.max_depth)
        accepted = accept_tree(target, tokens, tree, SlotSampling.zeros(count), u, last, limit, "match")
        return layout.ancestors(), layout.positions.reshape(said.shape), accepted

    ancestors, positions, accepted = walk(tokens, tree, jnp.asarray(said, jnp.int32))
    exists = np.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    both = exists[:, :, None] & exists[:, None, :]
    input_ids = np.concatenate([root[:, None], np.asarray(tokens)], axis=1)
    path = np.pad(np.asarray(accepted.path), ((0, 0), (1, 0)))
    length = np.asarray(accepted.accepted)[:, None] + 1
    return {
        "node_count": valid.sum(axis=1).astype(np.int64),
        "node_token_ids": _wide(np.where(valid, tokens, -1), widest, -1),
        "node_depths": _wide(np.where(valid, tree.depths, -1), widest, -1),
        "parents": _wide(np.pad(np.where(valid, parents, -2), ((0, 0), (1, 0)), constant_values=-1), widest + 1, -2),
        "visibility": _wide(np.asarray(ancestors) & both, widest + 1, 0).astype(np.uint8),
        "posterior_used": used.astype(np.int64),
        "accepted_indices": _wide(np.where(np.arange(path.shape[1]) < length, path, -1), logits.shape[1] + 1, -1),
        "accepted_count": length[:, 0].astype(np.int64),
        "next_token": np.asarray(accepted.token).astype(np.int64),
        "verify_input_ids": _wide(np.where(exists, input_ids, -1), widest + 1, -1),
        "verify_position_ids": _wide(np.where(exists, positions, -1), widest + 1, -1),
    }


def _wide(values: np.ndarray, to: int, fill: int) -> np.ndarray:
    """Every axis but the first padded to `to`."""
    room = [(0, 0), *((0, to - size) for size in values.shape[1:])]
    return np.pad(values.astype(np.int64), room, constant_values=fill)


def _plant(used: np.ndarray, plant: np.ndarray, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray) -> None:
    row = 0
    for uniform in plant:
        children = np.flatnonzero(valid & (parents == row))
        if uniform < PLANT_STOP or not children.size:
            return
        child = children[int(float(uniform) * PLANT_SPREAD) % children.size]
        used[row], row = tokens[child], child + 1


def generate(case: Case) -> Tensors:
    """Every prompt at every budget, greedily."""
    draft = draft_of(case)
    inner = without_windows(draft.drafter)
    found: Tensors = {}
    for number, budget in enumerate(case.setting("tree_budgets")):
        drafter = DDTree(inner, int(budget))
        recorder = Recorder(case, dataclasses.replace(draft, drafter=drafter))
        for index, answer in enumerate(recorder.run()):
            tensors = _rounds(answer, depth=drafter.num_proposals)
            tokens = [token for token in answer.tokens[: recorder.limit] if token != drafter.mask_token_id]
            tensors["output_ids"] = recorder.ids(index, tokens)  # the reference drops tokens that equal the mask id
            found |= {f"{name}_{index}_b{number}": values for name, values in tensors.items()}
    return found


def _rounds(answer: Answer, depth: int) -> Tensors:
    valid, accepted = answer.stacked("valid"), answer.new_tokens()
    shown = lambda name: np.where(valid, answer.stacked(name), -9).astype(np.int64)  # noqa: E731
    path = np.pad(answer.stacked("path"), ((0, 0), (1, 0)))
    root = np.full((len(accepted), 1), -1, np.int64)
    return {
        "acceptance_lengths": accepted,
        "node_token_ids": shown("proposal"),
        "node_depths": shown("depths"),
        "parents": np.concatenate([root, shown("parents")], axis=1),
        "accepted_indices": np.where(np.arange(depth + 1) < accepted[:, None], path, -9).astype(np.int64),
    }


KINDS = {"10.ddtree_build": build, "10.ddtree_generate": generate}
