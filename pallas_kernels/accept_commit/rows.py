"""The ragged layout of a verify batch, and the small arithmetic on it that every implementation shares.

R requests, m drafts each, M rows in all, V vocabulary ids, P pages a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pages import TRASH_PAGE

MODES = ("greedy", "ratio")
EMPTY_MASS = 1e-8  # a residual lighter than this is rounding: p == q


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CommitRows:
    """Request r kept lengths[r] of its m drafts for verification: rows starts[r] … starts[r] + lengths[r] hold the
    anchor and them, at slots first[r], first[r] + 1, … of its pages. A request that is not live commits nothing."""

    starts: Int[Array, "R"]
    lengths: Int[Array, "R"]
    live: Bool[Array, "R"]
    first: Int[Array, "R"]
    page_table: Int[Array, "R P"]

    def row(self, offset: Int[Array, "R *n"], total: int) -> Int[Array, "R *n"]:
        """Row of a request at an offset, in range also where there is none."""
        return jnp.clip(self.starts.reshape(-1, *[1] * (offset.ndim - 1)) + offset, 0, total - 1)


def tested(rows: CommitRows, drafts: int) -> Int[Array, "R"]:
    """Drafts that are tested: those kept and one more, against the last kept row's distribution."""
    return jnp.minimum(rows.lengths + 1, drafts)


def prefix(ok: Bool[Array, "R m"], counts: Int[Array, "R"]) -> Int[Array, "R"]:
    """Length of the leading run of `ok` within the first `counts` drafts."""
    within = jnp.arange(ok.shape[1]) < counts[:, None]
    return jnp.sum(jnp.cumprod((ok & within).astype(jnp.int32), axis=1), axis=1).astype(jnp.int32)


def stands(p: Float[Array, "R m"], q: Float[Array, "R m"], u: Float[Array, "R m"]) -> Bool[Array, "R m"]:
    """Accepted by the ratio test: 0 < q <= 1 (no NaN) and u q < p."""
    return (q > 0) & (q <= 1) & (u * q < p)


def cut(
    rows: CommitRows, drafts: Int[Array, "R m"], raw: Int[Array, "R"], token: Int[Array, "R"]
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """(accepted, last token): at most `lengths` drafts stay, an accepted one behind them is the last token."""
    accepted = jnp.minimum(raw, rows.lengths)
    if drafts.shape[1]:
        behind = jnp.take_along_axis(drafts, jnp.minimum(accepted, drafts.shape[1] - 1)[:, None], axis=1)[:, 0]
        token = jnp.where(raw > rows.lengths, behind, token)
    return jnp.where(rows.live, accepted, 0).astype(jnp.int32), jnp.where(rows.live, token, 0).astype(jnp.int32)


def places(
    rows: CommitRows, accepted: Int[Array, "R"], total: int, page: int
) -> tuple[Int[Array, "M"], Int[Array, "M"]]:
    """(page, offset) that each row is written to: the request's own for the anchor and the accepted rows below the
    context's limit, (trash page, 0) for every other row."""
    index = jnp.arange(total)
    offset = index[:, None] - rows.starts
    slot = rows.first + offset
    committed = (offset >= 0) & (offset <= accepted) & rows.live & (slot < rows.page_table.shape[1] * page)
    owner = jnp.argmax(committed, axis=1)
    owned = jnp.any(committed, axis=1)
    slot = jnp.where(owned, slot[index, owner], 0)
    return jnp.where(owned, rows.page_table[owner, slot // page], TRASH_PAGE), slot % page


def accept_by_rows(
    target: Float[Array, "M V"],
    drafts: Int[Array, "R m"],
    rows: CommitRows,
    mode: str,
    q: Float[Array, "R m V"] | None,
    u: Float[Array, "R m"] | None,
    u_last: Float[Array, "R"] | None,
    argmax: Callable[[Array], Array],
    draw: Callable[..., Array],
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """`reference.accept` by two kernels: `argmax(logits)` gives an id a row, `draw(p, q, row, slot, point, whole, u)`
    an id a request, from row `row` of p where `whole`, else from max(that - q[slot], 0) or, without q, from that less
    the id `point`. No [R, m + 1, V] array is formed."""
    requests, count = drafts.shape
    tests = tested(rows, count)
    at = rows.row(jnp.broadcast_to(jnp.arange(count + 1), (requests, count + 1)), target.shape[0])
    if mode == "greedy":
        best = argmax(target)[at]
        raw = prefix(drafts == best[:, :-1], tests)
        return cut(rows, drafts, raw, jnp.take_along_axis(best, raw[:, None], axis=1)[:, 0])
    assert u is not None and u_last is not None
    p_drafts = target[at[:, :-1], drafts].astype(jnp.float32)
    q_drafts = jnp.ones(drafts.shape) if q is None else jnp.take_along_axis(q, drafts[..., None], axis=-1)[..., 0]
    raw = prefix(stands(p_drafts, q_drafts, u), tests)
    slot = jnp.minimum(raw, max(count - 1, 0))
    whole = raw == tests
    point = jnp.take_along_axis(drafts, slot[:, None], axis=1)[:, 0] if count else raw
    row = jnp.take_along_axis(at, raw[:, None], axis=1)[:, 0]
    ints = (x.astype(jnp.int32) for x in (row, slot, point, whole))
    return cut(rows, drafts, raw, draw(target, q, *ints, u_last.astype(jnp.float32)))
