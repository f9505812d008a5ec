"""Kind 7.eagle{2,3}_inference_safeailab: greedy decoding with a dynamic tree, and the drafter's states behind it.

The reference counts a round's tokens as its root and what was accepted, and stops once more than `max_new_tokens` of
them stand; the last token of the last round is not part of its output.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import RoundTrace, SlotRunner
from jaxspec.decoding.trees import tree_layout
from jaxspec.drafters.base import Rows, Tree
from jaxspec.drafters.draft_tree import DynamicTree
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.generation import prompts
from jaxspec.evaluation.conformance.material import draft_of, shared_of, target_of
from jaxspec.evaluation.conformance.paged import PAGE, pages
from jaxspec.models.layout import uniform_layout

REFERENCE_PADDING, STACK_PADDING = -1, -9


def inference(case: Case) -> Tensors:
    """Every prompt on a slot of its own."""
    said, limit = case.setting("tree"), int(case.setting("max_new_tokens"))
    tree = DynamicTree(int(said["top_k"]), int(said["depth"]) + 1, int(said["total_token"]) - 1)
    draft = draft_of(case)
    draft = dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, tree=tree))
    found: Tensors = {}
    for index, (prompt, (tokens, rounds)) in enumerate(zip(prompts(case), _decode(case, draft, limit), strict=True)):
        counts = np.asarray([one.accepted for one in rounds], np.int64)
        ends = np.cumsum(counts + 1)
        kept = rounds[: 1 + int(np.argmax(ends > limit))]
        counts = counts[: len(kept)]
        roots = np.asarray(tokens)[np.concatenate([[0], ends])[: len(kept)]]
        one = {
            "output_ids": np.asarray([[*prompt, *tokens[: ends[len(kept) - 1]]]], np.int64),
            "accept_length": counts,
            **_trees(kept, roots),
            **_states(case, draft, [*prompt, *tokens], len(prompt), int(counts[0]) + 1),
            "draft_first_logits": kept[0].arrays["draft_first_logits"][None],
        }
        found |= {f"{name}_{index}": value for name, value in one.items()}
        for depth in range(1, tree.depth):
            found[f"draft_tree_hidden_{index}_d{depth}"] = kept[0].arrays[f"draft_states_{depth}"][None]
    return found


def _decode(case: Case, draft: Draft, limit: int) -> list[tuple[list[int], list[RoundTrace]]]:
    """New tokens and rounds of every prompt, a round more than the reference can need."""
    given, room = prompts(case), limit + 2 * draft.drafter.num_proposals + 4
    rounds: dict[int, list[RoundTrace]] = {}
    runner = SlotRunner(
        target_of(case),
        draft,
        num_slots=len(given),
        max_context=max(map(len, given)) + room + draft.drafter.num_proposals,
        observe=lambda trace: rounds.setdefault(trace.handle, []).append(trace),
    )
    params = SamplingParams(max_new_tokens=room, ignore_eos=True)
    answers: dict[int, list[int]] = {runner.admit(prompt, params): [] for prompt in given}
    while runner.live:
        for event in runner.step():
            answers[event.handle].extend(event.tokens)
    return [(tokens, rounds[handle]) for handle, tokens in answers.items()]


def _trees(rounds: list[RoundTrace], roots: np.ndarray) -> Tensors:
    """Tokens, mask, depths and leaf paths of every round's tree, and which path was chosen."""
    nodes, parents, depths = (
        np.stack([one.arrays[name] for one in rounds]) for name in ("proposal", "parents", "depths")
    )
    tree = Tree(jnp.asarray(parents), jnp.asarray(depths), jnp.ones(parents.shape, bool), int(depths.max()))
    zeros = jnp.zeros(len(rounds), jnp.int32)
    layout = tree_layout(zeros, jnp.ones(len(rounds), bool), tree, zeros[:, None])
    mask = np.asarray(jax.jit(lambda: layout.ancestors())())
    paths = [leaf_paths(one) for one in parents]
    shape = (len(rounds), max(len(one) for one in paths), max(one.shape[1] for one in paths))
    stacked = np.full(shape, STACK_PADDING, np.int64)
    for row, one in enumerate(paths):
        stacked[row, : len(one), : one.shape[1]] = one
    tokens = np.concatenate([roots[:, None], nodes], axis=1)
    best = [
        _chosen(one, tokens[row], rounds[row].arrays["posterior"], rounds[row].accepted)
        for row, one in enumerate(paths)
    ]
    return {
        "tree_tokens": tokens.astype(np.int64),
        "tree_mask": mask.astype(np.uint8),
        "tree_position_ids": np.pad(depths, ((0, 0), (1, 0))).astype(np.int64),
        "retrieve_indices": stacked,
        "best_candidate": np.asarray(best, np.int64),
    }


def leaf_paths(parents: np.ndarray) -> np.ndarray:
    """Rows from the root to every leaf, leaves in row order, padded with -1."""
    paths = []
    for leaf in sorted(set(range(1, len(parents) + 1)) - set(parents.tolist())):
        path = [leaf]
        while path[-1]:
            path.append(int(parents[path[-1] - 1]))
        paths.append(path[::-1])
    found = np.full((len(paths), max(map(len, paths))), REFERENCE_PADDING, np.int64)
    for row, path in enumerate(paths):
        found[row, : len(path)] = path
    return found


def _chosen(paths: np.ndarray, tokens: np.ndarray, posterior: np.ndarray, accepted: int) -> int:
    """The first leaf path whose first `accepted` nodes are the target's choices."""
    for row, path in enumerate(paths):
        here = path[: accepted + 1]
        if (here >= 0).all() and (tokens[here[1:]] == posterior[here[:-1]]).all():
            return row
    return -1


def _states(case: Case, draft: Draft, ids: list[int], prompt: int, more: int) -> Tensors:
    """Features, and the drafter's states over the prompt and over the rows that the first round committed."""
    target, shared, drafter = target_of(case), shared_of(case), draft.drafter
    rows = prompt + more
    table = pages(1, rows)

    @jax.jit
    def run(target_params: Any, params: Any, tokens: Array) -> tuple[Array, Array, Array]:
        features = target.model.forward_sequences(target_params, tokens[None, :-1], drafter.taps).features[0]
        pool = drafter.init_state(int(table.max()) + 1, PAGE, jnp.float32, 1).pool
        states = []
        for start, count in ((0, prompt), (prompt, more)):
            layout = uniform_layout(jnp.full(1, start), jnp.full(1, count), jnp.asarray(table), count)
            piece = slice(start, start + count)
            given = Rows(features[piece], tokens[piece], tokens[start + 1 : start + count + 1])
            out, pool = drafter.extend(params, shared, pool, given, layout)
            states.append(out)
        return features, states[0], states[1]

    features, first, second = run(target.params, draft.params, jnp.asarray(ids[: rows + 1], jnp.int32))
    return {
        "input_features": features[None, :prompt],
        "draft_input_ids": np.asarray([ids[: prompt + 1]], np.int64),
        "draft_prefill_hidden": first[None],
        "draft_step1_features": features[None, prompt:],
        "draft_step1_input_ids": np.asarray([ids[: rows + 1]], np.int64),
        "draft_step1_hidden": second[None],
    }


KINDS = {"7.eagle2_inference_safeailab": inference, "7.eagle3_inference_safeailab": inference}
