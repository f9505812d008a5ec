"""Kinds 7.eagle1_static_tree and 7.eagle_tree_sglang: trees from given choices, or from given top-k lists."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.decoding.trees import accept_tree, tree_layout
from jaxspec.drafters.base import Tree
from jaxspec.drafters.draft_tree import StaticTree, first_level, keep_best, next_level
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.eagle_inference import leaf_paths

_TOP_K = 10  # width of the reference's tables
_STOP = 0.15  # see `_planted`


def static_tree(case: Case) -> Tensors:
    """Buffers of a fixed tree: ancestor mask, table slots, depths and leaf paths."""
    tree = StaticTree(tuple(tuple(map(int, path)) for path in case.setting("choices")))
    shape = tree.tree(1)
    paths = leaf_paths(tree.parents)
    order = np.lexsort(np.where(paths < 0, paths.max() + 5, paths).T[::-1])
    return {
        "tree_attn_mask": _mask(shape)[:, None].astype(np.float32),
        "tree_indices": tree.table_slots(_TOP_K),
        "tree_position_ids": np.pad(np.asarray(shape.depths[0]), (1, 0)).astype(np.int64),
        "retrieve_indices": paths[order],
    }


def _mask(tree: Tree) -> np.ndarray:
    requests = tree.parents.shape[0]
    zeros = jnp.zeros(requests, jnp.int32)
    layout = tree_layout(zeros, jnp.ones(requests, bool), tree, zeros[:, None])
    return np.asarray(jax.jit(lambda: layout.ancestors())())


def sglang(case: Case) -> Tensors:
    """The beam search over given lists, the tree it keeps, its links, and the greedy verification of it.

    The reference multiplies probabilities where the drafter adds their logarithms.
    """
    steps, verify = int(case.setting("steps")), int(case.setting("verify"))
    lists = [(case.input(f"topk_p_{step}"), case.input(f"topk_index_{step}")) for step in range(steps)]
    found, tree, tokens = _search(lists, verify - 1)
    requests = tokens.shape[0]
    roots, first = case.input("bonus_tokens").astype(np.int32), case.input("seq_lens").astype(np.int32)
    rows = np.concatenate([roots[:, None], tokens], axis=1).astype(np.int64)
    children = [_children(parents) for parents in np.asarray(tree.parents)]
    posterior = case.input("target_predict_random").copy()
    for one in range(requests):
        _planted(posterior[one], rows[one], children[one], case.input("path_pick")[one])
    mask = _mask(tree)
    full = [np.concatenate([np.ones((verify, int(n)), bool), one], axis=1) for n, one in zip(first, mask, strict=True)]
    found |= {
        "tree_tokens": rows,
        "tree_mask_qlen": mask,
        "tree_mask_full": np.concatenate([one.reshape(-1) for one in full]),
        "positions": (first[:, None] + np.pad(np.asarray(tree.depths), ((0, 0), (1, 0)))).astype(np.int64),
        "retrieve_index": np.arange(requests * verify, dtype=np.int64).reshape(requests, verify),
        "retrieve_next_token": np.asarray([[kids[0] if kids else -1 for kids in one] for one in children], np.int64),
        "retrieve_next_sibling": np.asarray([_siblings(one) for one in children], np.int64),
        "target_predict": posterior,
    }
    return found | _verified(tokens, tree, posterior, steps, int(case.setting("vocab")))


def _search(lists: list[tuple[np.ndarray, np.ndarray]], nodes: int) -> tuple[Tensors, Tree, np.ndarray]:
    requests, k = lists[0][0].shape
    found: dict[str, Any] = {}

    @jax.jit
    def search(given: list[tuple[Array, Array]]) -> Any:
        pool, beam = first_level(jnp.log(given[0][0]), given[0][1])
        beams = [beam]
        for probs, tokens in given[1:]:
            shape = (requests, k, k)
            pool, beam = next_level(pool, beam, jnp.log(probs).reshape(shape), tokens.reshape(shape))
            beams.append(beam)
        return pool, beams, keep_best(pool, nodes, len(given))

    pool, beams, (tokens, tree, places) = search([(probs, tokens.astype(np.int32)) for probs, tokens in lists])
    pool_tokens, scores = np.asarray(pool.tokens), np.exp(np.asarray(pool.scores))
    for step, beam in enumerate(beams):
        found[f"input_ids_{step}"] = np.take_along_axis(pool_tokens, np.asarray(beam.places), axis=1)
        found[f"scores_{step}"] = np.take_along_axis(scores, np.asarray(beam.places), axis=1)
    before = np.full((requests, 1), -1)
    parents = [before, *(np.asarray(beam.places) for beam in beams[:-1])]
    found |= {
        "parent_list": np.concatenate(parents, axis=1).astype(np.int64),
        "top_scores_index": np.asarray(places).astype(np.int64),
        "draft_tokens": np.asarray(tokens).astype(np.int64),
        "all_scores": scores,
        "all_tokens": pool_tokens.astype(np.int64),
    }
    return found, tree, np.asarray(tokens)


def _children(parents: np.ndarray) -> list[list[int]]:
    """Rows below each row, ascending."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents.tolist(), 1):
        found[parent].append(node)
    return found


def _siblings(children: list[list[int]]) -> list[int]:
    following = {row: after for kids in children for row, after in itertools.pairwise(kids)}
    return [following.get(row, -1) for row in range(len(children))]


def _planted(posterior: np.ndarray, tokens: np.ndarray, children: list[list[int]], picks: np.ndarray) -> None:
    """Input preparation of the case: the target's choices follow a path that the picks describe, in place.

    A pick chooses a child by its share of [0, 1); a small one ends the path. The cases say no more than that: those
    that were handed out end it at 0.083 and go on at 0.217.
    """
    row = 0
    for pick in picks:
        if pick < _STOP or not children[row]:
            return
        child = children[row][int(pick * len(children[row]))]
        posterior[row], row = tokens[child], child


def _verified(tokens: np.ndarray, tree: Tree, posterior: np.ndarray, steps: int, vocab: int) -> Tensors:
    """The round's own greedy acceptance over logits that are one-hot at the target's choices."""
    requests, rows = posterior.shape

    @jax.jit
    def accept(tokens: Array, posterior: Array) -> Any:
        u = jnp.zeros((requests, rows))
        limit = jnp.full(requests, tree.max_depth)
        logits = jax.nn.one_hot(posterior, vocab)
        return accept_tree(logits, tokens, tree, SlotSampling.zeros(requests), u, u[:, 0], limit)

    out = accept(tokens, posterior.astype(np.int32))
    counts, path = np.asarray(out.accepted), np.asarray(out.path)
    index = np.full((requests, steps + 1), -1, np.int32)
    predicts = np.full((requests, rows), -1, np.int32)
    for one in range(requests):
        kept = [0, *path[one, : counts[one]].tolist()]
        index[one, : len(kept)] = one * rows + np.asarray(kept)
        predicts[one, kept] = [*tokens[one, np.asarray(kept[1:], int) - 1], out.token[one]]
    return {"verify_predicts": predicts, "verify_accept_index": index, "verify_accept_num": counts.astype(np.int32)}


KINDS = {"7.eagle1_static_tree": static_tree, "7.eagle_tree_sglang": sglang}
