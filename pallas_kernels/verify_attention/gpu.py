"""Triton kernel of the verify attention: pages are read in place; one request's context is split over many programs.

A tile of a request's rows, a K/V head and a share of the context make one program; each writes the weighted values, the
largest score and the weights' sum of its share. One more share is the own rows, and a second kernel merges them. Rows
are read and written in their own order: what depends on the layout alone is computed once for all layers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.tuning import tiles as tuned
from pallas_kernels.verify_attention.rows import Scalar, VerifyRows, visible

LOWEST = -1e30  # below every score, and finite: the difference of two of them is no NaN
_PROGRAMS = 256  # two a multiprocessor on the cards this was written for


def heuristic(count: int, requests: int, kv: int, group: int, capacity: int, width: int) -> dict[str, int]:
    """Rows of a tile, tokens of a step, shares of the context: 64 KiB of K and V a step (`width` bytes a head's row),
    two programs a multiprocessor, 128 tokens each at least."""
    height = max(1, min(128 // group, count))
    programs = requests * kv * -(-count // height)
    splits = _power(max(1, min(_PROGRAMS // programs, capacity // 128)) + 1) // 2  # the power of two below
    tokens = max(16, min(128, (32 << 10) // width))
    return {"rows": height, "tokens": tokens, "splits": splits, "warps": 4 if height * group <= 32 else 8, "stages": 2}


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
    _, page, _, dim = pool.shape
    kv, count, group = k.shape[1], rows.max_rows, q.shape[1] // k.shape[1]
    requests, per_request = rows.page_table.shape
    key = f"{pool.dtype} R={requests} rows={count} slots={per_request * page} kv={kv} group={group} dim={dim}"
    sizes = tuned(
        "verify_attention",
        key,
        heuristic(count, requests, kv, group, per_request * page, _power(dim) * pool.dtype.itemsize),
    )
    inner = window if inner_window is None else inner_window
    height = sizes["rows"]
    info, span = visible(rows, mask, window, inner, height)
    segments = jnp.stack([rows.starts, rows.lengths], axis=1).astype(jnp.int32)
    offset, tiles = rows.offsets(), -(-count // height)
    place = (rows.requests * tiles + offset // height) * height + offset % height
    place = jnp.where((offset >= 0) & (offset < rows.lengths[rows.requests]), place, -1).astype(jnp.int32)
    table = rows.page_table.astype(jnp.int32)
    shares = _attend((span, segments, table, q, k, v, info, pool), tuple(sizes.items()), interpret)
    return _merge(place, shares, q, interpret)


def _power(n: int) -> int:
    """Smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced and lowered once for all layers of a program
def _attend(
    operands: tuple[Array, ...], tiles: tuple[tuple[str, int], ...], interpret: Any
) -> tuple[Array, Array, Array]:
    """Weighted values [S, RT x height, heads, D], largest scores and sums of weights [S, RT x height, heads]."""
    _, _, _, q, k, _, info, _ = operands
    sizes = dict(tiles)
    programs, height = info.shape[:2]
    lead = (sizes["splits"] + 1, programs * height, q.shape[1])
    return pl.pallas_call(
        functools.partial(_kernel, tokens=sizes["tokens"]),
        grid=(programs, k.shape[1], sizes["splits"] + 1),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((*lead, q.shape[2]), jnp.float32), *[jax.ShapeDtypeStruct(lead, jnp.float32)] * 2
        ],
        compiler_params=plt.CompilerParams(num_warps=sizes["warps"], num_stages=sizes["stages"]),
        interpret=interpret,
        name="verify_attention",
    )(*operands)  # fmt: skip


def _kernel(span, segments, table, q, k, v, info, pool, mixed, peak, total, *, tokens):
    """One share of one tile's context for one K/V head; the last share is the own rows."""
    program, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    programs, height = info.shape[:2]
    share = programs // table.shape[0]
    request = program // share
    rows, heads, dim = q.shape
    group, page = heads // k.shape[1], pool.shape[1]
    wide = max(16, _power(height * group))  # what a product needs at least
    # every index is an array or a scalar, no slice: what the interpreter can mask
    lines, columns = jnp.arange(wide), jnp.arange(_power(dim))[None, :]
    real = lines < height * group
    line, query = jnp.where(real, lines // group, 0), head * group + lines % group
    known = real[:, None] & (columns < dim)
    start, length = segments[request, 0], segments[request, 1]
    row = jnp.minimum(start + program % share * height + line, rows - 1)
    block = plt.load(q.at[row[:, None], query[:, None], columns], mask=known, other=0)
    lowest = plt.load(info.at[program, line, 0])
    limit = plt.load(info.at[program, line, 1], mask=real, other=0)
    begin, end = span[2 * program], span[2 * program + 1]
    scale = dim**-0.5
    wide_inputs = pool.dtype == jnp.float32

    def dot(a: Any, b: Any) -> Any:
        precision = jax.lax.Precision.HIGHEST if wide_inputs else None
        return jnp.dot(a.astype(pool.dtype), b, precision=precision, preferred_element_type=jnp.float32)

    def absorb(state: Any, keys: Any, values: Any, seen: Any) -> Any:
        """Running softmax: keys and values [n, D], seen [N, n]."""
        sums, old, weight = state
        raw = jnp.where(seen, dot(block, keys.T) * scale, LOWEST)
        new = jnp.maximum(old, jnp.max(raw, axis=1))
        weights = jnp.where(seen, jnp.exp(raw - new[:, None]), 0.0)
        shrink = jnp.exp(old - new)
        sums = sums * shrink[:, None] + dot(weights, values)
        return sums, new, weight * shrink + jnp.sum(weights, axis=1)

    def step(index: Any, state: Any) -> Any:
        slot = index * tokens + jnp.arange(tokens)
        held = (slot >= begin) & (slot < end)
        where = plt.load(table.at[request, slot // page], mask=held, other=0)

        def fetch(combined: Any) -> Any:
            places = pool.at[where[:, None], (slot % page)[:, None], combined, columns]
            return plt.load(places, mask=held[:, None] & (columns < dim), other=0)

        seen = (slot[None, :] >= lowest[:, None]) & (slot[None, :] < limit[:, None])
        return absorb(state, fetch(2 * head), fetch(2 * head + 1), seen)

    first = begin // tokens
    steps = jnp.maximum((end + tokens - 1) // tokens - first, 0)
    splits = pl.num_programs(2) - 1
    each = (steps + splits - 1) // splits
    low = first + split * each  # past the end for the last share
    state = (
        jnp.zeros((wide, columns.shape[1]), jnp.float32),
        jnp.full((wide,), LOWEST, jnp.float32),
        jnp.zeros((wide,), jnp.float32),
    )
    state = jax.lax.fori_loop(low, jnp.minimum(low + each, first + steps), step, state)

    def own(index: Any, state: Any) -> Any:
        """32 of the request's own rows: the bits of one word."""
        mate = index * 32 + jnp.arange(32)
        exists = (mate < length)[:, None] & (columns < dim)
        where = jnp.minimum(start + mate, rows - 1)[:, None]
        keys, values = (plt.load(x.at[where, head, columns], mask=exists, other=0).astype(pool.dtype) for x in (k, v))
        word = plt.load(info.at[program, line, 2 + index], mask=real, other=0)
        return absorb(state, keys, values, ((word[:, None] >> jnp.arange(32)[None, :]) & 1) > 0)

    words = jnp.where(split == splits, (length + 31) // 32, 0)
    sums, highest, weight = jax.lax.fori_loop(0, words, own, state)
    target = program * height + lines // group  # no two lanes at one place, masked ones included
    plt.store(mixed.at[split, target[:, None], query[:, None], columns], sums, mask=known)
    plt.store(peak.at[split, target, query], highest, mask=real)
    plt.store(total.at[split, target, query], weight, mask=real)


@functools.partial(jax.jit, static_argnums=3)
def _merge(place: Array, shares: tuple[Array, Array, Array], q: Array, interpret: Any) -> Array:
    """Softmax over the shares' softmaxes, in row order; zeros for padding."""
    splits = shares[0].shape[0]
    rows, heads, dim = q.shape

    def kernel(place, mixed, peak, total, out):
        row, head = pl.program_id(0), pl.program_id(1)
        source = jnp.maximum(place[row], 0)
        lines, columns = jnp.arange(_power(splits)), jnp.arange(_power(dim))
        real, inside = lines < splits, columns < dim
        highest = plt.load(peak.at[lines, source, head], mask=real, other=LOWEST)
        share = jnp.where(real, jnp.exp(highest - jnp.max(highest)), 0.0)
        weight = jnp.sum(plt.load(total.at[lines, source, head], mask=real, other=0) * share)
        known = real[:, None] & inside[None, :]
        parts = plt.load(mixed.at[lines[:, None], source, head, columns[None, :]], mask=known, other=0)
        value = jnp.sum(parts * share[:, None], axis=0) / jnp.where(weight > 0, weight, 1.0)
        value = jnp.where(place[row] >= 0, value, 0.0)
        plt.store(out.at[row, head, columns], value.astype(out.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(rows, heads),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="verify_attention_merge",
    )(place, *shares)
