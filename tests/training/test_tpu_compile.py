"""The training step compiles for a TPU that is not there."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.process import run_python

CODE = """
import dataclasses
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxspec.training.state import Placement
from jaxspec.training.step import compile_step
from tests.training.test_step import make_batch, make_spec, make_world
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
for method, count in (("dflash", 1), ("dspark", 4)):
    spec = dataclasses.replace(make_spec(method), dtype=jnp.bfloat16)
    state, frozen = jax.eval_shape(lambda: make_world(spec))
    step = compile_step(spec, state, frozen, make_batch(), Placement.of(chips[:count]))
    print(method, count, step.memory_analysis().temp_size_in_bytes > 0)
"""


@pytest.mark.ci
def test_step_compiles_ahead_of_time_for_v5e():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, and it is what compiles for a TPU")
    done = run_python(
        "-c", CODE, timeout=280, TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["dflash", "1", "True", "dspark", "4", "True"]
