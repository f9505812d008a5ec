"""How many of each request's proposals are verified this round."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafters.base import Tree
from jaxspec.errors import ConfigError, problem


def confident_nodes(tree: Tree, confidence: Float[Array, "R n"], threshold: float) -> Tree:
    """The tree without the nodes whose confidence, or that of a node on their way, is below `threshold`."""

    def below(_: int, kept: Array) -> Array:
        rows = jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)
        return kept & jnp.take_along_axis(rows, tree.parents, axis=1)

    kept = tree.valid & (confidence >= threshold)
    return dataclasses.replace(tree, valid=jax.lax.fori_loop(1, tree.max_depth, below, kept))


def verify_lengths(
    positions: Int[Array, "R"],
    num_proposals: int | Int[Array, "R"],
    limit: int | Int[Array, "R"],
    confidence: Float[Array, "R m"] | None = None,
    threshold: float = 0.0,
) -> Int[Array, "R"]:
    """Proposals kept a request (the anchor not counted): all of them, or those before the first whose confidence is
    below `threshold`; never more than fit, so that the round's last token still has a position below `limit`.

    Whether slot k is kept depends on tokens before k only, since its confidence does.
    """
    lengths = jnp.broadcast_to(jnp.asarray(num_proposals, jnp.int32), positions.shape)
    if threshold > 0 and confidence is not None:
        lengths = jnp.sum(jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1), axis=1)
    return jnp.clip(jnp.minimum(lengths, limit - 2 - positions), 0).astype(jnp.int32)


# static: every request verifies m + 1 rows. cap: so it does, but the window alone is committed (it shows what compact
# would emit, and saves nothing). compact: the window's rows alone are in the forward.
Mode = Literal["static", "cap", "compact"]


def forward_rows(mode: Mode, lengths: Int[Array, "R"], proposals: int) -> Int[Array, "R"]:
    """Rows of each request in the target's forward, for verify lengths of m = `proposals` (0: not live)."""
    return lengths if mode == "compact" else jnp.where(lengths > 0, proposals + 1, 0).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Limits of a request's verify length, which counts the anchor's row: static, hashable.

    `max_rows` 0 is m + 1. A slot whose survival is below `survival_eps` is never worth a row.
    """

    proposals: int  # m
    min_rows: int = 1
    max_rows: int = 0
    survival_eps: float = 1e-6

    def __post_init__(self) -> None:
        full = self.proposals + 1
        if not 0 <= self.min_rows <= self.most_rows <= full:
            found = f"{self.min_rows} and {self.max_rows}"
            raise ConfigError(
                problem("engine.min_verify_rows and max_verify_rows", found, f"0 <= min <= max <= {full} (m + 1)")
            )

    @property
    def most_rows(self) -> int:
        """The longest verify length."""
        return self.max_rows or self.proposals + 1


def survival_of(confidence: Float[Array, "*R m"]) -> Float[Array, "*R m"]:
    """Probability that the slots up to each one are all accepted, in float32.

    One product after the other: a parallel prefix product associates differently at each slot, and rounding could lift
    a survival above the one before it, so that slot k would be admitted because of token k.
    """
    columns = [confidence[..., 0].astype(jnp.float32)]
    for slot in range(1, confidence.shape[-1]):
        columns.append(columns[-1] * confidence[..., slot].astype(jnp.float32))
    return jnp.stack(columns, axis=-1)


def allocate(
    confidence: Float[Array, "R m"],
    budget: Int[Array, ""],
    schedule: Schedule,
    live: Bool[Array, "R"] | None = None,
    room: Int[Array, "R"] | None = None,
    pinned: Bool[Array, "R"] | None = None,
) -> Int[Array, "R"]:
    """Spreads K = `budget` extra rows over the requests: verify lengths, anchor included, 0 for one that is not live.

    The best survivals get a row: survival descending, then position, then request (DSpark, ScheduleVerifyLensTopk).
    `room` is how many proposals still fit before the context's end. `pinned` requests verify every proposal, and their
    rows are taken from the budget first; the host reserves them.

    Whether slot k is admitted depends on survivals up to k only, hence on tokens before k: a survival never exceeds
    the one before it, and ties go to the lower position.
    """
    requests, m = confidence.shape
    everybody = jnp.ones(requests, bool)
    live = everybody if live is None else live
    room = jnp.full(requests, m, jnp.int32) if room is None else jnp.clip(room, 0, m)
    pinned = ~everybody if pinned is None else pinned & live
    budget = jnp.maximum(budget - jnp.sum(jnp.where(pinned, room, 0)), 0)

    survival = survival_of(confidence)
    slot = jnp.arange(m)
    candidate = (slot < min(schedule.most_rows, m)) & (slot < room[:, None]) & (live & ~pinned)[:, None]
    candidate &= survival >= schedule.survival_eps  # false for NaN
    # Position by position, each in the order of requests: what a stable sort leaves in place is the order of ties.
    ranked = jnp.argsort(jnp.where(candidate, survival, -1.0).T.reshape(-1), descending=True, stable=True)
    order = jnp.arange(requests * m, dtype=jnp.int32)
    rank = jnp.zeros_like(order).at[ranked].set(order, unique_indices=True)
    extra = jnp.sum(candidate & (budget > rank.reshape(m, requests).T), axis=1)

    rows = jnp.clip(schedule.min_rows + extra, max(schedule.min_rows, 1), schedule.most_rows)
    rows = jnp.minimum(jnp.where(pinned, m + 1, rows), room + 1)
    return jnp.where(live, rows, 0).astype(jnp.int32)
