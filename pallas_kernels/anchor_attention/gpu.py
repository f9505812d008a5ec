"""Anchor-block attention for Hopper GPUs (Pallas Mosaic GPU: wgmma, TMA, one producer and two consumer warpgroups).

The forward pass follows FlashAttention-3 (arXiv 2407.08608): two consumers take turns at the tensor core, a producer
keeps K/V tiles in flight. What differs is the walk: a tile of query rows visits only the K/V tiles that hold an allowed
pair (`ranges.ordered_visits`), those without a mask first; a visit past the context's tiles is one of the blocks' own
keys. The backward pass is two kernels, dQ over query tiles and dK/dV over key tiles, which sums the query heads of its
K/V head in registers. Scores are kept in base 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.anchor_attention.ranged import Keys
from pallas_kernels.anchor_attention.ranges import Ranges, ordered_visits, tile_kinds

LOG2E = math.log2(math.e)
ROWS = 64  # query rows of one consumer warpgroup: the M of wgmma
CONSUMERS = 2
KEYS = CONSUMERS * ROWS  # of a program of the dK/dV kernel
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """Keys of a tile and the tiles in flight, of each kernel."""

    kv: int = 128
    stages: int = 2
    dq_kv: int = 64
    dq_stages: int = 3
    dkv_stages: int = 2


def _tile(dtype: Any, *shape: int) -> Any:
    """Shared memory as wgmma reads it."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _bounds(ranges: Ranges) -> Array:
    """[B, 2, 2, R]: of the context and of the own keys, first and one past the last."""
    pairs = ((ranges.lo, ranges.hi), (ranges.own_lo, ranges.own_hi))
    return jnp.stack([jnp.stack(pair, axis=1) for pair in pairs], axis=1)


def _kinds(ranges: Ranges, rows: int, keys: int, num_keys: int, num_own: int) -> Array:
    """Tiles over the context's keys, then over the own keys [B, T, J + J_own]."""
    context = tile_kinds(ranges.lo, ranges.hi, rows, keys, num_keys)
    return jnp.concatenate([context, tile_kinds(ranges.own_lo, ranges.own_hi, rows, keys, num_own)], axis=2)


def _full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _along(x: Array, shape: tuple[int, int], axis: int) -> Array:
    return lax.broadcast_in_dim(x, shape, [axis])


def _allowed(bounds: Any, base: Array, shape: tuple[int, int], row_axis: int) -> Array:
    """Mask of one tile; `bounds` is SMEM [2, ROWS], rows run along `row_axis`, the tile's first key is `base`."""
    layout = plgpu.Layout.WGMMA.reduce(1 - row_axis)
    lo, hi = (plgpu.layout_cast(bounds.at[i][...], layout) - base for i in range(2))
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - row_axis, layout=plgpu.Layout.WGMMA)
    return (key >= _along(lo, shape, row_axis)) & (key < _along(hi, shape, row_axis))


def _weights_and_slopes(
    scores: tuple[Any, Any], slopes: tuple[Any, Any], shape: tuple[int, int], weigh: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """Both products of the backward pass that need nothing but operands, the second one under `weigh` of the first."""

    def multiply(score: Any, slope: Any) -> tuple[Array, Array]:
        plgpu.wgmma(score, *scores)
        plgpu.wgmma(slope, *slopes)
        return weigh(plgpu.wgmma_accumulator_load(score, wait_n=1)), slope[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def _accumulate(acc: Array, a: Any, b: Any) -> Array:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


class _QueryGrid:
    """Which rows and head a program of a query-major kernel works on. Consumers share rows and take neighbouring heads
    where the group is even, so that they see the same keys; else they take neighbouring rows of one head. The tiles
    with the longest context, which come last, start first."""

    def __init__(self, batch: int, rows: int, heads: int, kv: int):
        self.pair = (heads // kv) % CONSUMERS == 0
        self.rows = ROWS if self.pair else CONSUMERS * ROWS
        self.units = heads // CONSUMERS if self.pair else heads
        self.batch, self.tiles, self.group = batch, rows // self.rows, heads // kv
        self.size = self.units * batch * self.tiles

    def place(self) -> tuple[Array, Array, Array]:
        index = lax.axis_index("program")
        unit, rest = lax.rem(index, self.units), lax.div(index, self.units)
        return lax.rem(rest, self.batch), self.tiles - 1 - lax.div(rest, self.batch), unit

    def consumer(self, tile: Array, unit: Array, consumer: Array) -> tuple[Array, Array]:
        """First row and query head."""
        if self.pair:
            return tile * ROWS, unit * CONSUMERS + consumer
        return tile * self.rows + consumer * ROWS, unit

    def kv_head(self, unit: Array) -> Array:
        return lax.div(unit * CONSUMERS if self.pair else unit, self.group)


def _produce(step_count: Array, stages: int, copy: Callable[[Array, Array], None], consumed: list[Any]) -> None:
    """The producer: `copy(step, slot)` once the slot's last contents are consumed."""

    @pl.loop(0, step_count)
    def _load(step: Array) -> None:
        slot = lax.rem(step, jnp.int32(stages))

        @pl.when(step >= stages)
        def _wait() -> None:
            for barrier in consumed:
                plgpu.barrier_wait(barrier.at[slot])

        copy(step, slot)


def _copy_keys(visit: Array, num_context: int, keys: int, batch: Array, head: Array, pairs: Any) -> None:
    """K and V of one visited tile, from the context or from the own keys."""
    for is_own in (False, True):

        @pl.when((visit >= num_context) if is_own else (visit < num_context))
        def _copy(is_own: bool = is_own) -> None:
            first = (visit - num_context if is_own else visit) * keys
            for sources, target, barrier in pairs:
                plgpu.copy_gmem_to_smem(sources[is_own].at[batch, pl.ds(first, keys), head], target, barrier)


def _tile_of(visit: Array, num_context: int, keys: int) -> tuple[Array, Array]:
    """Whether a visit is of own keys (0 or 1), and its first key there."""
    own = (visit >= num_context).astype(jnp.int32)
    return own, (visit - own * num_context) * keys


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, own_k_ref: Any, own_v_ref: Any, bounds_ref: Any, ids_ref: Any, counts_ref: Any,
    out_ref: Any, lse_ref: Any, q_smem2: Any, k_smem: Any, v_smem: Any, bounds_smem2: Any, lse_smem2: Any,
    q_ready: Any, k_ready: Any, v_ready: Any, k_used: Any, v_used: Any, turn: Any,
    *, grid: _QueryGrid, tiles: GpuTiles, scale: float,
) -> None:  # fmt: skip
    batch, tile, unit = grid.place()
    consumer, kv, stages = lax.axis_index("wg"), tiles.kv, tiles.stages
    dim, dtype, num_context = q_ref.shape[-1], q_ref.dtype, k_ref.shape[1] // tiles.kv
    full, total = counts_ref[batch, tile, 0], counts_ref[batch, tile, 1]

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(consumer < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(232, action="increase")
        q_smem, bounds_smem, lse_smem = q_smem2.at[consumer], bounds_smem2.at[consumer], lse_smem2.at[consumer]
        row, head = grid.consumer(tile, unit, consumer)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, pl.ds(row, ROWS), head], q_smem, q_ready.at[consumer])
        plgpu.copy_gmem_to_smem(bounds_ref.at[batch, :, :, pl.ds(row, ROWS)], bounds_smem, q_ready.at[consumer])
        plgpu.barrier_wait(q_ready.at[consumer])
        by_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            _full((ROWS, dim), 0.0, plgpu.Layout.WGMMA),
            _full((ROWS,), _LOWEST, by_row),
            _full((ROWS,), 0.0, by_row),
        )
        pl.when(total > 0)(lambda: plgpu.barrier_wait(k_ready.at[0]))
        pl.when(consumer == 1)(take_turn)

        def visit(step: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            acc, peak, norm = carry
            slot = lax.rem(step, jnp.int32(stages))

            def score(ref: Any) -> Array:
                plgpu.wgmma(ref, q_smem, _transposed(k_smem.at[slot]))
                take_turn()
                return ref[...]

            raw = pl.run_scoped(score, plgpu.ACC((ROWS, kv), jnp.float32))
            plgpu.barrier_arrive(k_used.at[slot])
            if masked:
                own, base = _tile_of(ids_ref[batch, tile, step], num_context, kv)
                raw = jnp.where(_allowed(bounds_smem.at[own], base, (ROWS, kv), 0), raw, -jnp.inf)
            new = jnp.maximum(peak, raw.max(axis=1) * (scale * LOG2E))
            shrink = jnp.exp2(peak - new)
            weights = jnp.exp2(raw * (scale * LOG2E) - _along(new, raw.shape, 0))
            acc *= _along(shrink, acc.shape, 0)
            norm *= shrink
            narrow = weights.astype(dtype)
            norm += weights.sum(axis=1)
            acc, norm, new, narrow = lax.optimization_barrier((acc, norm, new, narrow))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            plgpu.barrier_wait(turn)

            def mix(ref: Any) -> None:
                plgpu.wgmma(ref, narrow, v_smem.at[slot])

                @pl.when(step + 1 < total)
                def _next() -> None:
                    plgpu.barrier_wait(k_ready.at[lax.rem(step + 1, jnp.int32(stages))])

            acc = pl.run_state(mix)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_used.at[slot])
            return acc, new, norm

        carry = lax.fori_loop(0, full, functools.partial(visit, masked=False), carry)
        acc, peak, norm = lax.fori_loop(full, total, functools.partial(visit, masked=True), carry)
        pl.when(consumer == 0)(take_turn)
        acc *= _along(1.0 / jnp.where(norm > 0.0, norm, 1.0), acc.shape, 0)
        q_smem[...] = acc.astype(dtype)
        lse_smem[...] = peak + jnp.log(norm) * LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out_ref.at[batch, pl.ds(row, ROWS), head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[batch, head, pl.ds(row, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(consumer == CONSUMERS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        kv_head = grid.kv_head(unit)

        @pl.loop(0, total)
        def _step(step: Array) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            visited = ids_ref[batch, tile, step]
            for sources, target, ready, used in (
                ((k_ref, own_k_ref), k_smem, k_ready, k_used),
                ((v_ref, own_v_ref), v_smem, v_ready, v_used),
            ):
                pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, used.at[slot]))
                pair = ((sources, target.at[slot], ready.at[slot]),)
                _copy_keys(visited, num_context, kv, batch, kv_head, pair)


def _dq_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, own_k_ref: Any, own_v_ref: Any, do_ref: Any, lse_ref: Any, delta_ref: Any,
    bounds_ref: Any, ids_ref: Any, counts_ref: Any, dq_ref: Any, q_smem2: Any, do_smem2: Any, k_smem: Any, v_smem: Any,
    bounds_smem2: Any, lse_smem2: Any, delta_smem2: Any, q_ready: Any, ready: Any, used: Any,
    *, grid: _QueryGrid, tiles: GpuTiles, scale: float,
) -> None:  # fmt: skip
    batch, tile, unit = grid.place()
    consumer, kv, stages = lax.axis_index("wg"), tiles.dq_kv, tiles.dq_stages
    dim, dtype, num_context = q_ref.shape[-1], q_ref.dtype, k_ref.shape[1] // tiles.dq_kv
    full, total = counts_ref[batch, tile, 0], counts_ref[batch, tile, 1]

    @pl.when(consumer < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(232, action="increase")
        q_smem, do_smem, bounds_smem = q_smem2.at[consumer], do_smem2.at[consumer], bounds_smem2.at[consumer]
        row, head = grid.consumer(tile, unit, consumer)
        rows = pl.ds(row, ROWS)
        for source, target in (
            (q_ref.at[batch, rows, head], q_smem),
            (do_ref.at[batch, rows, head], do_smem),
            (bounds_ref.at[batch, :, :, rows], bounds_smem),
            (lse_ref.at[batch, head, rows], lse_smem2.at[consumer]),
            (delta_ref.at[batch, head, rows], delta_smem2.at[consumer]),
        ):
            plgpu.copy_gmem_to_smem(source, target, q_ready.at[consumer])
        plgpu.barrier_wait(q_ready.at[consumer])
        by_row = plgpu.Layout.WGMMA.reduce(1)
        lse = plgpu.layout_cast(lse_smem2.at[consumer][...], by_row)
        delta = plgpu.layout_cast(delta_smem2.at[consumer][...], by_row)

        def visit(step: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            acc, lse, delta = carry
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[slot])

            def weigh(raw: Array) -> Array:
                if masked:
                    own, base = _tile_of(ids_ref[batch, tile, step], num_context, kv)
                    raw = jnp.where(_allowed(bounds_smem.at[own], base, (ROWS, kv), 0), raw, -jnp.inf)
                return jnp.exp2(raw * (scale * LOG2E) - _along(lse, raw.shape, 0))

            scores = (q_smem, _transposed(k_smem.at[slot]))
            slopes = (do_smem, _transposed(v_smem.at[slot]))
            weights, slope = _weights_and_slopes(scores, slopes, (ROWS, kv), weigh)
            slope = weights * (slope - _along(delta, slope.shape, 0))
            acc = _accumulate(acc, slope.astype(dtype), k_smem.at[slot])
            plgpu.barrier_arrive(used.at[slot])
            return acc, lse, delta

        carry = (_full((ROWS, dim), 0.0, plgpu.Layout.WGMMA), lse, delta)
        carry = lax.fori_loop(0, full, functools.partial(visit, masked=False), carry)
        acc, _, _ = lax.fori_loop(full, total, functools.partial(visit, masked=True), carry)
        q_smem[...] = (acc * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(consumer == CONSUMERS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        kv_head = grid.kv_head(unit)

        def copy(step: Array, slot: Array) -> None:
            sources = ((k_ref, own_k_ref), k_smem), ((v_ref, own_v_ref), v_smem)
            pairs = [(source, target.at[slot], ready.at[slot]) for source, target in sources]
            _copy_keys(ids_ref[batch, tile, step], num_context, kv, batch, kv_head, pairs)

        _produce(total, stages, copy, [used])


def _dkv_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, own_k_ref: Any, own_v_ref: Any, do_ref: Any, lse_ref: Any, delta_ref: Any,
    bounds_ref: Any, ids_ref: Any, counts_ref: Any, dk_ref: Any, dv_ref: Any, own_dk_ref: Any, own_dv_ref: Any,
    k_smem2: Any, v_smem2: Any, q_smem: Any, do_smem: Any, bounds_smem: Any, lse_smem: Any, delta_smem: Any,
    k_ready: Any, ready: Any, used: Any,
    *, batches: int, tiles: GpuTiles, scale: float,
) -> None:  # fmt: skip
    kv_heads, group = k_ref.shape[2], q_ref.shape[2] // k_ref.shape[2]
    index, consumer = lax.axis_index("program"), lax.axis_index("wg")
    kv_head, rest = lax.rem(index, kv_heads), lax.div(index, kv_heads)
    batch, tile = (
        lax.rem(rest, batches),
        lax.div(rest, batches),
    )  # the first keys are seen by most rows: they start first
    stages, dim, dtype = tiles.dkv_stages, q_ref.shape[-1], q_ref.dtype
    own, first = _tile_of(tile, k_ref.shape[1] // KEYS, KEYS)
    full, total = counts_ref[batch, tile, 0], counts_ref[batch, tile, 1]

    @pl.when(consumer < CONSUMERS)
    def _consume() -> None:
        plgpu.set_max_registers(232, action="increase")
        k_mine, v_mine = k_smem2.at[consumer], v_smem2.at[consumer]
        base = first + consumer * ROWS
        for is_own, sources in ((0, (k_ref, v_ref)), (1, (own_k_ref, own_v_ref))):

            @pl.when(own == is_own)
            def _copy(sources: Any = sources) -> None:
                for source, target in zip(sources, (k_mine, v_mine), strict=True):
                    source = source.at[batch, pl.ds(base, ROWS), kv_head]
                    plgpu.copy_gmem_to_smem(source, target, k_ready.at[consumer])

        plgpu.barrier_wait(k_ready.at[consumer])
        shape, by_row = (ROWS, ROWS), plgpu.Layout.WGMMA.reduce(0)

        def visit(step: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
            dk, dv = carry
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[slot])

            def weigh(raw: Array) -> Array:
                if masked:
                    raw = jnp.where(_allowed(bounds_smem.at[slot], base, shape, 1), raw, -jnp.inf)
                lse = plgpu.layout_cast(lse_smem.at[slot][...], by_row)
                return jnp.exp2(raw * (scale * LOG2E) - _along(lse, shape, 1))

            scores = (k_mine, _transposed(q_smem.at[slot]))
            slopes = (v_mine, _transposed(do_smem.at[slot]))
            weights, slope = _weights_and_slopes(scores, slopes, shape, weigh)
            delta = plgpu.layout_cast(delta_smem.at[slot][...], by_row)
            slope = weights * (slope - _along(delta, shape, 1))

            def mix(refs: Any) -> None:
                dk_ref, dv_ref = refs
                plgpu.wgmma(dv_ref, weights.astype(dtype), do_smem.at[slot])
                plgpu.wgmma(dk_ref, slope.astype(dtype), q_smem.at[slot])

            dk, dv = pl.run_state(mix)((plgpu.ACC.init(dk), plgpu.ACC.init(dv)))
            plgpu.barrier_arrive(used.at[slot])
            return dk, dv

        zero = _full((ROWS, dim), 0.0, plgpu.Layout.WGMMA)
        carry = lax.fori_loop(0, full * group, functools.partial(visit, masked=False), (zero, zero))
        dk, dv = lax.fori_loop(full * group, total * group, functools.partial(visit, masked=True), carry)
        k_mine[...] = (dk * scale).astype(dtype)
        v_mine[...] = dv.astype(dtype)
        plgpu.commit_smem()
        for is_own, targets in ((0, (dk_ref, dv_ref)), (1, (own_dk_ref, own_dv_ref))):

            @pl.when(own == is_own)
            def _store(targets: Any = targets) -> None:
                for source, target in zip((k_mine, v_mine), targets, strict=True):
                    plgpu.copy_smem_to_gmem(source, target.at[batch, pl.ds(base, ROWS), kv_head])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(consumer == CONSUMERS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def copy(step: Array, slot: Array) -> None:
            rows = pl.ds(ids_ref[batch, tile, lax.div(step, group)] * ROWS, ROWS)
            head = kv_head * group + lax.rem(step, group)
            for source, target in (
                (q_ref.at[batch, rows, head], q_smem),
                (do_ref.at[batch, rows, head], do_smem),
                (bounds_ref.at[batch, own, :, rows], bounds_smem),
                (lse_ref.at[batch, head, rows], lse_smem),
                (delta_ref.at[batch, head, rows], delta_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])

        _produce(total * group, stages, copy, [used])


def _launch(body: Callable[..., None], out: Any, programs: int, scratch: list[Any]) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
    )


def _forward(q: Array, keys: Keys, ranges: Ranges, scale: float, tiles: GpuTiles) -> tuple[Array, Array]:
    """Output and base-2 log-sum-exp (-inf for a row that sees nothing)."""
    batch, rows, heads, dim = q.shape
    grid = _QueryGrid(batch, rows, heads, keys[0].shape[2])
    kinds = _kinds(ranges, grid.rows, tiles.kv, keys[0].shape[1], keys[2].shape[1])
    out = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32))
    scratch = [
        _tile(q.dtype, CONSUMERS, ROWS, dim),
        _tile(q.dtype, tiles.stages, tiles.kv, dim),
        _tile(q.dtype, tiles.stages, tiles.kv, dim),
        plgpu.SMEM((CONSUMERS, 2, 2, ROWS), jnp.int32),
        plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        plgpu.Barrier(num_barriers=tiles.stages),
        plgpu.Barrier(num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS),
    ]
    body = functools.partial(_forward_kernel, grid=grid, tiles=tiles, scale=scale)
    return _launch(body, out, grid.size, scratch)(q, *keys, _bounds(ranges), *ordered_visits(kinds))


def _backward(
    q: Array, keys: Keys, ranges: Ranges, lse: Array, delta: Array, d_out: Array, scale: float, tiles: GpuTiles
) -> tuple[Array, Keys]:
    """Gradients; `lse` is in base 2."""
    batch, rows, heads, dim = q.shape
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)  # an empty row's scores are -inf: they stay so
    operands = (q, *keys, d_out, lse, delta, _bounds(ranges))
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    grid = _QueryGrid(batch, rows, heads, keys[0].shape[2])
    kinds = _kinds(ranges, grid.rows, tiles.dq_kv, keys[0].shape[1], keys[2].shape[1])
    scratch = [
        _tile(q.dtype, CONSUMERS, ROWS, dim),
        _tile(q.dtype, CONSUMERS, ROWS, dim),
        _tile(q.dtype, tiles.dq_stages, tiles.dq_kv, dim),
        _tile(q.dtype, tiles.dq_stages, tiles.dq_kv, dim),
        plgpu.SMEM((CONSUMERS, 2, 2, ROWS), jnp.int32),
        plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=5, num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=2, num_barriers=tiles.dq_stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.dq_stages),
    ]
    body = functools.partial(_dq_kernel, grid=grid, tiles=tiles, scale=scale)
    dq = _launch(body, struct(q), grid.size, scratch)(*operands, *ordered_visits(kinds))

    kinds = _kinds(ranges, ROWS, KEYS, keys[0].shape[1], keys[2].shape[1]).transpose(0, 2, 1)
    scratch = [
        _tile(q.dtype, CONSUMERS, ROWS, dim),
        _tile(q.dtype, CONSUMERS, ROWS, dim),
        _tile(q.dtype, tiles.dkv_stages, ROWS, dim),
        _tile(q.dtype, tiles.dkv_stages, ROWS, dim),
        plgpu.SMEM((tiles.dkv_stages, 2, ROWS), jnp.int32),
        plgpu.SMEM((tiles.dkv_stages, ROWS), jnp.float32),
        plgpu.SMEM((tiles.dkv_stages, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=5, num_barriers=tiles.dkv_stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.dkv_stages),
    ]
    programs = batch * keys[0].shape[2] * kinds.shape[1]
    body = functools.partial(_dkv_kernel, batches=batch, tiles=tiles, scale=scale)
    grads = _launch(body, tuple(map(struct, keys)), programs, scratch)(*operands, *ordered_visits(kinds))
    return dq, Keys(*grads)


@dataclasses.dataclass(frozen=True)
class GpuKernels:
    """bfloat16 or float16, head dims 64 and 128."""

    tiles: GpuTiles = GpuTiles()

    def multiples(self, q: Array, keys: Keys) -> tuple[int, int, int]:
        """See `ranged.Kernels`."""
        if q.dtype not in (jnp.bfloat16, jnp.float16) or any(x.dtype != q.dtype for x in keys):
            found = ", ".join(str(x.dtype) for x in (q, *keys))
            raise ValueError(f"anchor_attention, gpu: found dtypes {found}, expected bfloat16 or float16 throughout")
        if q.shape[-1] > 128:
            raise ValueError(f"anchor_attention, gpu: found head dim {q.shape[-1]}, expected at most 128")
        wide = max(KEYS, self.tiles.kv, self.tiles.dq_kv)
        return CONSUMERS * ROWS, wide, wide

    def forward(self, q: Array, keys: Keys, ranges: Ranges, scale: float) -> tuple[Array, Array]:
        """See `ranged.Kernels`."""
        out, lse = _forward(q, keys, ranges, scale, self.tiles)
        return out, lse / LOG2E

    def backward(
        self, q: Array, keys: Keys, ranges: Ranges, lse: Array, delta: Array, d_out: Array, scale: float
    ) -> tuple[Array, Keys]:
        """See `ranged.Kernels`."""
        return _backward(q, keys, ranges, lse * LOG2E, delta, d_out, scale, self.tiles)
