"""TPU kernel of the verify attention: pages are read in place, block after block, double-buffered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tuning import tiles as tuned
from pallas_kernels.verify_attention.rows import Scalar, VerifyRows, tile, untile

LOWEST = -1e30  # below every score, and finite: the difference of two of them is no NaN
VMEM_LIMIT = 48 << 20  # of 64 MiB on the smallest chip
_DEFAULT_VMEM = 12 << 20  # up to here the compiler's default limit is enough on every chip


def heuristic(count: int, page: int, per_request: int, combined: int, dim: int, itemsize: int) -> dict[str, int]:
    """Rows of a tile and tokens of a page block: a block of 2 MiB hides its own transfer, more only costs VMEM."""
    token = max(combined, 8) * max(dim, 128) * itemsize
    tokens = max(page, min(512, page * per_request, (2 << 20) // token) // page * page)
    return {"rows": min(64, -(-count // 8) * 8), "tokens": tokens}


def verify_attention(
    q: Float[Array, "M heads D"],
    k: Float[Array, "M kv D"],
    v: Float[Array, "M kv D"],
    pool: Float[Array, "pages page combined D"],
    rows: VerifyRows,
    mask: str = "causal",
    window: Scalar = 0,
    inner_window: Scalar | None = None,
    interpret: Any = False,
) -> Float[Array, "M heads D"]:
    """See `reference.verify_attention`. Own rows are rounded to the pool's dtype, as if they had been written."""
    _, page, combined, dim = pool.shape
    kv, count = k.shape[1], rows.max_rows
    key = f"{pool.dtype} rows={count} page={page} kv={kv} dim={dim}"
    sizes = tuned(
        "verify_attention", key, heuristic(count, page, rows.page_table.shape[1], combined, dim, pool.dtype.itemsize)
    )
    height, tokens = sizes["rows"], sizes["tokens"]
    inner = window if inner_window is None else inner_window
    own = -(-count // 16) * 16
    operands = tile(q, k.astype(pool.dtype), v.astype(pool.dtype), rows, mask, window, inner, height, own)
    out = _call(operands, pool, rows.page_table, tokens // page, interpret)
    return untile(out, rows, height).astype(q.dtype)


def _call(t: Any, pool: Array, table: Array, pages_per_block: int, interpret: Any) -> Array:
    """The pallas_call over tiles."""
    programs, kv, wide, dim = t.q.shape
    requests, per_request = table.shape
    share = programs // requests
    _, page, combined, _ = pool.shape
    own = pl.BlockSpec((1, *t.own_k.shape[1:]), lambda i, *_: (i // share, 0, 0, 0))
    whole = pl.BlockSpec((1, kv, wide, dim), lambda i, *_: (i, 0, 0, 0))
    paired = not interpret and fills_tiles(pool.dtype, combined, dim)
    lanes, tokens, keys = max(dim, 128), pages_per_block * page, t.own_k.shape[2]
    need = 2 * tokens * max(combined, 16) * lanes * pool.dtype.itemsize + 8 * kv * (wide + keys) * lanes * 4
    need += 4 * wide * max(tokens, keys) * 4
    pairs = kv * wide * (per_request * page + keys)
    return pl.pallas_call(
        functools.partial(_kernel, share=share, per_request=per_request, paired=paired),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(programs,),
            in_specs=[
                whole,
                own,
                own,
                pl.BlockSpec((1, *t.info.shape[1:]), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=whole,
            scratch_shapes=[
                pltpu.VMEM((2, pages_per_block, page, combined, dim), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((kv, wide, 1), jnp.float32),
                pltpu.VMEM((kv, wide, 1), jnp.float32),
                pltpu.VMEM((kv, wide, dim), jnp.float32),
            ],
        ),
        # no state passes from one program to the next: they may run in any order, on two cores
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT if need > _DEFAULT_VMEM else None
        ),
        cost_estimate=pl.CostEstimate(  # for full tables: how much of them is live is data
            flops=4 * programs * pairs * dim,
            transcendentals=programs * pairs,
            bytes_accessed=programs * per_request * page * combined * dim * pool.dtype.itemsize,
        ),
        out_shape=jax.ShapeDtypeStruct(t.q.shape, t.q.dtype),
        interpret=interpret,
        name="verify_attention",
    )(t.span, table.reshape(-1).astype(jnp.int32), t.q, t.own_k, t.own_v, t.info, pool)


def _kernel(
    span, table, q, own_k, own_v, info, pool, out, buffer, arrived, peak, total, mixed, *, share, per_request, paired
):  # fmt: skip
    """One tile of one request: its page blocks first, its own rows last."""
    program = pl.program_id(0)
    begin, end = span[2 * program], span[2 * program + 1]
    _, pages, page, combined, dim = buffer.shape
    tokens, first_entry = pages * page, program // share * per_request
    peak[...] = jnp.full(peak.shape, LOWEST)
    total[...] = jnp.zeros(total.shape)
    mixed[...] = jnp.zeros(mixed.shape)
    lowest, limit = info[0, :, 0:1], info[0, :, 1:2]
    scale = dim**-0.5

    def transfer(block, act):
        """Starts or awaits the copies of a block's pages, those only that hold anything visible."""

        def one(number, _):
            source = pool.at[table[first_entry + number]]
            act(pltpu.make_async_copy(source, buffer.at[block % 2, number - block * pages], arrived.at[block % 2]))
            return 0

        low = jnp.maximum(block * pages, begin // page)
        jax.lax.fori_loop(low, jnp.minimum((block + 1) * pages, (end + page - 1) // page), one, 0)

    def absorb(head, keys, values, seen):
        """Running softmax of one K/V head: keys and values [n, D], seen [N, n]."""
        raw = _dot(q[0, head], keys, 1) * scale
        old = peak[head]
        new = jnp.maximum(old, jnp.max(jnp.where(seen, raw, LOWEST), axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(raw - new), 0.0)
        shrink = jnp.exp(old - new)
        peak[head] = new
        total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        mixed[head] = mixed[head] * shrink + _dot(weights.astype(values.dtype), values, 0)

    def step(block, _):
        @pl.when((block + 1) * tokens < end)
        def _prefetch():
            transfer(block + 1, lambda copy: copy.start())

        transfer(block, lambda copy: copy.wait())
        slot = block * tokens + jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
        seen = (slot >= lowest) & (slot < limit)
        row = block * tokens + jax.lax.broadcasted_iota(jnp.int32, (tokens, 1), 0)
        fetched = (row >= begin) & (row < end)
        load = _loader(buffer.at[block % 2], paired)
        for head in range(combined // 2):
            keys, values = load(head)
            absorb(head, keys, jnp.where(fetched, values, jnp.zeros_like(values)), seen)
        return 0

    first = begin // tokens

    @pl.when(begin < end)
    def _start():
        transfer(first, lambda copy: copy.start())

    jax.lax.fori_loop(first, jnp.where(begin < end, (end + tokens - 1) // tokens, first), step, 0)
    seen = _bits(info[0, :, 2:], own_k.shape[2])
    for head in range(combined // 2):
        absorb(head, own_k[0, head], own_v[0, head], seen)
        sums = total[head]
        out[0, head] = (mixed[head] / jnp.where(sums > 0, sums, 1.0)).astype(out.dtype)


def _dot(a: Any, b: Any, contracted: int) -> Any:
    """a's columns with b's axis `contracted`, in float32; float32 operands are multiplied as such (B70)."""
    wide = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b.astype(a.dtype),
        (((1,), (contracted,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _bits(words: Any, count: int) -> Any:
    """Bits 0 … count - 1 of each row's words as a mask [N, count]."""
    column = jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], count), 1)
    word = jnp.zeros(column.shape, jnp.int32)
    for i in range(words.shape[1]):
        word = jnp.where(column // 32 == i, words[:, i : i + 1], word)
    return (jax.lax.shift_right_logical(word, column % 32) & 1) > 0


def _loader(block: Any, paired: bool) -> Any:
    """head -> (K, V) [tokens, D] of a page block. Where bfloat16 K and V fill whole tiles, a strided load of their
    pairs and a shift compile to far less than indexing packed rows; the interpreter cannot view a buffer so."""
    pages, page, combined, dim = block.shape
    if not paired:
        rows = block[...].reshape(pages * page, combined, dim)
        return lambda head: (rows[:, 2 * head], rows[:, 2 * head + 1])
    pairs = block.reshape(pages * page * combined, dim).bitcast(jnp.uint32)
    return lambda head: split_pairs(pairs[head :: combined // 2, :])


def fills_tiles(dtype: Any, combined: int, dim: int) -> bool:
    """Whether a row's K and V pairs are whole 32-bit tiles."""
    kv = combined // 2
    return dtype == jnp.bfloat16 and (kv in (1, 2, 4) or kv % 8 == 0) and dim == 128


def split_pairs(pairs: Any) -> tuple[Any, Any]:
    """(low, high) halves of 32-bit words as bfloat16; the even sublane, K, is the low one."""
    halves = pairs << 16, pairs & jnp.uint32(0xFFFF0000)
    low, high = (jax.lax.bitcast_convert_type(half, jnp.float32).astype(jnp.bfloat16) for half in halves)
    return low, high
