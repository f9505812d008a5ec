"""A drafter's reduced vocabulary: which of the target's ids it can propose, and the two maps that its checkpoint holds.

`d2t` is an offset (target id = draft id + d2t[draft id]), `t2d` a mask over the target's ids. Draft ids follow the
target's ids in ascending order, which is what lets a teacher be cut to `logits[..., t2d]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.errors import ConfigError

D2T, T2D = "d2t", "t2d"


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent ids of counts [V], ascending; the lowest ids win ties and fill up. ConfigError for a
    size that does not fit."""
    if not 0 < size <= counts.shape[0]:
        raise ConfigError(f"draft_vocab_size: found {size}, expected 1 to the target's {counts.shape[0]} ids")
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def count_supervised(sequences: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> np.ndarray:
    """How often each id [V] is a supervised token of (ids, loss mask) pairs; prompts do not count."""
    counts = np.zeros(vocab_size, np.int64)
    for ids, mask in sequences:
        counts += np.bincount(np.asarray(ids)[np.asarray(mask).astype(bool)], minlength=vocab_size)
    return counts


def maps(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` of ascending target ids."""
    chosen = np.zeros(vocab_size, bool)
    chosen[ids] = True
    return {D2T: (ids - np.arange(len(ids))).astype(np.int32), T2D: chosen}


def target_ids(params: Any, draft_vocab: int) -> Int[Array, "Vd"]:
    """Target id of each draft id; the identity where the checkpoint has no map."""
    ids = jnp.arange(draft_vocab, dtype=jnp.int32)
    return ids + params[D2T].astype(jnp.int32) if D2T in params else ids


def in_draft(params: Any, ids: Int[Array, "Vd"], vocab_size: int) -> Bool[Array, "V"]:
    """Whether each of the target's ids is in the draft vocabulary."""
    return params[T2D] if T2D in params else jnp.zeros(vocab_size, bool).at[ids].set(True)
