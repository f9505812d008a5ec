"""Shapes of the verify attention: Qwen3 (4B and 8B have the same heads) and SmolLM2-135M, bfloat16, pages of 16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.bench import AXIS, Case, find_torch
from pallas_kernels.verify_attention.api import IMPLEMENTATIONS
from pallas_kernels.verify_attention.library import why_not
from pallas_kernels.verify_attention.rows import VerifyRows, pack_bits

PAGE = 16
_FAR_MORE_THAN_CACHE = 256 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """R requests of `rows` rows, `context` committed slots each, in tables for twice as many (the model's limit)."""

    name: str
    requests: int
    rows: int
    context: int
    heads: int = 32
    kv: int = 8
    dim: int = 128
    mask: str = "causal"
    window: int = 0

    @property
    def label(self) -> str:
        """Name, requests x rows, context, mask."""
        window = f"-w{self.window}" if self.window else ""
        return f"{self.name}-{self.requests}x{self.rows}-ctx{self.context}-{self.mask}{window}"


def _smollm2(requests: int, rows: int, context: int, mask: str = "causal") -> Shape:
    return Shape("smollm2", requests, rows, context, heads=9, kv=3, dim=64, mask=mask)


# On a TPU they are compiled only, where the number of requests and slots changes nothing: the first list is enough.
SHAPES = [
    Shape("qwen3", 8, 8, 4096),
    Shape("qwen3", 8, 17, 4096, window=1024),
    Shape("qwen3", 8, 16, 4096, mask="full", window=2048),
    Shape("qwen3", 4, 64, 4096, mask="tree"),
    Shape("qwen3", 1, 256, 4096),
    _smollm2(8, 8, 1024),
    _smollm2(4, 16, 1024, "full"),
]
GPU_SHAPES = [
    Shape("qwen3", 1, 1, 1024),
    Shape("qwen3", 1, 8, 1024),
    Shape("qwen3", 1, 17, 1024),
    Shape("qwen3", 1, 17, 16384),
    Shape("qwen3", 8, 17, 4096),
    Shape("qwen3", 1, 16, 1024, mask="full"),
    Shape("qwen3", 1, 64, 1024, mask="tree"),
]


def cases(platform: str) -> Iterable[Case]:
    """Every shape, with the implementations that fit it."""
    for shape in SHAPES + (GPU_SHAPES if platform == "gpu" else []):
        yield _case(shape, platform)


def _case(s: Shape, platform: str) -> Case:
    per_request = 2 * s.context // PAGE
    pages = 4 + s.requests * per_request  # the trash page, and a number that four chips can share
    if platform == "gpu":
        pages = max(pages, _FAR_MORE_THAN_CACHE // (PAGE * 2 * s.kv * s.dim * 2))
    total = s.requests * s.rows
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "q": ((total, s.heads, s.dim), bf16),
        "k": ((total, s.kv, s.dim), bf16),
        "v": ((total, s.kv, s.dim), bf16),
        "pool": ((pages, PAGE, 2 * s.kv, s.dim), bf16),
        "first": ((s.requests,), i32),
        "lengths": ((s.requests,), i32),
        "table": ((s.requests, per_request), i32),
    }
    if s.mask == "tree":
        shapes["ancestors"] = ((s.requests, s.rows, -(-s.rows // 32)), i32)
    keys = s.context if not s.window else min(s.context, s.window)
    own = {"causal": s.rows * (s.rows + 1) // 2, "full": s.rows**2}.get(s.mask, int(_chains(s.rows).sum()))
    row = 2 * (s.heads + s.kv) * s.dim * 2
    # the library's kernel reads the own rows from the pages, where this draw does not put them: TPU only
    names = ["reference", "gpu"] if platform == "gpu" else ["tpu"]
    operands = [jax.ShapeDtypeStruct(*x) for x in shapes.values()]
    if platform == "tpu" and why_not(operands[3], s.mask, s.window, None) is None:
        names.append("tpu_library")
    implementations = {name: functools.partial(_run, s, IMPLEMENTATIONS[name]) for name in names}
    if platform == "gpu":
        implementations["dot_product_attention"] = functools.partial(_run, s, _dense)
    return Case(
        s.label,
        implementations,
        operands,
        functools.partial(_draw, s, shapes),
        flops=4.0 * s.heads * s.dim * s.requests * (s.rows * keys + own),
        bytes=float(s.requests * (keys * 2 * s.kv * s.dim * 2 + s.rows * row)),
        vary=functools.partial(_vary, pages),
        torch_peers={"torch-sdpa-contiguous": functools.partial(_torch, s)},
        specs=_specs(s, len(shapes)),
    )


def _run(s: Shape, attend: Callable[..., Any], q: Any, k: Any, v: Any, pool: Any, *rest: Any) -> Any:
    return attend(q, k, v, pool, _rows(s, *rest), s.mask, s.window)


def _rows(s: Shape, first: Any, lengths: Any, table: Any, ancestors: Any = None) -> VerifyRows:
    requests = first.shape[0]  # a chip's share, where the requests are sharded
    index = jnp.arange(requests * s.rows)
    depth = jnp.tile(_chains(s.rows).sum(axis=1) - 1, requests)
    positions = None if ancestors is None else first[index // s.rows] + depth
    return VerifyRows(
        jnp.arange(requests) * s.rows, lengths, first, index // s.rows, table, s.rows, positions, ancestors
    )


def _chains(rows: int) -> np.ndarray:
    """Ancestors of a tree of eight chains under one root."""
    above = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        above[row] |= above[max(row - 8, 0)]
    return above


def _draw(s: Shape, shapes: dict[str, Any], seed: int) -> Sequence[Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    arrays = [jax.random.normal(key, *shapes[name]) for key, name in zip(keys, ("q", "k", "v", "pool"), strict=True)]
    full = jnp.full((s.requests,), s.context, jnp.int32), jnp.full((s.requests,), s.rows, jnp.int32)
    table = 1 + jnp.arange(np.prod(shapes["table"][0]), dtype=jnp.int32).reshape(shapes["table"][0])
    tree = []
    if s.mask == "tree":
        words = pack_bits(jnp.asarray(_chains(s.rows)))
        tree = [jnp.broadcast_to(words, (s.requests, *words.shape))]
    return [*arrays, *full, table, *tree]


def _vary(pages: int, operands: Sequence[Any], index: Any) -> Sequence[Any]:
    table = operands[6]
    return [*operands[:6], 1 + (table - 1 + index * table.size) % (pages - 1), *operands[7:]]


def _specs(s: Shape, count: int) -> tuple[Any, Any] | None:
    if s.kv % 4 == 0:
        heads = P(None, AXIS)
        return [heads, heads, heads, P(None, None, AXIS), *[P()] * (count - 4)], heads
    return ([P(AXIS)] * count, P(AXIS)) if s.requests % 4 == 0 and s.mask != "tree" else None


def _dense(q: Any, k: Any, v: Any, pool: Any, rows: VerifyRows, mask: str, window: int) -> Any:
    """Gathered pages through `jax.nn.dot_product_attention`, every own row at its slot of a dense buffer."""
    from pallas_kernels.verify_attention.rows import context_span, own_mask

    requests, count = rows.starts.shape[0], rows.max_rows
    pages = pool[rows.page_table].reshape(requests, -1, *pool.shape[2:])
    parts = [
        jnp.concatenate([pages[:, :, i::2], x.reshape(requests, count, *x.shape[1:])], axis=1)
        for i, x in enumerate((k, v))
    ]
    lowest, limit = context_span(rows, window)
    slot = jnp.arange(pages.shape[1])
    seen = (slot >= lowest[..., None]) & (slot < limit[..., None])
    seen = jnp.concatenate([seen, own_mask(rows, mask, window)], axis=-1)[:, None]
    out = jax.nn.dot_product_attention(q.reshape(requests, count, *q.shape[1:]), *parts, mask=seen)
    return out.reshape(q.shape)


def _torch(s: Shape, operands: Sequence[Any]) -> Callable[[], Any]:
    """Torch's attention over K and V that lie contiguous already: no pages to read, a bound rather than a peer."""
    torch = find_torch()
    q, k, v = (x.reshape(s.requests, s.rows, *x.shape[1:]).transpose(1, 2) for x in operands[:3])
    shape = (s.requests, s.kv, s.context, s.dim)
    context = [torch.randn(shape, dtype=q.dtype, device=q.device) for _ in range(2)]
    keys, values = (torch.cat([c, x], dim=2) for c, x in zip(context, (k, v), strict=True))
    own = {"causal": np.tril(np.ones((s.rows, s.rows), bool)), "full": np.ones((s.rows, s.rows), bool)}
    own_mask = own.get(s.mask, _chains(s.rows))
    seen = np.concatenate([np.ones((s.rows, s.context), bool), own_mask], axis=1)
    if s.window:
        place = s.context + np.arange(s.rows)[:, None] - np.arange(s.context + s.rows)
        seen &= np.abs(place) < s.window
    bias = torch.tensor(seen, device=q.device)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, keys, values, attn_mask=bias, enable_gqa=True)
