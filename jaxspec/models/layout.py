"""RaggedLayout: which rows of one forward belong to which request, and where their K/V go."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedLayout:
    """M rows as contiguous segments of R requests. Prefill, chunked prefill, verification and decoding differ only
    in it.

    Rows that are not `valid` are padding: they write to the trash page, nobody attends them, and their ids are in
    range. `slots` is a row's index in its request's cache; it differs from the RoPE `positions` only in a tree.
    """

    starts: Int[Array, "R"]
    lengths: Int[Array, "R"]
    positions: Int[Array, "M"]
    slots: Int[Array, "M"]
    parents: Int[Array, "M"]  # row of the parent, -1 at a segment's first row; in a chain the row before
    requests: Int[Array, "M"]
    valid: Bool[Array, "M"]
    page_table: Int[Array, "R P"]
    max_rows: int = dataclasses.field(metadata={"static": True})  # the longest segment that this shape can hold
    owners: Int[Array, "R"] | None = None  # the slot of each request; None: request i is on slot i
    tree: bool = dataclasses.field(default=False, metadata={"static": True})  # rows attend their ancestors only

    def grid(self) -> tuple[Int[Array, "R Q"], Bool[Array, "R Q"]]:
        """Row index of each request's q-th row (Q = max_rows; in range also where there is none), and whether it
        exists.
        """
        offsets = jnp.arange(self.max_rows)
        rows = jnp.clip(self.starts[:, None] + offsets, 0, self.positions.shape[0] - 1)
        return rows, offsets < self.lengths[:, None]

    def rows_of(self, values: Shaped[Array, "R Q"]) -> Shaped[Array, "M"]:
        """What a [request, row of the request] table says of each row; of a padding row, something of its request."""
        offset = jnp.arange(self.positions.shape[0]) - self.starts[self.requests]
        return values[self.requests, jnp.clip(offset, 0, values.shape[1] - 1)]

    def ancestors(self) -> Bool[Array, "R Q Q"]:
        """Whether row j of a request is row i or one of its ancestors. Parents come before their children."""
        rows, exists = self.grid()
        parents = jnp.where(exists, self.parents[rows] - self.starts[:, None], -1)
        itself = jnp.eye(self.max_rows, dtype=bool)

        def visit(row: Int[Array, ""], known: Bool[Array, "R Q Q"]) -> Bool[Array, "R Q Q"]:
            parent = jax.lax.dynamic_index_in_dim(parents, row, axis=1, keepdims=False)
            above = jnp.take_along_axis(known, jnp.maximum(parent, 0)[:, None, None], axis=1)[:, 0]
            line = (above & (parent >= 0)[:, None]) | jax.lax.dynamic_index_in_dim(itself, row, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(known, line, row, axis=1)

        return jax.lax.fori_loop(0, self.max_rows, visit, jnp.zeros((*rows.shape, self.max_rows), bool))


def uniform_layout(
    first: Int[Array, "R"], lengths: Int[Array, "R"], page_table: Int[Array, "R P"], rows: int
) -> RaggedLayout:
    """Each request owns `rows` consecutive rows, of which its first `lengths` are valid, at positions first, first +
    1, …

    Decoding and verification (rows = m + 1) and the prefill of one request (R = 1, rows = the chunk) both use it.
    """
    requests = first.shape[0]
    offsets = jnp.broadcast_to(jnp.arange(rows), (requests, rows))
    valid = offsets < lengths[:, None]
    positions = jnp.where(valid, first[:, None] + offsets, 0).reshape(-1)
    index = jnp.arange(requests * rows)
    return RaggedLayout(
        starts=jnp.arange(requests, dtype=jnp.int32) * rows,
        lengths=lengths.astype(jnp.int32),
        positions=positions.astype(jnp.int32),
        slots=positions.astype(jnp.int32),
        parents=jnp.where(offsets.reshape(-1) == 0, -1, index - 1).astype(jnp.int32),
        requests=(index // rows).astype(jnp.int32),
        valid=valid.reshape(-1),
        page_table=page_table,
        max_rows=rows,
    )


def ragged_layout(
    first: Int[Array, "R"], lengths: Int[Array, "R"], page_table: Int[Array, "R P"], rows: int, max_rows: int
) -> RaggedLayout:
    """Segments without gaps between them, `rows` in all, the rest padding: request r owns `lengths[r]` <= `max_rows`
    of them (their sum must fit), at positions first[r], first[r] + 1, …
    """
    lengths = lengths.astype(jnp.int32)
    ends = jnp.cumsum(lengths)
    starts = ends - lengths
    index = jnp.arange(rows, dtype=jnp.int32)
    valid = index < ends[-1]
    # one comparison of all: a search is a loop, which a CUDA graph cannot hold
    owners = jnp.searchsorted(ends, index, side="right", method="compare_all")
    requests = jnp.minimum(owners, lengths.shape[0] - 1).astype(jnp.int32)
    offsets = index - starts[requests]
    positions = jnp.where(valid, first[requests] + offsets, 0).astype(jnp.int32)
    return RaggedLayout(
        starts=starts,
        lengths=lengths,
        positions=positions,
        slots=positions,
        parents=jnp.where(valid & (offsets > 0), index - 1, -1),
        requests=requests,
        valid=valid,
        page_table=page_table,
        max_rows=max_rows,
    )


def keep_rows(layout: RaggedLayout, counts: Int[Array, "R"]) -> RaggedLayout:
    """The same rows with only the first `counts` of each request left valid (what a commit writes)."""
    index = jnp.arange(layout.positions.shape[0])
    within = index - layout.starts[layout.requests] < counts[layout.requests]
    return dataclasses.replace(
        layout, lengths=jnp.minimum(layout.lengths, counts).astype(jnp.int32), valid=layout.valid & within
    )
