"""Plain reference of anchor-block attention, and the masks that define it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.softmax import masked_softmax, mix, scores

Scalar = int | bool | Int[Array, ""] | Bool[Array, ""]


def context_mask(
    anchors: Int[Array, "B N"], keep: Bool[Array, "B N"], block: int, context: int, window: Scalar
) -> Bool[Array, "B N block S"]:
    """Row j of a kept block with anchor a sees context t < a (strictly: a's own feature does not exist yet), and with a
    window W (0 = none; the row itself counts) only t >= a + j - (W - 1)."""
    index = jnp.arange(context)
    rows = anchors[:, :, None, None] + jnp.arange(block)[:, None]
    prefix = keep[:, :, None, None] & (index < anchors[:, :, None, None])
    return prefix & ((window == 0) | (index >= rows - (window - 1)))


def block_mask(block: int, causal: Scalar, window: Scalar) -> Bool[Array, "block block"]:
    """Row j sees row k of its own block: all, or k <= j; with an inner window W (0 = none) only |j - k| < W."""
    distance = jnp.arange(block)[:, None] - jnp.arange(block)
    return ((distance >= 0) | jnp.logical_not(causal)) & ((window == 0) | (jnp.abs(distance) < window))


def anchor_attention(
    q: Float[Array, "B N block heads D"],
    context_k: Float[Array, "B S kv D"],
    context_v: Float[Array, "B S kv D"],
    block_k: Float[Array, "B N block kv D"],
    block_v: Float[Array, "B N block kv D"],
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    window: Scalar = 0,
    causal: Scalar = False,
    inner_window: Scalar = 0,
) -> Float[Array, "B N block heads D"]:
    """One softmax over the visible context rows and the block's own rows; dropped blocks give zeros.

    Rows of a block never see another block. The two parts are scored apart, so no key is copied per block.
    """
    batch, count, block, heads, dim = q.shape
    seen = context_mask(anchors, keep, block, context_k.shape[1], window)
    own = block_mask(block, causal, inner_window) & keep[:, :, None, None]
    far = scores(q.reshape(batch, count * block, heads, dim), context_k)  # [B, kv, group, N*block, S]
    near = scores(q, block_k)  # [B, N, kv, group, block, block]
    far = far.reshape(*far.shape[:3], count, block, -1).transpose(0, 3, 1, 2, 4, 5)
    weights = masked_softmax(
        jnp.concatenate([far, near], axis=-1), jnp.concatenate([seen, own], axis=-1)[:, :, None, None]
    )
    far, near = weights[..., : context_k.shape[1]], weights[..., context_k.shape[1] :]
    far = far.transpose(0, 2, 3, 1, 4, 5).reshape(batch, *far.shape[2:4], count * block, -1)
    out = mix(far, context_v).reshape(q.shape) + mix(near, block_v)
    return out.astype(q.dtype)
