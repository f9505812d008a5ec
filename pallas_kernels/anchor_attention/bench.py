"""Shapes of anchor attention: Qwen3 (4B and 8B have the same heads) and SmolLM2-135M, bfloat16, random anchors."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels.anchor_attention import api, reference
from pallas_kernels.bench import AXIS, Case, find_torch

CHUNK = 64  # blocks that the reference scores at once


@dataclasses.dataclass(frozen=True)
class Shape:
    """One training batch's attention; `gradients` adds the backward pass."""

    context: int = 4096
    block: int = 16
    gradients: bool = True
    name: str = "qwen3"
    count: int = 512
    heads: int = 32
    kv: int = 8
    dim: int = 128
    batch: int = 1

    @property
    def label(self) -> str:
        """Name, context, blocks, passes."""
        passes = "forward-backward" if self.gradients else "forward"
        return f"{self.name}-S{self.context}-N{self.count}-B{self.block}-{passes}"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """q, context K and V, block K and V."""
        rows = (self.batch, self.count, self.block)
        context = (self.batch, self.context, self.kv, self.dim)
        return [(*rows, self.heads, self.dim), context, context, *[(*rows, self.kv, self.dim)] * 2]


def _smollm2(batch: int) -> Shape:
    return Shape(name="smollm2", heads=9, kv=3, dim=64, batch=batch)


TPU_SHAPES = [*(Shape(block=block) for block in (7, 8, 10, 16)), Shape(16384), _smollm2(4)]
GPU_SHAPES = [
    Shape(context, block, gradients)
    for context, block in ((4096, 16), (16384, 16), (4096, 7))
    for gradients in (False, True)
]


def cases(platform: str) -> Iterable[Case]:
    """Every shape of the platform."""
    return (_case(shape, platform) for shape in (GPU_SHAPES if platform == "gpu" else TPU_SHAPES))


def _case(s: Shape, platform: str) -> Case:
    bf16 = jnp.bfloat16
    operands = [jax.ShapeDtypeStruct(shape, bf16) for shape in s.shapes]
    operands += [jax.ShapeDtypeStruct((s.batch, s.count), dtype) for dtype in (jnp.int32, jnp.bool_)]
    operands += [operands[0]] if s.gradients else []
    pairs = s.batch * s.heads * s.block * (int(_anchors(s, 0).sum()) / s.batch + s.count * s.block)
    kernel = functools.partial(api.anchor_attention, implementation=platform)
    implementations: dict[str, Callable[..., Any]] = {}
    if platform == "gpu":
        implementations["reference"] = functools.partial(_run, s, _chunked_reference)
    implementations[platform] = functools.partial(_run, s, kernel)
    if platform == "gpu" and s.context <= 4096:  # beyond, the scores and their gradients do not fit
        implementations["dot_product_attention"] = functools.partial(_run, s, _dense)
    size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in operands)
    written = int(np.prod(s.shapes[0])) + sum(int(np.prod(x)) for x in s.shapes if s.gradients)
    return Case(
        s.label,
        implementations,
        operands,
        functools.partial(_draw, s),
        flops=(14.0 if s.gradients else 4.0) * s.dim * pairs,
        bytes=float(size + 2 * written),
        torch_peers={"torch-flex_attention-compiled": functools.partial(_torch, s)},
        specs=_specs(s, len(operands)) if (s.context, s.block) == (4096, 16) else None,
    )


def _anchors(s: Shape, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = [np.sort(rng.choice(s.context - 1, s.count, replace=False)) for _ in range(s.batch)]
    return np.stack(drawn).astype(np.int32)


def _draw(s: Shape, seed: int) -> Sequence[Any]:
    shapes = [*s.shapes, s.shapes[0]]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    *arrays, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    masks = [jnp.asarray(_anchors(s, seed)), jnp.ones((s.batch, s.count), bool)]
    return [*arrays, *masks, *([d_out] if s.gradients else [])]


def _run(s: Shape, attend: Callable[..., Array], *operands: Any) -> Any:
    """The output, and with a gradient of it also those of q, K and V."""
    arrays, masks = operands[:5], operands[5:7]
    if not s.gradients:
        return attend(*arrays, *masks)
    out, back = jax.vjp(lambda *xs: attend(*xs, *masks), *arrays)
    return out, *back(operands[7])


def _chunked_reference(
    q: Array, k: Array, v: Array, block_k: Array, block_v: Array, anchors: Array, keep: Array
) -> Any:
    """The reference over CHUNK blocks at a time, in float32: its scores of all blocks would not fit."""
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0)  # noqa: E731
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731

    @jax.checkpoint
    def one(xs: Any) -> Array:
        q, block_k, block_v, anchors, keep = xs
        keys = wide(k), wide(v), wide(block_k), wide(block_v)
        return reference.anchor_attention(wide(q), *keys, anchors=anchors, keep=keep).astype(q.dtype)

    out = jax.lax.map(one, tuple(map(split, (q, block_k, block_v, anchors, keep))))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _dense(q: Array, k: Array, v: Array, block_k: Array, block_v: Array, anchors: Array, keep: Array) -> Any:
    """One dense mask over the context and all blocks."""
    batch, count, block = q.shape[:3]
    rows = lambda x: x.reshape(batch, count * block, *x.shape[3:])  # noqa: E731
    keys, values = (jnp.concatenate(pair, axis=1) for pair in ((k, rows(block_k)), (v, rows(block_v))))
    far = reference.context_mask(anchors, keep, block, k.shape[1], 0).reshape(batch, count * block, -1)
    owner = jnp.arange(count * block) // block
    near = jnp.broadcast_to(owner[:, None] == owner, (batch, count * block, count * block))
    mask = jnp.concatenate([far, near], axis=-1)[:, None]
    return jax.nn.dot_product_attention(rows(q), keys, values, mask=mask).reshape(q.shape)


def _specs(s: Shape, count: int) -> tuple[Any, Any]:
    outputs = 6 if s.gradients else 1
    if s.kv % 4:
        return [P(AXIS)] * count, (P(AXIS),) * outputs if s.gradients else P(AXIS)
    rows, context = P(None, None, None, AXIS), P(None, None, AXIS)
    arrays = [rows, context, context, rows, rows]
    inputs = [*arrays, P(), P(), *([rows] if s.gradients else [])]
    return inputs, (rows, *arrays) if s.gradients else rows


def _torch(s: Shape, operands: Sequence[Any]) -> Callable[[], Any]:
    """Keys concatenated and the block mask built beforehand: neither is timed."""
    torch = find_torch()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    rows = lambda x: x.reshape(s.batch, s.count * s.block, *x.shape[3:])  # noqa: E731
    heads = lambda x: x.transpose(1, 2).contiguous().requires_grad_(s.gradients)  # noqa: E731
    q = heads(rows(operands[0]))
    k, v = (heads(torch.cat([operands[i], rows(operands[i + 2])], dim=1)) for i in (1, 2))
    anchors = operands[5]

    def mask(batch: Any, head: Any, row: Any, key: Any) -> Any:
        far = (key < s.context) & (key < anchors[batch, row // s.block])
        return far | ((key >= s.context) & ((key - s.context) // s.block == row // s.block))

    torch._inductor.config.compile_threads = 1  # no pool of processes beside jax's threads
    blocks = flex.create_block_mask(mask, s.batch, None, q.shape[2], k.shape[2], device=q.device)
    attend = torch.compile(flex.flex_attention, dynamic=False)
    forward = lambda: attend(q, k, v, block_mask=blocks, enable_gqa=True)  # noqa: E731
    if not s.gradients:
        return forward
    d_out = heads(rows(operands[7])).detach()

    def both() -> None:
        q.grad = k.grad = v.grad = None
        forward().backward(d_out)

    return both
