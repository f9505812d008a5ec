"""Plain reference of anchor-block attention, and the masks that define it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.anchor_attention.ranges import Scalar
from pallas_kernels.softmax import masked_softmax, mix, scores


def context_mask(
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    block: int,
    context: int,
    window: Scalar,
    starts: Int[Array, "B N"] | None = None,
) -> Bool[Array, "B N block S"]:
    """Row j of a kept block with anchor a sees context t < a (strictly: a's own feature does not exist yet), and with a
    window W (0 = none; the row itself counts) only t >= a + j - (W - 1). In packed sequences `starts` is the first row
    of each block's document, and nothing before it is seen."""
    index = jnp.arange(context)
    rows = anchors[:, :, None, None] + jnp.arange(block)[:, None]
    prefix = keep[:, :, None, None] & (index < anchors[:, :, None, None])
    if starts is not None:
        prefix = prefix & (index >= starts[:, :, None, None])
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
    starts: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N block heads D"]:
    """One softmax over the visible context rows and the block's own rows; dropped blocks give zeros.

    Rows of a block never see another block. The two parts are scored apart, so no key is copied per block.
    """
    batch, count, block, heads, dim = q.shape
    seen = context_mask(anchors, keep, block, context_k.shape[1], window, starts)
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


def lookahead_attention(
    q: Float[Array, "B S heads D"],
    first_k: Float[Array, "B S kv D"],
    first_v: Float[Array, "B S kv D"],
    own_k: Float[Array, "B S steps kv D"],
    own_v: Float[Array, "B S steps kv D"],
    index: Scalar,
    lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B S heads D"]:
    """Step `index` of EAGLE-3's training-time test: row t sees the step-0 keys 0 … t inside its sequence, and the first
    `index` of its own keys, one for each step since."""
    length, steps = q.shape[1], own_k.shape[2]
    row = jnp.arange(length)
    causal = (row[:, None] >= row)[None]
    if lengths is not None:
        causal = causal & (row < lengths[:, None])[:, None, :]
    near = jnp.moveaxis(scores(q[:, :, None], own_k)[..., 0, :], 1, 3)  # [B, kv, group, S, steps]
    passed = jnp.broadcast_to(jnp.arange(steps) < index, (*causal.shape[:-1], steps))
    mask = jnp.concatenate([causal, passed], axis=-1)[:, None, None]
    weights = masked_softmax(jnp.concatenate([scores(q, first_k), near], axis=-1), mask)
    own = jnp.moveaxis(weights[..., length:], 3, 1)[..., None, :]
    return (mix(weights[..., :length], first_v) + mix(own, own_v)[:, :, 0]).astype(q.dtype)
