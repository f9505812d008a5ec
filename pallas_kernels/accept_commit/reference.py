"""Plain reference of acceptance and commit, in the semantics of Leviathan et al. (arXiv 2211.17192) with a cut."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.accept_commit.rows import EMPTY_MASS, CommitRows, cut, places, prefix, stands, tested
from pallas_kernels.pages import write

Pools = Sequence[Float[Array, "pages page combined D"]]


def accept(
    target: Float[Array, "M V"],
    drafts: Int[Array, "R m"],
    rows: CommitRows,
    mode: str = "greedy",
    q: Float[Array, "R m V"] | None = None,
    u: Float[Array, "R m"] | None = None,
    u_last: Float[Array, "R"] | None = None,
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """(accepted drafts, the token after them) of each request.

    Greedy: `target` holds logits; a draft stands if it is its row's argmax (float32, lowest id on ties). Ratio:
    `target` holds probabilities; a draft d stands if 0 < q(d) <= 1 and u q(d) < p(d), the last token is drawn by
    `u_last` from max(p - q, 0) after a rejection and from p otherwise. `q` None says that the drafts were chosen, not
    drawn: all mass is on them. Where only `lengths` < m drafts were verified, the one behind them is tested too and
    becomes the last token if it stands.
    """
    count = drafts.shape[1]
    grid = target[rows.row(jnp.broadcast_to(jnp.arange(count + 1), (drafts.shape[0], count + 1)), target.shape[0])]
    tests = tested(rows, count)
    if mode == "greedy":
        best = jnp.argmax(grid.astype(jnp.float32), axis=-1).astype(jnp.int32)
        raw = prefix(drafts == best[:, :-1], tests)
        return cut(rows, drafts, raw, jnp.take_along_axis(best, raw[:, None], axis=1)[:, 0])
    assert u is not None and u_last is not None
    at = lambda x: jnp.take_along_axis(x, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    grid = grid.astype(jnp.float32)
    raw = prefix(stands(at(grid[:, :-1]), jnp.ones(drafts.shape) if q is None else at(q), u), tests)
    row = jnp.take_along_axis(grid, raw[:, None, None], axis=1)[:, 0]
    weights = row
    if count:
        index = jnp.minimum(raw, count - 1)[:, None]
        if q is None:
            taken = (jnp.take_along_axis(drafts, index, axis=1) == jnp.arange(row.shape[-1])).astype(jnp.float32)
        else:
            taken = jnp.take_along_axis(q, index[..., None], axis=1)[:, 0].astype(jnp.float32)
        residual = jnp.maximum(row - jnp.where(taken > 0, taken, 0), 0)  # a NaN q takes nothing
        whole = (jnp.sum(residual, axis=-1) <= EMPTY_MASS) | (raw == tests)
        weights = jnp.where(whole[:, None], row, residual)
    return cut(rows, drafts, raw, inverse_cdf(weights, u_last))


def inverse_cdf(weights: Float[Array, "R V"], u: Float[Array, "R"]) -> Int[Array, "R"]:
    """Smallest id of positive weight whose cumulative weight exceeds u times the total; the last positive one where
    rounding leaves none."""
    cumulative = jnp.cumsum(weights, axis=-1)
    index = jnp.arange(weights.shape[-1])
    beyond = (weights > 0) & (cumulative > u[:, None] * cumulative[:, -1:])
    first = jnp.min(jnp.where(beyond, index, index.size), axis=-1)
    last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
    return jnp.minimum(first, last).astype(jnp.int32)


def commit(
    pools: Pools, rows: CommitRows, accepted: Int[Array, "R"], values: Sequence[Float[Array, "M combined D"]]
) -> list[Array]:
    """Writes the anchor's and the accepted rows of `values` to every layer's pool; all others go to the trash page."""
    page, offset = places(rows, accepted, values[0].shape[0], pools[0].shape[1])
    return [write(pool, page, offset, value) for pool, value in zip(pools, values, strict=True)]
