"""TPU kernel of the context projection: one pass over the weights, every activation stays in VMEM.

A tile of rows walks first over the features' columns (fc, accumulated in float32), then over the K/V heads of every
layer; a layer's finished rows leave by DMA to their pages while the next layer is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.context_kv.reference import rms_norm
from pallas_kernels.context_kv.rows import ContextRows, LayerWeights
from pallas_kernels.tuning import tiles as tuned

LANES = 128
VMEM_LIMIT = 56 << 20  # of 64 MiB on the smallest chip
_FC_BLOCK = 3 << 20


def heuristic(total: int, hidden: int, width: int, itemsize: int) -> dict[str, int]:
    """Rows of a tile and feature columns of a step: all of a decoding batch, and 3 MiB of fc, which hides a step's
    start."""
    columns = max(LANES, _FC_BLOCK // (hidden * itemsize) // LANES * LANES)
    return {"rows": min(256, -(-total // 16) * 16), "columns": width if columns >= width else columns}


def context_kv(
    features: Float[Array, "M F"],
    fc: Float[Array, "H F"],
    hidden_norm: Float[Array, "H"],
    layers: Sequence[LayerWeights],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    pools: Sequence[Float[Array, "pages page combined D"]],
    rows: ContextRows,
    eps: float = 1e-6,
    interpret: Any = False,
) -> list[Array]:
    """See `reference.context_kv`. The pools are updated in place where the caller donates them; padding rows are not
    written at all."""
    total, width = features.shape
    hidden, count = fc.shape[0], len(layers)
    _, page_size, combined, dim = pools[0].shape
    kv = combined // 2
    key = f"{fc.dtype} M={total} H={hidden} F={width} kv={kv} dim={dim}"
    sizes = tuned("context_kv", key, heuristic(total, hidden, width, fc.dtype.itemsize))
    height, columns = sizes["rows"], sizes["columns"]
    tiles, steps = -(-total // height), -(-width // columns)
    beyond = tiles * height - total
    page, offset = (jnp.pad(x, (0, beyond)).astype(jnp.int32) for x in rows.places(page_size))
    norms = [layer.k_norm for layer in layers if layer.k_norm is not None]
    if norms and len(norms) < count:
        raise ValueError(f"k_norm: found {len(norms)} of {count} layers with one, expected all or none")
    # second half and sign folded in, so that a rotation is two products and a swap of halves
    turns = [jnp.concatenate(pair, axis=1).astype(jnp.float32) for pair in ((cos, cos), (-sin, sin))]

    def head_of(layer: int) -> Any:
        return lambda i, j, *_: (jnp.clip(j - steps - layer * kv, 0, kv - 1), 0)

    heads = [pl.BlockSpec((dim, hidden), head_of(layer)) for layer in range(count) for _ in range(2)]
    whole = lambda size: pl.BlockSpec((1, size), lambda *_: (0, 0))  # noqa: E731
    tile = pl.BlockSpec((height, dim), lambda i, *_: (i, 0))
    operands = [
        features.astype(fc.dtype), fc, hidden_norm[None], *turns,
        *(weight for layer in layers for weight in (layer.k_proj, layer.v_proj)), *(norm[None] for norm in norms),
    ]  # fmt: skip
    return pl.pallas_call(
        functools.partial(_kernel, steps=steps, width=width, kv=kv, layers=count, normed=bool(norms), eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, steps + count * kv),
            in_specs=[
                pl.BlockSpec((height, columns), lambda i, j, *_: (i, jnp.minimum(j, steps - 1))),
                pl.BlockSpec((hidden, columns), lambda i, j, *_: (0, jnp.minimum(j, steps - 1))),
                whole(hidden), tile, tile, *heads, *[whole(dim)] * len(norms),
                *[pl.BlockSpec(memory_space=pl.ANY)] * count,
            ],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * count,
            scratch_shapes=[
                pltpu.VMEM((height, hidden), jnp.float32),
                pltpu.VMEM((height, hidden), fc.dtype),
                pltpu.VMEM((combined, height, dim), pools[0].dtype),
                pltpu.VMEM((2, height, combined, dim), pools[0].dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={2 + len(operands) + i: i for i in range(count)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * total * hidden * (width + count * combined * dim),
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands) + total * count * combined * dim * 2,
        ),
        interpret=interpret,
        name="context_kv",
    )(page, offset, *operands, *pools)  # fmt: skip


def _kernel(page, offset, features, fc, hidden_norm, cos, sin, *refs, steps, width, kv, layers, normed, eps):
    """One step of one tile of rows: a block of fc's columns, or one K/V head of one layer."""
    weights, refs = refs[: 2 * layers], refs[2 * layers :]
    norms, refs = (refs[:layers], refs[layers:]) if normed else ((), refs)
    targets = refs[layers : 2 * layers]
    total, context, heads, finished, arrived = refs[2 * layers :]
    tile, step = pl.program_id(0), pl.program_id(1)
    height, columns = features.shape

    @pl.when(step == 0)
    def _clear():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(step < steps)
    def _project():
        block = [features[...], fc[...]]
        if width % columns:  # what lies beyond the last column is anything
            left = width - step * columns
            block = [
                jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < left, x, jnp.zeros_like(x)) for x in block
            ]
        total[...] += _product(*block)

    @pl.when(step == steps - 1)
    def _norm():
        context[...] = rms_norm(total[...].astype(context.dtype), hidden_norm[0], eps)

    layer, head = (step - steps) // kv, (step - steps) % kv
    parity = layer % 2

    def transfer(target: Any, parity: Any, act: Any) -> None:
        """Starts or awaits the copies of one layer's committed rows."""

        def one(row, _):
            place = tile * height + row

            @pl.when(page[place] > 0)
            def _committed():
                source = finished.at[parity, row]
                act(pltpu.make_async_copy(source, target.at[page[place], offset[place]], arrived.at[parity]))

            return 0

        jax.lax.fori_loop(0, height, one, 0)

    def wait(parity: Any) -> None:
        transfer(targets[0], parity, lambda copy: copy.wait())  # a wait counts bytes, whichever pool they went to

    for index in range(layers):

        @pl.when(layer == index)
        def _head(index=index):
            keys, values = (
                _product(context[...], weight[...]).astype(context.dtype)
                for weight in weights[2 * index : 2 * index + 2]
            )
            if normed:
                keys = rms_norm(keys, norms[index][0], eps)
            wide = keys.astype(jnp.float32)
            half = wide.shape[1] // 2
            swapped = jnp.concatenate([wide[:, half:], wide[:, :half]], axis=1)
            heads[2 * head] = (wide * cos[...] + swapped * sin[...]).astype(context.dtype).astype(heads.dtype)
            heads[2 * head + 1] = values.astype(heads.dtype)

    @pl.when((step >= steps) & (head == kv - 1))
    def _write():
        pl.when(layer >= 2)(lambda: wait(parity))
        for index in range(2 * kv):
            finished[parity, :, index, :] = heads[index]
        for index in range(layers):
            pl.when(layer == index)(lambda index=index: transfer(targets[index], parity, lambda copy: copy.start()))

        @pl.when(layer == layers - 1)
        def _finish():
            wait(parity)
            if layers > 1:
                wait(1 - parity)


def _product(a: Any, b: Any) -> Any:
    """a b^T in float32; float32 operands are multiplied as such (B70)."""
    wide = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b.astype(a.dtype),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
