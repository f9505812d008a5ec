"""Random cases of anchor attention against the reference: `make test-slow-anchor-attention` runs the TPU kernels in
interpret mode, `make test-slow-anchor-attention-gpu` the GPU kernels on a GPU (JAX_PLATFORMS=cuda,cpu).

Context rows behind the last visible one hold NaN. Wrong once is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.anchor_attention import reference
from pallas_kernels.anchor_attention.gpu import GpuKernels
from pallas_kernels.anchor_attention.ranged import Kernels, Keys, ranged_attention
from pallas_kernels.anchor_attention.ranges import block_ranges
from pallas_kernels.anchor_attention.tpu import TpuKernels, TpuTiles

SEED = 0
COVERS = ("pallas_kernels/anchor_attention",)


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    count: int
    block: int
    kv: int
    group: int
    dim: int
    dtype: str


def draw_shape(rng: np.random.Generator, dtype: str, longest: int, most: int, dims: list[int]) -> Shape:
    group = int(rng.choice([1, 2, 3, 4]))
    return Shape(
        int(rng.integers(1, 3)), int(rng.integers(2, longest)), int(rng.integers(1, most)),
        int(rng.choice([1, 2, 5, 7, 8, 10, 16])), int(rng.integers(1, 3)), group, int(rng.choice(dims)), dtype,
    )  # fmt: skip


def draw(shape: Shape, rng: np.random.Generator) -> tuple[Any, ...]:
    """Operands, masks and the gradient of the output. Now and then a corner: equal anchors, the ends, all dropped."""
    s = shape
    anchors = np.sort(rng.integers(0, s.context, (s.batch, s.count)), axis=1)
    corner = rng.integers(8)
    if corner == 0:
        anchors[:] = anchors[:, :1]
    elif corner == 1:
        anchors[:, 0], anchors[:, -1] = 0, s.context - 1
    elif corner == 2:
        anchors = rng.permutation(anchors, axis=1)
    keep = rng.random((s.batch, s.count)) < (0.0 if corner == 3 else rng.choice([0.5, 0.9, 1.0]))
    window = int(rng.choice([0, 0, 1, rng.integers(1, s.context + 1)]))
    causal, inner = bool(rng.integers(2)), int(rng.choice([0, window, rng.integers(1, s.block + 2)]))
    starts = np.minimum(rng.integers(0, s.context, (s.batch, s.count)), anchors) * int(rng.integers(2))
    rows, heads = (s.batch, s.count, s.block), s.kv * s.group
    context = (s.batch, s.context, s.kv, s.dim)
    shapes = [(*rows, heads, s.dim), context, context, *[(*rows, s.kv, s.dim)] * 2, (*rows, heads, s.dim)]
    arrays = [rng.standard_normal(x, np.float32) for x in shapes]
    return arrays, anchors.astype(np.int32), keep, window, causal, inner, starts.astype(np.int32)


def compare(kernels: Kernels, dtype: str, arrays: Any, anchors: Any, keep: Any, *masks: Any) -> jax.Array:
    """Largest error of output and gradients, at the scale of each but at least the operands'; NaN where one is NaN."""
    *arrays, d_out = (x.astype(dtype) for x in arrays)
    batch, count, block = arrays[0].shape[:3]
    context = arrays[1].shape[1]
    rows = lambda x: x.reshape(batch, count * block, *x.shape[3:])  # noqa: E731

    def ours(q: Any, k: Any, v: Any, block_k: Any, block_v: Any) -> Any:
        ranges = block_ranges(anchors, keep, block, context, *masks)
        unwritten = (jnp.arange(context) >= jnp.max(ranges.hi, axis=1)[:, None])[:, :, None, None]
        k, v = (jnp.where(unwritten, jnp.nan, x) for x in (k, v))
        keys = Keys(k, v, rows(block_k), rows(block_v))
        return ranged_attention(kernels, rows(q), keys, ranges)[0].reshape(q.shape)

    def plain(*xs: Any) -> Any:
        return reference.anchor_attention(*xs, anchors, keep, *masks)

    def both(function: Callable[..., Any], *xs: Any, gradient: Any) -> Any:
        out, back = jax.vjp(function, *xs)
        return out, *back(gradient)

    wide = [x.astype(jnp.float32) for x in (*arrays, d_out)]
    got = both(ours, *arrays, gradient=d_out)
    expected = both(plain, *wide[:5], gradient=wide[5])
    errors = [
        jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1.0)
        for a, b in zip(got, expected, strict=True)
    ]
    return jnp.stack(errors)


def run(jobs: list[tuple[Shape, Kernels]], cases: int, workers: int, record: Callable[[str, Any], None]) -> None:
    """`cases` cases of each shape; the programs are compiled side by side."""
    rng = np.random.default_rng(SEED)
    record("seed", SEED)
    samples = [draw(shape, rng) for shape, _ in jobs]

    def build(job: tuple[tuple[Shape, Kernels], Any]) -> Any:
        (shape, kernels), sample = job
        with jax.default_matmul_precision("highest"):
            return jax.jit(functools.partial(compare, kernels, shape.dtype)).lower(*sample).compile()

    with ThreadPoolExecutor(workers) as pool:
        programs = list(pool.map(build, zip(jobs, samples, strict=True)))
    worst: dict[str, float] = {}
    for (shape, _), program in zip(jobs, programs, strict=True):
        limit = 1e-5 if shape.dtype == "float32" else 2e-2
        for case in range(cases):
            errors = np.asarray(program(*draw(shape, rng)))
            assert (errors <= limit).all(), f"{shape}, case {case}: errors {errors}, allowed {limit}"
            worst[shape.dtype] = max(worst.get(shape.dtype, 0.0), float(errors.max()))
    record("shapes", len(jobs))
    record("cases", len(jobs) * cases)
    for dtype, error in worst.items():
        record(f"worst_{dtype}", error)


def shapes(count: int, rng: np.random.Generator, *limits: Any) -> list[Shape]:
    return [draw_shape(rng, *limits) for _ in range(count)]


@pytest.mark.slow("anchor-attention", covers=COVERS)
def test_B65_random_cases_in_tpu_interpret_mode(record_property: Callable[[str, Any], None]) -> None:
    from jax.experimental.pallas import tpu as pltpu

    rng = np.random.default_rng(SEED)
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    found = [s for d in ("float32", "bfloat16") for s in shapes(5, rng, d, 513, 17, [64, 80, 128, 256])]
    jobs: list[tuple[Shape, Kernels]] = [
        (shape, TpuKernels(TpuTiles(128, int(rng.choice([128, 256])), 128), interpret)) for shape in found
    ]
    run(jobs, 20, 1, record_property)


@pytest.mark.slow("anchor-attention-gpu", covers=COVERS)
def test_B65_random_cases_on_the_gpu(record_property: Callable[[str, Any], None]) -> None:
    device = jax.devices()[0]
    assert device.platform == "gpu", f"found {device.platform}, expected a GPU: run with JAX_PLATFORMS=cuda,cpu"
    record_property("device", device.device_kind)
    rng = np.random.default_rng(SEED)
    run([(s, GpuKernels()) for s in shapes(20, rng, "bfloat16", 1500, 80, [64, 80, 128])], 100, 16, record_property)
