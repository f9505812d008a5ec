"""Triton kernels: a draw from one row's residual in two small launches, and all layers' row writes in one.

The greedy path is XLA's own argmax, which reads the logits once already.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.accept_commit.rows import EMPTY_MASS, CommitRows, accept_by_rows, places
from pallas_kernels.tuning import tiles as tuned


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
    draw = functools.partial(_draw, interpret=interpret)
    return accept_by_rows(target, drafts, rows, mode, q, u, u_last, _argmax, draw)


def _argmax(logits: Float[Array, "M V"]) -> Int[Array, "M"]:
    return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)


def _power(n: int) -> int:
    """Smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


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
    """Sums of chunks by one program each; then a program a request finds the chunk and the id in it."""
    requests, vocab = row.shape[0], p.shape[1]
    width = tuned("accept_commit", f"draw {p.dtype} V={vocab}", {"ids": min(2048, _power(vocab))})["ids"]
    chunks = -(-vocab // width)
    padded = _power(chunks)
    operands = [row, slot, point, p, *([] if q is None else [q])]

    def weights(request, chunk, row, slot, point, p, *q):
        """p and the residual of a chunk's ids, zero beyond V."""
        ids = chunk * width + jnp.arange(width)
        inside = ids < vocab
        chosen = plt.load(p.at[row[request], ids], mask=inside, other=0).astype(jnp.float32)
        if q:
            taken = plt.load(q[0].at[request, slot[request], ids], mask=inside, other=0).astype(jnp.float32)
        else:
            taken = jnp.where(ids == point[request], 1.0, 0.0)
        return ids, chosen, jnp.maximum(chosen - jnp.where(taken > 0, taken, 0.0), 0.0)

    def add(*refs):
        request, chunk = pl.program_id(0), pl.program_id(1)
        _, chosen, residual = weights(request, chunk, *refs[:-1])
        refs[-1][request, 0, chunk] = jnp.sum(chosen)
        refs[-1][request, 1, chunk] = jnp.sum(residual)

    def pick(*refs):
        *inputs, whole, u, sums, token = refs
        request = pl.program_id(0)
        index = jnp.arange(padded)
        mass = [plt.load(sums.at[request, kind, index], mask=index < chunks, other=0) for kind in range(2)]
        direct = (whole[request] > 0) | (jnp.sum(mass[1]) <= EMPTY_MASS)
        part = jnp.where(direct, mass[0], mass[1])
        cumulative = jnp.cumsum(part, axis=0)
        bound = u[request] * jnp.sum(part)
        first = jnp.min(jnp.where((part > 0) & (cumulative > bound), index, padded))
        chunk = jnp.minimum(first, jnp.max(jnp.where(part > 0, index, 0)))
        base = jnp.sum(jnp.where(index < chunk, part, 0.0))
        ids, chosen, residual = weights(request, chunk, *inputs)
        x = jnp.where(direct, chosen, residual)
        beyond = (x > 0) & (base + jnp.cumsum(x, axis=0) > bound)
        first = jnp.min(jnp.where(beyond, ids, jnp.iinfo(jnp.int32).max))
        token[request] = jnp.minimum(first, jnp.max(jnp.where(x > 0, ids, 0)))

    options = {"interpret": interpret, "compiler_params": plt.CompilerParams(num_warps=4)}
    sums = pl.pallas_call(
        add,
        grid=(requests, chunks),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((requests, 2, chunks), jnp.float32),
        name="accept_sums",
        **options,
    )(*operands)
    return pl.pallas_call(
        pick,
        grid=(requests,),
        in_specs=[pl.no_block_spec] * (len(operands) + 3),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((requests,), jnp.int32),
        name="accept_draw",
        **options,
    )(*operands, whole, u, sums)


def commit(
    pools: Sequence[Float[Array, "pages page combined D"]],
    rows: CommitRows,
    accepted: Int[Array, "R"],
    values: Sequence[Float[Array, "M combined D"]],
    interpret: Any = False,
) -> list[Array]:
    """See `reference.commit`. The pools are updated in place where the caller donates them; a row that is not
    committed is not written at all."""
    layers, (total, combined, dim) = len(pools), values[0].shape
    page, offset = places(rows, accepted, total, pools[0].shape[1])

    def kernel(page, offset, *refs):
        row = pl.program_id(0)
        heads, columns = jnp.arange(_power(combined))[:, None], jnp.arange(_power(dim))[None, :]
        inside = (heads < combined) & (columns < dim)
        for source, target in zip(refs[:layers], refs[2 * layers :], strict=True):
            value = plt.load(source.at[row, heads, columns], mask=inside, other=0)
            plt.store(target.at[page[row], offset[row], heads, columns], value, mask=inside & (page[row] > 0))

    return pl.pallas_call(
        kernel,
        grid=(total,),
        in_specs=[pl.no_block_spec] * (2 + 2 * layers),
        out_specs=[pl.no_block_spec] * layers,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={2 + layers + i: i for i in range(layers)},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="accept_commit",
    )(
        page.astype(jnp.int32),
        offset.astype(jnp.int32),
        *(value.astype(pool.dtype) for value, pool in zip(values, pools, strict=True)),
        *pools,
    )
