"""Shapes of accept + commit: V of Qwen3 and SmolLM2, drafts of 7 and 16, the drafter's five layers of pools."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.accept_commit.api import accept_commit
from pallas_kernels.accept_commit.rows import CommitRows
from pallas_kernels.bench import AXIS, Case

PAGE, PER_REQUEST = 16, 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """R requests of m drafts; kind greedy, point (q all on the draft) or dense."""

    name: str
    requests: int
    drafts: int
    kind: str
    vocab: int = 151936
    kv: int = 8
    dim: int = 128
    layers: int = 5

    @property
    def rows(self) -> int:
        """The bucket: a multiple of 64, so that four chips share it in tiles."""
        return -(-self.requests * (self.drafts + 1) // 64) * 64


SHAPES = [
    Shape("qwen3", 8, 15, "greedy"),
    Shape("qwen3", 8, 15, "point"),
    Shape("qwen3", 8, 7, "dense"),
    Shape("smollm2", 8, 7, "dense", vocab=49152, kv=3, dim=64),
]


def cases(platform: str) -> Iterable[Case]:
    """Every shape; on a GPU also one request alone."""
    shapes = SHAPES + ([dataclasses.replace(s, requests=1) for s in SHAPES[:3]] if platform == "gpu" else [])
    for s in shapes:
        names = ["reference", "gpu"] if platform == "gpu" else ["tpu"]
        rows = s.requests * (s.drafts + 1)
        values = s.layers * 2 * rows * 2 * s.kv * s.dim * 2
        # greedy reads all rows; a draw reads one row a request, of p and, where dense, of q
        read = (rows if s.kind == "greedy" else s.requests * (1 + (s.kind == "dense"))) * s.vocab * 4
        yield Case(
            f"{s.name}-{s.requests}x{s.drafts}-{s.kind}",
            {name: functools.partial(_run, s, name) for name in names},
            _operands(s),
            functools.partial(_draw, s),
            flops=0.0,
            bytes=float(read + values),
            judged=lambda out: (out[0], out[1], [pool[1:] for pool in out[2:]]),  # page 0 is trash
            feedback={9 + i: 2 + i for i in range(s.layers)},
            specs=([P(AXIS)] * len(_operands(s)), P(AXIS)) if s.requests % 4 == 0 else None,
        )


def _operands(s: Shape) -> list[Any]:
    leaf, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
    requests, m = s.requests, s.drafts
    pages = 4 + requests * PER_REQUEST
    return [
        leaf((s.rows, s.vocab), f32),
        leaf((requests, m), i32),
        *[leaf((requests,), i32)] * 3,
        leaf((requests,), bool),
        leaf((requests, PER_REQUEST), i32),
        leaf((requests, m), f32),
        leaf((requests,), f32),
        *[leaf((pages, PAGE, 2 * s.kv, s.dim), jnp.bfloat16)] * s.layers,
        *[leaf((s.rows, 2 * s.kv, s.dim), jnp.bfloat16)] * s.layers,
        *([leaf((requests, m, s.vocab), f32)] if s.kind == "dense" else []),
    ]


def _run(s: Shape, name: str, target, drafts, starts, lengths, first, live, table, u, u_last, *rest):
    rows = CommitRows(starts, lengths, live, first, table)
    q = rest[2 * s.layers :]
    accepted, token, pools = accept_commit(
        target, drafts, rows, rest[: s.layers], rest[s.layers : 2 * s.layers],
        "greedy" if s.kind == "greedy" else "ratio",
        q[0] if q else None, u, u_last, implementation=name,
    )  # fmt: skip
    return accepted, token, *pools


def _draw(s: Shape, seed: int) -> Sequence[Any]:
    """Half of the drafts stand; every request is at a slot of its own."""
    keys = jax.random.split(jax.random.key(seed), 6)
    requests, m = s.requests, s.drafts
    target = 3 * jax.random.normal(keys[0], (s.rows, s.vocab))
    drafts = jax.random.randint(keys[1], (requests, m), 0, s.vocab)
    starts = jnp.arange(requests) * (m + 1)
    best = jnp.argmax(target, axis=-1)[starts[:, None] + jnp.arange(m)]
    drafts = jnp.where(jnp.arange(m) < m // 2, best, drafts).astype(jnp.int32)
    q = []
    if s.kind != "greedy":
        target = jax.nn.softmax(target)
        rows = target[starts[:, None] + jnp.arange(m)]
        q = [jnp.roll(rows, 1, axis=1)] if s.kind == "dense" else []
    shapes = _operands(s)[9 : 9 + 2 * s.layers]
    arrays = [
        jax.random.normal(key, x.shape, x.dtype) for key, x in zip(jax.random.split(keys[2], 10), shapes, strict=True)
    ]
    full = jnp.full((requests,), m, jnp.int32)
    table = 1 + jnp.arange(requests * PER_REQUEST).reshape(requests, -1)
    first = 5 + jnp.arange(requests)
    live = jnp.ones(requests, bool)
    u, u_last = jax.random.uniform(keys[3], (requests, m)), jax.random.uniform(keys[4], (requests,))
    return [target, drafts, starts, full, first, live, table, u, u_last, *arrays, *q]
