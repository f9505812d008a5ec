"""What the suites of the kernels share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def ahead_of_time() -> list[Any]:
    """Parameters: every chip, in `make test-slow-kernels-aot`. `make test` compiles whole steps and rounds for one."""
    later = pytest.mark.slow("kernels-aot", covers=("pallas_kernels",))
    return [pytest.param(chip, marks=later) for chip in CHIPS]


def interpreted(name: str) -> dict[str, Any]:
    """Options that run an implementation without its accelerator; a TPU's memory starts as NaN."""
    if name.startswith("tpu"):
        return {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    return {"interpret": True} if name == "gpu" and jax.default_backend() != "gpu" else {}


def assert_close(got: Any, expected: Any) -> None:
    """Relative to the largest value, by the dtype of `got`; NaN anywhere fails."""
    tolerance = TOLERANCE[str(got.dtype)]
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(a).all(), "not finite"
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max(initial=0.0))))
