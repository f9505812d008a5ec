"""TPU kernels: row-wise argmax, a draw from one row's residual in one pass over it, and row writes by DMA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.accept_commit.rows import EMPTY_MASS, CommitRows, accept_by_rows, places
from pallas_kernels.tuning import tiles as tuned

LANES, SUBLANES = 128, 8
_SQUARE = LANES * LANES  # ids of one step of the draw: their prefix sums are two small products


def accept(
    target: Float[Array, "M V"],
    drafts: Int[Array, "R m"],
    rows: CommitRows,
    mode: str = "greedy",
    q: Float[Array, "R m V"] | None = None,
    u: Float[Array, "R m"] | None = None,
    u_last: Float[Array, "R"] | None = None,
    interpret: Any = False,
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """See `reference.accept`."""
    argmax, draw = (functools.partial(f, interpret=interpret) for f in (_argmax, _draw))
    return accept_by_rows(target, drafts, rows, mode, q, u, u_last, argmax, draw)


def _argmax(logits: Float[Array, "M V"], interpret: Any) -> Int[Array, "M"]:
    """Lowest id of the largest float32 value of each row."""
    total, vocab = logits.shape
    width = tuned("accept_commit", f"argmax {logits.dtype} V={vocab}", {"ids": 8192})["ids"]
    width = min(width, -(-vocab // LANES) * LANES)
    height = 16 if logits.dtype == jnp.bfloat16 else SUBLANES

    def kernel(logits, best, peak):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _clear():
            peak[...] = jnp.full(peak.shape, -jnp.inf)
            best[...] = jnp.zeros(best.shape, jnp.int32)

        ids = step * width + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        values = jnp.where(ids < vocab, logits[...].astype(jnp.float32), -jnp.inf)
        highest = jnp.max(values, axis=1, keepdims=True)
        first = jnp.min(jnp.where(values == highest, ids, vocab), axis=1, keepdims=True)
        better = highest > peak[...]
        best[...] = jnp.where(better, first, best[...])
        peak[...] = jnp.where(better, highest, peak[...])

    out = pl.pallas_call(
        kernel,
        grid=(-(-total // height), -(-vocab // width)),
        in_specs=[pl.BlockSpec((height, width), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((height, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((total, 1), jnp.int32),
        scratch_shapes=[pltpu.VMEM((height, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=3 * total * vocab, transcendentals=0, bytes_accessed=total * vocab * logits.dtype.itemsize
        ),
        interpret=interpret,
        name="accept_argmax",
    )(logits)
    return out[:, 0]


def _draw(
    p: Float[Array, "M V"],
    q: Float[Array, "R m V"] | None,
    row: Int[Array, "R"],
    slot: Int[Array, "R"],
    point: Int[Array, "R"],
    whole: Int[Array, "R"],
    u: Float[Array, "R"],
    interpret: Any,
) -> Int[Array, "R"]:
    """One id a request from max(p[row] - q[slot], 0), or from p[row] where `whole`. A row passes through VMEM once and
    stays there; without q all of its mass is on `point`."""
    requests, vocab = row.shape[0], p.shape[1]
    steps = -(-vocab // _SQUARE)
    high, high_q = (16 if x.dtype == jnp.bfloat16 else SUBLANES for x in (p, p if q is None else q))

    def kernel(row, slot, point, whole, u, p, *rest):
        q_block = None if q is None else rest[0]
        token, weights, mass = rest[-3:]
        request, step = pl.program_id(0), pl.program_id(1)

        def square(block, index, size):
            """One row of a block of rows, 128 ids a line."""
            values = block.astype(jnp.float32)
            mine = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) == index % size
            return jnp.sum(jnp.where(mine, values, 0.0), axis=0).reshape(LANES, LANES)

        high_row = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
        ids = step * _SQUARE + high_row * LANES + column
        chosen = jnp.where(ids < vocab, square(p[...], row[request], high), 0.0)
        if q_block is None:
            taken = jnp.where(ids == point[request], 1.0, 0.0)
        else:
            taken = square(q_block[0], slot[request], high_q)
        residual = jnp.where(ids < vocab, jnp.maximum(chosen - jnp.where(taken > 0, taken, 0.0), 0.0), 0.0)
        weights[0, step] = chosen
        weights[1, step] = residual
        for kind in range(2):
            before = jnp.where(step == 0, 0.0, mass[kind])
            mass[kind] = before + jnp.sum((chosen, residual)[kind])

        @pl.when(step == steps - 1)
        def _pick():
            kind = jnp.where((whole[request] > 0) | (mass[1] <= EMPTY_MASS), 0, 1)
            bound = u[request] * mass[kind]
            within = (high_row <= column).astype(jnp.float32)
            above = (column < high_row).astype(jnp.float32)
            exact = lambda a, b: jnp.dot(  # noqa: E731
                a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
            )

            def look(index, state):
                base, first, last = state
                x = weights[kind, index]
                sums = jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)
                cumulative = base + exact(above, sums) + exact(x, within)
                at = ids + (index - step) * _SQUARE
                first = jnp.minimum(first, jnp.min(jnp.where((x > 0) & (cumulative > bound), at, vocab)))
                last = jnp.maximum(last, jnp.max(jnp.where(x > 0, at, 0)))
                return base + jnp.sum(x), first, last

            _, first, last = jax.lax.fori_loop(0, steps, look, (jnp.float32(0), jnp.int32(vocab), jnp.int32(0)))
            token[request] = jnp.minimum(first, last)

    in_specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((high, _SQUARE), lambda r, j, row, *_: (row[r] // high, j)),
    ]
    operands = [u, p]
    if q is not None:
        in_specs.append(pl.BlockSpec((1, high_q, _SQUARE), lambda r, j, row, slot, *_: (r, slot[r] // high_q, j)))
        operands.append(q)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(requests, steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
            scratch_shapes=[pltpu.VMEM((2, steps, LANES, LANES), jnp.float32), pltpu.SMEM((2,), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((requests,), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=8 * requests * vocab * LANES,
            transcendentals=0,
            bytes_accessed=requests * vocab * (high * p.dtype.itemsize + (0 if q is None else high_q * 4)),
        ),
        interpret=interpret,
        name="accept_draw",
    )(row, slot, point, whole, *operands)


def commit(
    pools: Sequence[Float[Array, "pages page combined D"]],
    rows: CommitRows,
    accepted: Int[Array, "R"],
    values: Sequence[Float[Array, "M combined D"]],
    interpret: Any = False,
) -> list[Array]:
    """See `reference.commit`. The pools are updated in place where the caller donates them; a row that is not
    committed is not written at all."""
    layers, total = len(pools), values[0].shape[0]
    page, offset = places(rows, accepted, total, pools[0].shape[1])

    def kernel(page, offset, *refs):
        sources, targets, arrived = refs[:layers], refs[2 * layers : 3 * layers], refs[-1]

        def each(act):
            def one(row, _):
                @pl.when(page[row] > 0)
                def _committed():
                    for source, target in zip(sources, targets, strict=True):
                        act(pltpu.make_async_copy(source.at[row], target.at[page[row], offset[row]], arrived))

                return 0

            jax.lax.fori_loop(0, total, one, 0)

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (2 * layers),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * layers,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={2 + layers + i: i for i in range(layers)},
        interpret=interpret,
        name="accept_commit",
    )(
        page.astype(jnp.int32),
        offset.astype(jnp.int32),
        *(value.astype(pool.dtype) for value, pool in zip(values, pools, strict=True)),
        *pools,
    )
