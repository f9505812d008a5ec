"""The map from a drafter's reduced vocabulary to the target's, checked while loading.

Public EAGLE-3 checkpoints store it as `d2t`, an *offset* per draft id (target id = draft id + d2t[draft id]), and
`t2d`, a mask over the target's ids. Read as absolute ids, or lost, it still loads and accepts next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError

__all__ = ["check_vocab_map", "target_ids"]

D2T, T2D = "d2t", "t2d"


def target_ids(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int, *, where: str) -> np.ndarray:
    """Target id of each draft id, int32 [draft vocabulary], ascending.

    Args:
      d2t: integer offsets [draft vocabulary].
      t2d: bool mask [V], or None where the checkpoint has none.
      vocab_size: V of the target.
      where: the folder, for messages.

    Raises CheckpointError when ids leave the target's vocabulary, are not ascending, or disagree with the mask.
    """
    ids = np.arange(d2t.shape[0], dtype=np.int64) + d2t.astype(np.int64)
    if t2d is not None:
        marked = np.flatnonzero(t2d)
        if t2d.shape != (vocab_size,):
            raise CheckpointError(
                f"{where}: {T2D}: found shape {list(t2d.shape)}, expected [{vocab_size}] (the target's vocabulary)"
            )
        if not np.array_equal(ids, marked) and np.array_equal(d2t, marked):
            raise CheckpointError(
                f"{where}: {D2T}: found absolute target ids, expected offsets (target id = draft id + offset)"
            )
        if not np.array_equal(ids, marked):
            raise CheckpointError(
                f"{where}: {D2T} and {T2D}: found different ids ({ids.size} and {marked.size} of them), expected the "
                "same ones"
            )
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise CheckpointError(
            f"{where}: {D2T}: found target ids from {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}"
        )
    if np.any(np.diff(ids) <= 0):
        raise CheckpointError(
            f"{where}: {D2T}: found target ids that do not ascend, expected ascending ones (head rows follow their "
            "order)"
        )
    return ids.astype(np.int32)


def check_vocab_map(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], vocab_size: int, *, where: str
) -> None:
    """Refuse a drafter whose reduced vocabulary has no map, or a map that is not one.

    Args:
      config: the drafter's config.json.
      tensors: `d2t` and `t2d`, as far as the checkpoint has them.
      vocab_size: V of the target.
    """
    draft_vocab = config.get("draft_vocab_size")
    draft_vocab = vocab_size if draft_vocab is None else draft_vocab
    if D2T not in tensors:
        if draft_vocab != vocab_size:
            raise CheckpointError(
                f"{where}: draft_vocab_size: found {draft_vocab} and no {D2T}, expected the map to the target's "
                f"{vocab_size} ids"
            )
        return
    if tensors[D2T].shape != (draft_vocab,):
        raise CheckpointError(
            f"{where}: {D2T}: found shape {list(tensors[D2T].shape)}, expected [{draft_vocab}] (draft_vocab_size)"
        )
    target_ids(tensors[D2T], tensors.get(T2D), vocab_size, where=where)
