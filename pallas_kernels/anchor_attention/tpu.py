"""Anchor-block attention for TPUs (Pallas).

Scores stand transposed, [keys, rows x group]: the query heads of one K/V head lie side by side on the lanes, so what
belongs to a row (its key range, maximum, log-sum-exp) is a lane vector, maxima and sums run over sublanes, and every
product but two is a plain matrix product of operands that XLA transposed once.

The grid is (K/V head, visit). The visits are a flat list, made from the ranges outside and prefetched to scalar memory:
a tile of query rows, a tile of context or own keys, and flags. A pair of tiles without an allowed pair of rows is not
in the list, so it costs no step and no copy; the list's length is a dynamic grid bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.anchor_attention.ranged import Keys
from pallas_kernels.anchor_attention.ranges import FULL, PARTIAL, SKIPPED, Ranges, tile_kinds

KIND, OWN, FIRST, LAST, FLAG_BITS = 3, 4, 8, 16, 5
SCALAR_BYTES = 512 * 1024  # of the 1 MiB of scalar memory of a chip; three lists this long keep `_held` inside int32
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class TpuTiles:
    """Query rows (each `group` lanes), context keys and own keys of a tile: multiples of 128."""

    rows: int = 128
    kv: int = 512
    own: int = 128


@dataclasses.dataclass(frozen=True)
class Visits:
    """The flat list: `word` = row tile << FLAG_BITS | flags; the context tile and the own tile that lie in VMEM."""

    word: Int[Array, "V"]
    context: Int[Array, "V"]
    own: Int[Array, "V"]
    count: Int[Array, ""]


def _listed(kinds: Int[Array, "T J"]) -> tuple[Array, Array, Array, Array, Array]:
    """Row-major list of the visited tiles; a row of tiles that has none gets one SKIPPED visit, since its output must
    still be written. Returns t, j, kind, flags and the list's length. Sorts, for gathers are slow on some chips."""
    width = kinds.shape[1]
    idle = jnp.all(kinds == SKIPPED, axis=1)
    listed = ((kinds != SKIPPED) | (idle[:, None] & (jnp.arange(width) == 0))).reshape(-1)
    count = jnp.sum(listed)
    index = jnp.arange(listed.size)
    flat, kind = lax.sort((jnp.where(listed, index, listed.size), kinds.reshape(-1)), num_keys=1)
    t, j = jnp.divmod(jnp.minimum(flat, listed.size - 1), width)
    first = (index == 0) | (t != jnp.roll(t, 1))
    last = (index == count - 1) | (t != jnp.roll(t, -1))
    return t, j, kind, first * FIRST + last * LAST, count


def _held(used: Array, tile: Array, tiles: int) -> Array:
    """A visit that does not use an operand keeps the tile that is there: no copy."""
    index = jnp.arange(tile.size)
    return lax.cummax(jnp.where(used, index * tiles + tile, 0)) % tiles


def row_visits(context: Int[Array, "B T J"], own: Int[Array, "B T O"]) -> Visits:
    """Row-tile by row-tile: the own keys, then the context. Tiles of all sequences are numbered through."""
    batch, tiles, num_own = own.shape
    num_context = context.shape[2]
    t, j, kind, flags, count = _listed(jnp.concatenate([own, context], axis=2).reshape(batch * tiles, -1))
    is_own = j < num_own
    sequence = t // tiles
    in_context = _held(~is_own, sequence * num_context + j - num_own, batch * num_context)
    in_own = _held(is_own, sequence * num_own + j, batch * num_own)
    word = (t << FLAG_BITS) + kind + is_own * OWN + flags
    return Visits(*(x.astype(jnp.int32) for x in (word, in_context, in_own, count)))


def key_visits(kinds: Int[Array, "B T J"]) -> Visits:
    """Key-tile by key-tile; `context` holds the key tile, whichever kind it is."""
    batch, tiles, width = kinds.shape
    j, t, kind, flags, count = _listed(kinds.transpose(0, 2, 1).reshape(batch * width, tiles))
    word = (((j // width) * tiles + t) << FLAG_BITS) + kind + flags
    word, key, count = (x.astype(jnp.int32) for x in (word, j, count))
    return Visits(word, key, jnp.zeros_like(key), count)


def _dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _masked(raw: Array, bounds: Any, pair: int, base: Array) -> Array:
    """-inf outside the rows' ranges; `bounds` [4, lanes] holds two (first, end) pairs."""
    key = lax.broadcasted_iota(jnp.int32, raw.shape, 0) + base
    allowed = (key >= bounds[2 * pair : 2 * pair + 1, :]) & (key < bounds[2 * pair + 1 : 2 * pair + 2, :])
    return jnp.where(allowed, raw, -jnp.inf)


def _each_kind(word: Array, attend: Callable[[bool, bool], None], kinds: tuple[tuple[int, int], ...]) -> None:
    """Runs `attend(own, masked)` for what the visit is; nothing for a SKIPPED one."""
    for own, kind in kinds:
        pl.when((word & (KIND | OWN)) == kind + own)(functools.partial(attend, bool(own), kind == PARTIAL))


def _forward_kernel(
    word_ref: Any, context_ref: Any, own_ref: Any, bounds: Any, qt: Any, k: Any, vt: Any, own_k: Any, own_vt: Any,
    out: Any, lse: Any, peak: Any, norm: Any, acc: Any, *, scale: float, num_context: int, num_own: int,
) -> None:  # fmt: skip
    step = pl.program_id(1)
    word = word_ref[step]

    @pl.when((word & FIRST) > 0)
    def _start() -> None:
        peak[...] = jnp.full_like(peak, _LOWEST)
        norm[...] = jnp.zeros_like(norm)
        acc[...] = jnp.zeros_like(acc)

    def attend(own: bool, masked: bool) -> None:
        keys, values = (own_k, own_vt) if own else (k, vt)
        raw = _dot(keys[0], qt[0]) * scale
        if masked:
            tile = own_ref[step] % num_own if own else context_ref[step] % num_context
            raw = _masked(raw, bounds, int(own), tile * keys.shape[1])
        new = jnp.maximum(peak[...], jnp.max(raw, axis=0, keepdims=True))
        shrink = jnp.exp(peak[...] - new)
        weights = jnp.exp(raw - new)
        norm[...] = norm[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        acc[...] = acc[...] * shrink + _dot(values[0], weights.astype(values.dtype))
        peak[...] = new

    _each_kind(word, attend, ((0, FULL), (0, PARTIAL), (OWN, PARTIAL)))

    @pl.when((word & LAST) > 0)
    def _finish() -> None:
        seen = norm[...] > 0
        total = jnp.where(seen, norm[...], 1.0)
        out[0] = (acc[...] / total).astype(out.dtype)
        lse[0] = jnp.where(seen, peak[...] + jnp.log(total), -jnp.inf)


def _dq_kernel(
    word_ref: Any, context_ref: Any, own_ref: Any, bounds: Any, qt: Any, dot: Any, lse: Any, delta: Any, k: Any,
    kt: Any, v: Any, own_k: Any, own_kt: Any, own_v: Any, dqt: Any, acc: Any,
    *, scale: float, num_context: int, num_own: int,
) -> None:  # fmt: skip
    step = pl.program_id(1)
    word = word_ref[step]

    @pl.when((word & FIRST) > 0)
    def _start() -> None:
        acc[...] = jnp.zeros_like(acc)

    def attend(own: bool, masked: bool) -> None:
        keys, keys_t, values = (own_k, own_kt, own_v) if own else (k, kt, v)
        raw = _dot(keys[0], qt[0]) * scale
        if masked:
            tile = own_ref[step] % num_own if own else context_ref[step] % num_context
            raw = _masked(raw, bounds, int(own), tile * keys.shape[1])
        weights = jnp.exp(raw - lse[0])
        slope = weights * (_dot(values[0], dot[0]) - delta[0])
        acc[...] += _dot(keys_t[0], slope.astype(keys.dtype))

    _each_kind(word, attend, ((0, FULL), (0, PARTIAL), (OWN, PARTIAL)))

    @pl.when((word & LAST) > 0)
    def _finish() -> None:
        dqt[0] = (acc[...] * scale).astype(dqt.dtype)


def _dkv_kernel(
    word_ref: Any, key_ref: Any, bounds: Any, q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, dk: Any,
    dv: Any, dk_acc: Any, dv_acc: Any, *, scale: float, num_tiles: int, pair: int,
) -> None:  # fmt: skip
    step = pl.program_id(1)
    word = word_ref[step]

    @pl.when((word & FIRST) > 0)
    def _start() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def attend(_: bool, masked: bool) -> None:
        raw = _dot(k[0], q[0], (1, 1)) * scale
        if masked:
            raw = _masked(raw, bounds, pair, key_ref[step] % num_tiles * k.shape[1])
        weights = jnp.exp(raw - lse[0])
        dv_acc[...] += _dot(weights.astype(q.dtype), d_out[0])
        slope = weights * (_dot(v[0], d_out[0], (1, 1)) - delta[0])
        dk_acc[...] += _dot(slope.astype(q.dtype), q[0])

    _each_kind(word, attend, ((0, FULL), (0, PARTIAL)))

    @pl.when((word & LAST) > 0)
    def _finish() -> None:
        dk[0] = (dk_acc[...] * scale).astype(dk.dtype)
        dv[0] = dv_acc[...].astype(dv.dtype)


def _row_spec(height: int, lanes: int) -> pl.BlockSpec:
    """[kv, height, all rows' lanes], by row tile."""
    return pl.BlockSpec((1, height, lanes), lambda h, i, word, *_: (h, 0, word[i] >> FLAG_BITS))


def _key_spec(keys: int, dim: int, which: int, transposed: bool = False) -> pl.BlockSpec:
    """[kv, all keys, dim] or [kv, dim, all keys], by the tile in the visit list `which` (1 context, 2 own)."""
    if transposed:
        return pl.BlockSpec((1, dim, keys), lambda h, i, *lists: (h, 0, lists[which][i]))
    return pl.BlockSpec((1, keys, dim), lambda h, i, *lists: (h, lists[which][i], 0))


def _call(
    body: Callable[..., None], lists: tuple[Array, ...], count: Array, heads: int, operands: list[tuple[Array, Any]],
    out: list[tuple[Any, Any]], scratch: list[tuple[int, int]], interpret: Any,
) -> Any:  # fmt: skip
    size = sum(x.size * x.dtype.itemsize for x in lists)
    if size > SCALAR_BYTES:
        raise ValueError(f"anchor_attention, tpu: the visit list takes {size} bytes of scalar memory, expected at most "
                         f"{SCALAR_BYTES}: fewer sequences a chip or larger tiles")  # fmt: skip
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(lists),
        grid=(heads, count),
        in_specs=[spec for _, spec in operands],
        out_specs=[spec for _, spec in out],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    )
    return pl.pallas_call(
        body,
        grid_spec=grid,
        out_shape=[struct for struct, _ in out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*lists, *(x for x, _ in operands))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where rows and keys stand: [B, R, heads, D] <-> [kv, B * R * group, D]."""

    batch: int
    rows: int
    kv: int
    group: int

    def by_row(self, x: Array) -> Array:
        x = x.reshape(self.batch, self.rows, self.kv, self.group, -1)
        return x.transpose(2, 0, 1, 3, 4).reshape(self.kv, self.batch * self.rows * self.group, -1)

    def by_lane(self, x: Array) -> Array:
        return self.by_row(x).transpose(0, 2, 1)

    def from_lane(self, x: Array) -> Array:
        x = x.reshape(self.kv, -1, self.batch, self.rows, self.group)
        return x.transpose(2, 3, 0, 4, 1).reshape(self.batch, self.rows, self.kv * self.group, -1)

    def vector(self, x: Array) -> Array:
        """[B, heads, R] to [kv, 1, lanes]."""
        x = x.reshape(self.batch, self.kv, self.group, self.rows).transpose(1, 0, 3, 2)
        return x.reshape(self.kv, 1, -1)

    def from_vector(self, x: Array) -> Array:
        x = x.reshape(self.kv, self.batch, self.rows, self.group).transpose(1, 0, 3, 2)
        return x.reshape(self.batch, self.kv * self.group, self.rows)

    def keys(self, x: Array) -> Array:
        return x.transpose(2, 0, 1, 3).reshape(self.kv, -1, x.shape[-1])

    def from_keys(self, x: Array) -> Array:
        return x.reshape(self.kv, self.batch, -1, x.shape[-1]).transpose(1, 2, 0, 3)

    def bounds(self, ranges: Ranges) -> Array:
        """[4, lanes]."""
        lanes = (self.batch * self.rows, self.group)
        return jnp.stack([jnp.broadcast_to(x.reshape(-1, 1), lanes).reshape(-1) for x in ranges])


@dataclasses.dataclass(frozen=True)
class TpuKernels:
    """float32 (products at full precision) and bfloat16. `interpret` runs the kernels on another device."""

    tiles: TpuTiles = TpuTiles()
    interpret: Any = False

    def multiples(self, q: Array, keys: Keys) -> tuple[int, int, int]:
        """See `ranged.Kernels`."""
        if q.dtype not in (jnp.bfloat16, jnp.float32) or any(x.dtype != q.dtype for x in keys):
            found = ", ".join(str(x.dtype) for x in (q, *keys))
            raise ValueError(f"anchor_attention, tpu: found dtypes {found}, expected bfloat16 or float32 throughout")
        return self.tiles.rows, self.tiles.kv, self.tiles.own

    def _kinds(self, ranges: Ranges, keys: Keys) -> tuple[Array, Array]:
        tiles = self.tiles
        return (
            tile_kinds(ranges.lo, ranges.hi, tiles.rows, tiles.kv, keys.context_k.shape[1]),
            # few of them are full: the mask is applied to all, which saves a third of the program's code
            jnp.minimum(tile_kinds(ranges.own_lo, ranges.own_hi, tiles.rows, tiles.own, keys.own_k.shape[1]), PARTIAL),
        )

    def _row_call(self, body: Any, q: Array, keys: Keys, ranges: Ranges, operands: Any, out: Any, scratch: Any) -> Any:
        """A kernel that walks row tiles."""
        visits = row_visits(*self._kinds(ranges, keys))
        counts = (keys.context_k.shape[1] // self.tiles.kv, keys.own_k.shape[1] // self.tiles.own)
        body = functools.partial(body, num_context=counts[0], num_own=counts[1])
        lists = (visits.word, visits.context, visits.own)
        return _call(body, lists, visits.count, keys.context_k.shape[2], operands, out, scratch, self.interpret)

    def forward(self, q: Array, keys: Keys, ranges: Ranges, scale: float) -> tuple[Array, Array]:
        """See `ranged.Kernels`."""
        layout, dim, tiles = _layout(q, keys), q.shape[-1], self.tiles
        lanes = tiles.rows * layout.group
        key, value, own_key, own_value = map(layout.keys, keys)
        operands = [
            (layout.bounds(ranges), pl.BlockSpec((4, lanes), lambda h, i, word, *_: (0, word[i] >> FLAG_BITS))),
            (layout.by_lane(q), _row_spec(dim, lanes)),
            (key, _key_spec(tiles.kv, dim, 1)),
            (value.transpose(0, 2, 1), _key_spec(tiles.kv, dim, 1, transposed=True)),
            (own_key, _key_spec(tiles.own, dim, 2)),
            (own_value.transpose(0, 2, 1), _key_spec(tiles.own, dim, 2, transposed=True)),
        ]
        total = operands[0][0].shape[1]
        out = [
            (jax.ShapeDtypeStruct((layout.kv, dim, total), q.dtype), _row_spec(dim, lanes)),
            (jax.ShapeDtypeStruct((layout.kv, 1, total), jnp.float32), _row_spec(1, lanes)),
        ]
        body = functools.partial(_forward_kernel, scale=scale)
        mixed, lse = self._row_call(body, q, keys, ranges, operands, out, [(1, lanes), (1, lanes), (dim, lanes)])
        return layout.from_lane(mixed), layout.from_vector(lse)

    def backward(
        self, q: Array, keys: Keys, ranges: Ranges, lse: Array, delta: Array, d_out: Array, scale: float
    ) -> tuple[Array, Keys]:
        """See `ranged.Kernels`."""
        layout, dim, tiles = _layout(q, keys), q.shape[-1], self.tiles
        lanes = tiles.rows * layout.group
        lse = jnp.where(jnp.isfinite(lse), lse, 0.0)  # an empty row's scores are -inf: they stay so
        bounds = (layout.bounds(ranges), pl.BlockSpec((4, lanes), lambda h, i, word, *_: (0, word[i] >> FLAG_BITS)))
        vectors = [(layout.vector(x), _row_spec(1, lanes)) for x in (lse, delta)]
        flat = Keys(*map(layout.keys, keys))
        operands = [bounds, *((layout.by_lane(x), _row_spec(dim, lanes)) for x in (q, d_out)), *vectors]
        for size, which, key, value in (
            (tiles.kv, 1, flat.context_k, flat.context_v), (tiles.own, 2, flat.own_k, flat.own_v)
        ):  # fmt: skip
            operands += [
                (key, _key_spec(size, dim, which)),
                (key.transpose(0, 2, 1), _key_spec(size, dim, which, transposed=True)),
                (value, _key_spec(size, dim, which)),
            ]
        out = [(jax.ShapeDtypeStruct((layout.kv, dim, bounds[0].shape[1]), q.dtype), _row_spec(dim, lanes))]
        body = functools.partial(_dq_kernel, scale=scale)
        (dq,) = self._row_call(body, q, keys, ranges, operands, out, [(dim, lanes)])

        row_spec = pl.BlockSpec((1, lanes, dim), lambda h, i, word, *_: (h, word[i] >> FLAG_BITS, 0))
        rows = [(layout.by_row(x), row_spec) for x in (q, d_out)]
        gradients = []
        for pair, (kinds, size, key, value) in enumerate(zip(
            self._kinds(ranges, keys), (tiles.kv, tiles.own), (flat.context_k, flat.own_k),
            (flat.context_v, flat.own_v), strict=True,
        )):  # fmt: skip
            visits = key_visits(kinds)
            spec = _key_spec(size, dim, 1)
            body = functools.partial(_dkv_kernel, scale=scale, num_tiles=kinds.shape[2], pair=pair)
            gradients += _call(
                body, (visits.word, visits.context), visits.count, layout.kv,
                [bounds, *rows, *vectors, (key, spec), (value, spec)],
                [(jax.ShapeDtypeStruct(x.shape, x.dtype), spec) for x in (key, value)],
                [(size, dim), (size, dim)], self.interpret,
            )  # fmt: skip
        return layout.from_lane(dq), Keys(*map(layout.from_keys, gradients))


def _layout(q: Array, keys: Keys) -> _Layout:
    batch, rows, heads, _ = q.shape
    kv = keys.context_k.shape[2]
    return _Layout(batch, rows, kv, heads // kv)
