"""Anchor positions of the block methods.

Every rule ranks the candidates by one uniform number each and keeps the smallest, which draws without replacement. The
numbers come from a key folded with the example's id and its epoch, so that neither the device count, the place in the
batch nor a restart can change them. The width is always `num_anchors` (a width that followed the data would compile
again at every step); unused places hold position 0 and keep False.

Sources: SpecForge `_sample_anchor_positions` and DeepSpec `sample_anchor_positions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

__all__ = ["AnchorRule", "anchor_uniforms", "any_anchor", "sample_anchors", "supervised_anchors", "trim_width"]

AnchorRule = Literal["adjacent", "legacy"]

_NEVER = 2.0  # ranks behind every uniform number in [0, 1)


def anchor_uniforms(key: jax.Array, example_ids: jax.Array, epoch: jax.Array, seq_len: int) -> jax.Array:
    """One uniform number per candidate anchor.

    Args:
      key: typed PRNG key of the run.
      example_ids: int32 [B], the position of each example in the data set (not in the batch).
      epoch: int32 scalar or [B], how often the data set was passed through before.
      seq_len: S.

    Returns:
      float32 [B, S-1] in [0, 1).
    """
    epochs = jnp.broadcast_to(jnp.asarray(epoch), example_ids.shape)

    def one(example_id: jax.Array, example_epoch: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, example_id), example_epoch)
        return jax.random.uniform(own, (max(seq_len - 1, 0),), jnp.float32)

    return jax.vmap(one)(example_ids, epochs)


def _valid(loss_mask: jax.Array, rule: AnchorRule, block_size: int) -> jax.Array:
    """bool [B, S-1]: the positions that may become anchors."""
    seq_len = loss_mask.shape[1]
    if rule == "adjacent":
        return loss_mask[:, :-1] & loss_mask[:, 1:]
    if rule == "legacy":
        return loss_mask[:, :-1] & (np.arange(seq_len - 1) <= seq_len - block_size)
    raise ValueError(f"data.anchor_rule: found {rule!r}, expected 'adjacent' or 'legacy'")


def sample_anchors(
    uniforms: jax.Array, loss_mask: jax.Array, num_anchors: int, rule: AnchorRule = "adjacent", block_size: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Draw the anchors of each sequence, uniformly and without replacement, sorted ascending.

    Args:
      uniforms: float32 [B, S-1], one number per candidate (see `anchor_uniforms`).
      loss_mask: bool or 0/1 [B, S].
      num_anchors: N, the fixed width of the result.
      rule: "adjacent": a <= S-2 with a and a+1 supervised; "legacy" (SpecForge before July 2026, AngelSlim): a <= S-B
        with a supervised, at most one anchor fewer than the fullest row of the batch has candidates.
      block_size: B, used by "legacy" only.

    Returns:
      anchors int32 [B, N], keep bool [B, N].
    """
    valid = _valid(loss_mask.astype(jnp.float32) > 0.5, rule, block_size)
    counts = valid.sum(axis=1, dtype=jnp.int32)
    limit = jnp.int32(num_anchors)
    if rule == "legacy":
        limit = jnp.clip(counts.max() - 1, 0, num_anchors)
    ranked = jnp.argsort(jnp.where(valid, uniforms, _NEVER), axis=1)[:, :num_anchors].astype(jnp.int32)
    ranked = jnp.pad(ranked, ((0, 0), (0, num_anchors - ranked.shape[1])))
    keep = jnp.arange(num_anchors) < jnp.minimum(counts, limit)[:, None]
    # the sequence length sorts behind every position, so what is kept stays in front
    ordered = jnp.sort(jnp.where(keep, ranked, loss_mask.shape[1]), axis=1)
    return jnp.where(keep, ordered, 0), keep


def supervised_anchors(
    anchors: Int[Array, "B N"], keep: Bool[Array, "B N"], loss_mask: Bool[Array, "B S"], num_proposals: int
) -> Bool[Array, "B N"]:
    """The kept anchors that teach something: a supervised token is among the m = num_proposals after them."""
    # cumulative counts with a zero in front: the tokens from a + 1 to b are counts[b + 1] - counts[a + 1]
    counts = jnp.pad(jnp.cumsum(loss_mask.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))
    last = jnp.minimum(anchors + num_proposals, loss_mask.shape[1] - 1)
    ahead = jnp.take_along_axis(counts, last + 1, axis=1) - jnp.take_along_axis(counts, anchors + 1, axis=1)
    return keep & (ahead > 0)


def any_anchor(loss_masks: Iterable[np.ndarray], seq_len: int, rule: AnchorRule, block_size: int) -> bool:
    """Whether some batch of these sequences (bool [S_i], padded to `seq_len`) can have an anchor under `rule`."""
    # "legacy" keeps one anchor fewer than the fullest row of a batch has candidates
    least = 2 if rule == "legacy" else 1
    for mask in loss_masks:
        padded = np.zeros((1, seq_len), bool)
        padded[0, : len(mask)] = mask[:seq_len]
        if np.asarray(_valid(padded, rule, block_size)).sum() >= least:
            return True
    return False


def trim_width(anchors: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut [B, N] to the width of the fullest row, as SpecForge's data-dependent width does. Host only: the shape
    follows the data."""
    width = int(np.asarray(keep).sum(axis=1).max(initial=0))
    return np.asarray(anchors)[:, :width], np.asarray(keep)[:, :width]
