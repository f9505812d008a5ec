"""What the rows of a verify batch may see, as plain arrays: the kernels know intervals and bits, no kinds of masks.

R requests with up to Q rows each (M rows in all), P pages a request, W = ceil(Q / 32) words of own-row bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKS = ("causal", "full", "tree")
Scalar = int | Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyRows:
    """M rows as contiguous segments of R requests over their committed slots.

    Request r owns rows starts[r] … starts[r] + lengths[r] - 1; they may see its slots t < first[r] of the paged cache
    and each other. Rows that no request owns are padding: zeros come out. `requests` is any request for a padding row.
    """

    starts: Int[Array, "R"]
    lengths: Int[Array, "R"]
    first: Int[Array, "R"]
    requests: Int[Array, "M"]
    page_table: Int[Array, "R P"]
    max_rows: int = dataclasses.field(metadata={"static": True})
    positions: Int[Array, "M"] | None = None  # None: first + offset; a tree's rows stand at first + depth
    ancestors: Int[Array, "R Q W"] | None = None  # a tree's: bit k of row j says that row k is j or above it

    def grid(self) -> tuple[Int[Array, "R Q"], Bool[Array, "R Q"]]:
        """Index of each request's q-th row, in range also where there is none, and whether it exists."""
        offsets = jnp.arange(self.max_rows)
        index = jnp.clip(self.starts[:, None] + offsets, 0, self.requests.shape[0] - 1)
        return index, offsets < self.lengths[:, None]

    def places(self) -> Int[Array, "R Q"]:
        """Absolute position of each request's q-th row."""
        if self.positions is None:
            return self.first[:, None] + jnp.arange(self.max_rows)
        return self.positions[self.grid()[0]]

    def offsets(self) -> Int[Array, "M"]:
        """Index of a row in its request."""
        return jnp.arange(self.requests.shape[0]) - self.starts[self.requests]

    def ungrid(self, out: Float[Array, "R Q heads D"]) -> Float[Array, "M heads D"]:
        """Rows back in their order, zeros where a row is padding."""
        offset = self.offsets()
        owned = (offset >= 0) & (offset < self.lengths[self.requests])
        picked = out[self.requests, jnp.clip(offset, 0, self.max_rows - 1)]
        return jnp.where(owned[:, None, None], picked, 0)


def own_mask(rows: VerifyRows, mask: str, window: Scalar) -> Bool[Array, "R Q Q"]:
    """Which own row k row j sees. A window W (0 = none) admits |position j - position k| < W."""
    index = jnp.arange(rows.max_rows)
    if mask == "tree":
        if rows.ancestors is None:
            raise ValueError("ancestors: found none, expected bit masks for a tree")
        seen = unpack_bits(rows.ancestors, rows.max_rows)
    else:
        seen = jnp.broadcast_to((index[:, None] >= index) | (mask == "full"), (1, index.size, index.size))
    _, exists = rows.grid()
    place = rows.places()
    near = jnp.abs(place[:, :, None] - place[:, None, :]) < window
    return seen & ((window == 0) | near) & exists[:, :, None] & exists[:, None, :]


def context_span(rows: VerifyRows, window: Scalar) -> tuple[Int[Array, "R Q"], Int[Array, "R Q"]]:
    """First slot that a row sees and the slot behind its last. A window counts the row itself: t > position - W."""
    _, exists = rows.grid()
    lowest = jnp.where(window == 0, 0, jnp.maximum(rows.places() - window + 1, 0))
    return lowest, jnp.where(exists, rows.first[:, None], 0)


def pack_bits(seen: Bool[Array, "*b K"]) -> Int[Array, "*b W"]:
    """Bit k of word k // 32."""
    words = -(-seen.shape[-1] // 32)
    padded = jnp.pad(seen, [*[(0, 0)] * (seen.ndim - 1), (0, 32 * words - seen.shape[-1])])
    bits = padded.reshape(*seen.shape[:-1], words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)


def unpack_bits(words: Int[Array, "*b W"], count: int) -> Bool[Array, "*b count"]:
    """Inverse of `pack_bits`."""
    bits = (words[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :count] > 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiled:
    """Operands of a kernel: T tiles of at most `rows` rows a request, N = rows x group, program i on request i // T.

    `info` holds lowest and limit of the context, then the own-row bits. `span` holds, tile by tile, the first context
    slot that any of its rows sees and the slot behind the last.
    """

    q: Float[Array, "RT kv N D"]
    own_k: Float[Array, "R kv K D"]
    own_v: Float[Array, "R kv K D"]
    info: Int[Array, "RT N W2"]
    span: Int[Array, "RT2"]


def tile(
    q: Float[Array, "M heads D"],
    k: Float[Array, "M kv D"],
    v: Float[Array, "M kv D"],
    rows: VerifyRows,
    mask: str,
    window: Scalar,
    inner_window: Scalar,
    height: int,
    keys: int,
) -> Tiled:
    """Cuts the rows into tiles of `height` and pads the own keys to `keys` rows; the window becomes data."""
    heads, dim = q.shape[1:]
    kv = k.shape[1]
    group = heads // kv
    index, exists = rows.grid()
    requests, count = index.shape
    tiles = -(-count // height)
    gridded = jnp.pad(q[index], ((0, 0), (0, tiles * height - count), (0, 0), (0, 0)))
    gridded = gridded.reshape(requests * tiles, height, kv, group, dim).transpose(0, 2, 1, 3, 4)
    own_k, own_v = (jnp.where(exists[:, :, None, None], x[index], 0).transpose(0, 2, 1, 3) for x in (k, v))
    extra = ((0, 0), (0, 0), (0, keys - count), (0, 0))
    info, span = visible(rows, mask, window, inner_window, height)
    return Tiled(
        gridded.reshape(requests * tiles, kv, height * group, dim),
        jnp.pad(own_k, extra),
        jnp.pad(own_v, extra),
        jnp.repeat(info, group, axis=1),
        span,
    )


def visible(
    rows: VerifyRows, mask: str, window: Scalar, inner_window: Scalar, height: int
) -> tuple[Int[Array, "RT height W2"], Int[Array, "RT2"]]:
    """(info, span) of `Tiled`, a line a row. It depends on no layer, so that a program of many computes it once."""
    requests, count = rows.starts.shape[0], rows.max_rows
    tiles = -(-count // height)
    pad = ((0, 0), (0, tiles * height - count))
    lowest, limit = (jnp.pad(x, pad) for x in context_span(rows, window))
    bits = jnp.pad(pack_bits(own_mask(rows, mask, inner_window)), (*pad, (0, 0)))
    info = jnp.concatenate([lowest[..., None], limit[..., None], bits], axis=-1).astype(jnp.int32)
    info = info.reshape(requests * tiles, height, -1)
    begin = jnp.min(jnp.where(info[..., 1] > 0, info[..., 0], jnp.iinfo(jnp.int32).max), axis=1)
    end = jnp.max(info[..., 1], axis=1)
    return info, jnp.stack([jnp.minimum(begin, end), end], axis=1).reshape(-1).astype(jnp.int32)


def untile(out: Float[Array, "RT kv N D"], rows: VerifyRows, height: int) -> Float[Array, "M heads D"]:
    """The kernel's output in row order."""
    tiles, kv, wide, dim = out.shape
    group = wide // height
    requests = rows.starts.shape[0]
    out = out.reshape(tiles, kv, height, group, dim).transpose(0, 2, 1, 3, 4)
    out = out.reshape(requests, tiles // requests * height, kv * group, dim)
    return rows.ungrid(out[:, : rows.max_rows])
