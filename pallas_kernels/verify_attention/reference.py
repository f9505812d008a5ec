"""Plain reference of the verify attention: pages gathered, one dense mask, one softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.softmax import masked_softmax, mix, scores
from pallas_kernels.verify_attention.rows import Scalar, VerifyRows, context_span, own_mask


def verify_attention(
    q: Float[Array, "M heads D"],
    k: Float[Array, "M kv D"],
    v: Float[Array, "M kv D"],
    pool: Float[Array, "pages page combined D"],
    rows: VerifyRows,
    mask: str = "causal",
    window: Scalar = 0,
    inner_window: Scalar | None = None,
) -> Float[Array, "M heads D"]:
    """One softmax over a request's committed slots and its own rows.

    `pool` holds K at even and V at odd combined heads; slots at or past `rows.first` are never read, so they may hold
    anything, NaN included. The own rows' K and V are the operands. `mask` says which own rows a row sees: causal, full
    (a drafter's block) or tree. `window` W admits context t > position - W, `inner_window` (None: the same) own rows
    nearer than it; 0 = none.
    """
    index, exists = rows.grid()
    requests = index.shape[0]
    pages = pool[rows.page_table].reshape(requests, -1, *pool.shape[2:])
    slot = jnp.arange(pages.shape[1])
    pages = jnp.where((slot < rows.first[:, None])[:, :, None, None], pages, 0)  # 0 x NaN would still be NaN
    own = [jnp.where(exists[:, :, None, None], x[index], 0) for x in (k, v)]
    keys, values = (jnp.concatenate([pages[:, :, i::2].astype(q.dtype), own[i]], axis=1) for i in (0, 1))
    lowest, limit = context_span(rows, window)
    seen = (slot >= lowest[..., None]) & (slot < limit[..., None])
    inner = window if inner_window is None else inner_window
    seen = jnp.concatenate([seen, own_mask(rows, mask, inner)], axis=-1)
    out = mix(masked_softmax(scores(q[index], keys), seen[:, None, None]), values)
    return rows.ungrid(out).astype(q.dtype)
