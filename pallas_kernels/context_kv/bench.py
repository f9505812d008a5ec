"""Shapes of the context projection: DFlash drafters of Qwen3-4B, Qwen3-8B (5 layers, 5 taps) and SmolLM2-135M."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.bench import AXIS, Case, find_torch
from pallas_kernels.context_kv.api import IMPLEMENTATIONS, context_kv
from pallas_kernels.context_kv.rows import ContextRows, LayerWeights

PAGE, REQUESTS, PER_REQUEST = 16, 8, 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """M rows of `taps` features of width H."""

    name: str
    rows: int
    hidden: int
    kv: int = 8
    dim: int = 128
    taps: int = 5
    layers: int = 5


SHAPES = [
    Shape("qwen3-4b", 128, 2560),
    Shape("qwen3-4b", 512, 2560),
    Shape("qwen3-8b", 128, 4096),
    Shape("smollm2", 64, 576, kv=3, dim=64),
]


def cases(platform: str) -> Iterable[Case]:
    """Every shape; on a GPU, where only the reference runs, also one request's round."""
    for s in SHAPES + ([Shape("qwen3-4b", 16, 2560)] if platform == "gpu" else []):
        names = [name for name in IMPLEMENTATIONS if name.startswith("tpu") == (platform == "tpu")]
        operands = _operands(s)
        weights = s.hidden * (s.hidden * s.taps + s.layers * 2 * s.kv * s.dim)
        moved = weights + s.rows * (s.hidden * s.taps + s.layers * 2 * s.kv * s.dim)
        rows = P(AXIS)
        specs = [rows, P(), P(), rows, rows, rows, rows, rows, rows, *[P()] * 3 * s.layers, *[rows] * s.layers]
        yield Case(
            f"{s.name}-{s.rows}",
            {name: functools.partial(_run, s, name) for name in names},
            operands,
            functools.partial(_draw, s),
            flops=2.0 * s.rows * weights,
            bytes=2.0 * moved,
            judged=lambda out: [pool[1:] for pool in out],  # page 0 is trash
            feedback={9 + 3 * s.layers + i: i for i in range(s.layers)},
            torch_peers={"torch-products": functools.partial(_torch, s)},
            specs=(specs, rows),
        )


def _operands(s: Shape) -> list[Any]:
    leaf, i32, f32, bf16 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32, jnp.bfloat16
    return [
        leaf((s.rows, s.taps * s.hidden), bf16),
        leaf((s.hidden, s.taps * s.hidden), bf16),
        leaf((s.hidden,), bf16),
        *[leaf((s.rows, s.dim // 2), f32)] * 2,
        leaf((s.rows,), bool),
        *[leaf((s.rows,), i32)] * 2,
        leaf((REQUESTS, PER_REQUEST), i32),
        *[leaf((s.kv * s.dim, s.hidden), bf16)] * (2 * s.layers),
        *[leaf((s.dim,), bf16)] * s.layers,
        *[leaf((4 + REQUESTS * PER_REQUEST, PAGE, 2 * s.kv, s.dim), bf16)] * s.layers,
    ]


def _run(s: Shape, name: str, features, fc, norm, cos, sin, valid, requests, slots, table, *rest):
    count = s.layers
    layers = [LayerWeights(rest[2 * i], rest[2 * i + 1], rest[2 * count + i]) for i in range(count)]
    rows = ContextRows(valid, requests, slots, table)
    return context_kv(features, fc, norm, layers, cos, sin, rest[3 * count :], rows, implementation=name)


def _draw(s: Shape, seed: int) -> Sequence[Any]:
    shapes = _operands(s)
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def random(index: int) -> Any:
        x = shapes[index]
        scale = x.shape[-1] ** -0.5 if 9 <= index < 9 + 2 * s.layers or index == 1 else 1.0
        return (scale * jax.random.normal(keys[index], x.shape)).astype(x.dtype)

    angles = jax.random.uniform(keys[3], (s.rows, s.dim // 2), maxval=100.0)
    index = jnp.arange(s.rows)
    places = [jnp.ones(s.rows, bool), index % REQUESTS, index // REQUESTS]
    table = 1 + jnp.arange(REQUESTS * PER_REQUEST).reshape(REQUESTS, PER_REQUEST)
    return [
        *map(random, range(3)), jnp.cos(angles), jnp.sin(angles), *places, table,
        *map(random, range(9, len(shapes))),
    ]  # fmt: skip


def _torch(s: Shape, operands: Sequence[Any]) -> Callable[[], Any]:
    """The products and norms alone, without rotation and paged write."""
    functional = find_torch().nn.functional
    linear, rms_norm = functional.linear, functional.rms_norm
    features, fc, norm = operands[:3]
    weights, norms = operands[9 : 9 + 2 * s.layers], operands[9 + 2 * s.layers : 9 + 3 * s.layers]

    def run() -> list[Any]:
        context = rms_norm(linear(features, fc), norm.shape, norm, 1e-6)
        out = []
        for i in range(s.layers):
            keys = linear(context, weights[2 * i]).reshape(s.rows, s.kv, s.dim)
            out += [rms_norm(keys, norms[i].shape, norms[i], 1e-6), linear(context, weights[2 * i + 1])]
        return out

    return run
