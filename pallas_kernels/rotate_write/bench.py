"""Shapes of the joined norm, rotation and page write: a decoding row and a verified block at Qwen3's sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import Case
from pallas_kernels.rotate_write.api import rotate_write

PAGE, PAGES, KV, DIM, EPS = 16, 129, 8, 128, 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """M rows of a target with so many query heads."""

    name: str
    queries: int
    rows: int


SHAPES = [Shape("qwen3-4b", 32, 1), Shape("qwen3-4b", 32, 16), Shape("qwen3-4b", 32, 128), Shape("qwen3-0.6b", 16, 1)]


def cases(platform: str) -> Iterable[Case]:
    """Every shape, on a GPU; there is no kernel for a TPU, where XLA fuses the plain form."""
    for s in SHAPES if platform == "gpu" else ():
        moved = s.rows * (2 * (s.queries + 2 * KV) + 2 * KV) * DIM * 2  # read, and written; K and V twice
        yield Case(
            f"{s.name}-{s.rows}",
            {name: functools.partial(_run, name) for name in ("reference", "gpu")},
            jax.eval_shape(functools.partial(_draw, s), 0),
            functools.partial(_draw, s),
            flops=10.0 * s.rows * (s.queries + KV) * DIM,
            bytes=moved,
            feedback={6: 3},
            judged=lambda outputs: (*outputs[:3], outputs[3][1:]),  # the trash page holds anything
        )


def _run(name: str, *operands: Any) -> Any:
    heads, norm, cos, sin, page, offset, pool = operands
    return rotate_write(heads, norm, cos, sin, page, offset, pool, EPS, name)


def _draw(s: Shape, seed: int) -> Sequence[Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = jax.random.normal(keys[0], (s.rows, s.queries + 2 * KV, DIM), jnp.bfloat16)
    norm = 1 + 0.1 * jax.random.normal(keys[1], (s.queries + KV, DIM), jnp.bfloat16)
    angles = jax.random.uniform(keys[2], (s.rows, DIM // 2), maxval=6.0)
    index = jnp.arange(s.rows, dtype=jnp.int32)
    pool = jax.random.normal(keys[3], (PAGES, PAGE, 2 * KV, DIM), jnp.bfloat16)
    return heads, norm, jnp.cos(angles), jnp.sin(angles), 1 + index // PAGE, index % PAGE, pool
