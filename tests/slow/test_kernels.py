"""`make test-slow-kernels`: random cases of every kernel against its reference or oracle, over few compiled shapes.

The kernels run in interpret mode, 200 cases each. `make test-slow-kernels-gpu` with JAX_PLATFORMS=cuda,cpu runs 2,000
cases of each GPU kernel on a machine that has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.kernels import assert_close
from tests.kernels import test_accept_commit as accept
from tests.kernels import test_context_kv as context
from tests.kernels import test_verify_attention as verify

SEED = 0
# requests, rows, K/V heads, group, head dimension, page, pages a request
VERIFY_SHAPES = [
    (3, 7, 2, 2, 64, 4, 6),
    (2, 17, 1, 4, 128, 16, 5),
    (4, 4, 2, 1, 64, 16, 3),
    (1, 35, 1, 3, 20, 8, 9),
    (2, 8, 3, 3, 64, 8, 5),
    (5, 1, 1, 8, 128, 16, 2),
    (1, 16, 2, 2, 256, 16, 4),
    (2, 11, 1, 1, 80, 4, 13),
]
ACCEPT_SHAPES = [(kind, vocab) for kind in accept.KINDS for vocab in (40, 128, 301, 2049, 5000)]


def verify_cases(name: str, count: int) -> Iterator[Callable[[], None]]:
    """Windows, masks as data, layouts with gaps, NaN or 1e30 wherever nobody may look."""
    for case in range(count):
        rng = np.random.default_rng((SEED, case))
        shape = VERIFY_SHAPES[case % len(VERIFY_SHAPES)]
        dtype = [np.float32, jnp.bfloat16][case // len(VERIFY_SHAPES) % 4 == 3]
        poison = [np.nan, 1e30][rng.integers(2)]
        given = {}
        if rng.random() < 0.1:
            given["first"] = np.zeros(shape[0], np.int64)
        if rng.random() < 0.05:
            given["lengths"] = np.zeros(shape[0], np.int64)
        arrays, layout = verify.draw((SEED, case), shape, dtype, poison, **given)
        kind = rng.integers(3)
        if kind:  # 0 keeps the drawn tree; 1 is causal, 2 full
            above = np.ones(layout["above"].shape, bool)
            layout["above"] = np.tril(above) if kind == 1 else above
            offsets = np.arange(layout["owned"].size) - layout["starts"][layout["requests"]]
            layout["positions"] = layout["first"][layout["requests"]] + np.maximum(offsets, 0)
        window, inner = (int(rng.choice([0, 0, 1, 2, 5, 16, 50])) for _ in range(2))

        def run(arrays=arrays, layout=layout, window=window, inner=inner) -> None:
            rows = verify.rows_of(layout, "tree")
            arguments = (arrays, rows, jnp.int32(window), jnp.int32(inner))
            out = verify.compiled(name, "tree")(*arguments)
            assert_close(out, verify.compiled("reference", "tree")(*arguments))
            assert not np.asarray(out, np.float32)[~layout["owned"]].any()

        yield run


def accept_cases(name: str, count: int) -> Iterator[Callable[[], None]]:
    """Every kind of acceptance, against the oracle, which counts what rounding may decide either way."""
    for case in range(count):
        kind, vocab = ACCEPT_SHAPES[case % len(ACCEPT_SHAPES)]
        yield lambda case=case, kind=kind, vocab=vocab: accept.check(name, accept.draw((SEED, case), kind, vocab), kind)


def context_cases(name: str, count: int) -> Iterator[Callable[[], None]]:
    """Both dtypes, with and without key norms."""
    shapes = list(context.SHAPES)
    for case in range(count):
        shape, rest = shapes[case % len(shapes)], case // len(shapes)
        dtype, normed = [np.float32, jnp.bfloat16][rest % 2], rest % 3 > 0

        def run(case=case, shape=shape, dtype=dtype, normed=normed) -> None:
            context.check(name, context.draw((SEED, case), shape, dtype, normed))

        yield run


KERNELS = {
    "verify_attention": (verify_cases, ("tpu", "gpu"), 2 * len(VERIFY_SHAPES)),
    "accept_commit": (accept_cases, ("tpu", "gpu"), len(ACCEPT_SHAPES)),
    "context_kv": (context_cases, ("tpu",), 4 * len(context.SHAPES)),
}


def _outcome(run: Callable[[], None]) -> str | None:
    """What is wrong, in one line."""
    try:
        run()
    except AssertionError as problem:
        return " ".join(str(problem).split())[:200]
    return None


def run_cases(kernel: str, name: str, count: int, record: Callable[[str, Any], None]) -> None:
    """All of them run; the first that fail are named."""
    make, _, shapes = KERNELS[kernel]
    assert shapes <= 60
    start = time.perf_counter()
    where = jax.default_backend() if name == jax.default_backend() else "interpret mode"
    # a GPU's compiler runs beside the cases; the interpreter's callbacks want one thread
    with ThreadPoolExecutor(1 if where == "interpret mode" else 12) as threads:
        outcomes = threads.map(_outcome, make(name, count))
        wrong = [f"case {case}: {why}" for case, why in enumerate(outcomes) if why]
    record(f"{kernel}_{name}_cases", count)
    record(f"{kernel}_{name}_where", where)
    record(f"{kernel}_{name}_compiled_shapes", shapes)
    record(f"{kernel}_{name}_wrong", len(wrong))
    record(f"{kernel}_{name}_seconds", round(time.perf_counter() - start, 1))
    assert not wrong, wrong[:5]


def _record(record_property: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    def record(key: str, value: Any) -> None:
        print(f"{key}: {value}", flush=True)
        record_property(key, value)

    record("seed", SEED)
    return record


@pytest.mark.slow("kernels", covers=("pallas_kernels",))
@pytest.mark.parametrize(
    ("kernel", "name"), [(kernel, name) for kernel, (_, names, _) in KERNELS.items() for name in names]
)
def test_B62_B64_random_cases(kernel: str, name: str, record_property: Callable[[str, Any], None]) -> None:
    run_cases(kernel, name, 200, _record(record_property))


@pytest.mark.slow("kernels-gpu", covers=("pallas_kernels",))
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kernel", [kernel for kernel, (_, names, _) in KERNELS.items() if "gpu" in names])
def test_B62_B64_random_cases_on_the_gpu(kernel: str, record_property: Callable[[str, Any], None]) -> None:
    device = jax.devices()[0]
    assert device.platform == "gpu", f"found {device.platform}, expected a GPU: run with JAX_PLATFORMS=cuda,cpu"
    record = _record(record_property)
    record("device", device.device_kind)
    run_cases(kernel, "gpu", 2000, record)
