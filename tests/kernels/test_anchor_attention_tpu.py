"""Anchor attention compiles for TPUs that are not there: every chip, one of them and four under shard_map."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.kernels import ahead_of_time
from tests.helpers.process import run_python

pytestmark = [
    pytest.mark.ci,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; it compiles for a TPU without one"
    ),
]

SHAPES = [
    *(f"qwen3-S4096-N512-B{block}" for block in (7, 8, 10, 16)),
    "qwen3-S16384-N512-B16",
    "smollm2-S4096-N512-B16",
]
SHARDED = ["qwen3-S4096-N512-B16", "smollm2-S4096-N512-B16"]


@pytest.mark.parametrize("topology", ahead_of_time())
def test_every_shape_compiles_with_its_gradients_on_one_chip_and_sharded_over_four(topology):
    command = ("-m", "pallas_kernels.bench", "--kernel", "anchor_attention", "--tpu", topology)
    done = run_python(*command, timeout=880, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    chip = topology.split(":")[0]
    lines = [line.split(" tpu_custom_call=") for line in done.stdout.splitlines() if line.startswith("OK ")]
    heads = [f"OK anchor_attention {shape}-forward-backward {chip}" for shape in SHAPES]
    heads += [f"OK anchor_attention {shape}-forward-backward x4 {chip}" for shape in SHARDED]
    assert sorted(head for head, _ in lines) == sorted(heads), done.stdout
    # forward, dQ, dK and dV of the context, dK and dV of the blocks
    assert all(rest.startswith("4 ") for _, rest in lines), done.stdout


MEMORY = """
import re
import jax
import numpy as np
from jax.sharding import Mesh
from pallas_kernels import bench
from pallas_kernels.anchor_attention.bench import Shape, _case

mesh = Mesh(np.array(bench.tpu_devices("v5e:2x2")[:1]), (bench.AXIS,))
for context in (4096, 16384):
    case = _case(Shape(context), "tpu")
    compiled = bench.compile_for(mesh, case.implementations["tpu"], case, sharded=False)
    shapes = re.findall(r"[a-z0-9]+\\[([0-9,]+)\\]", compiled.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
    print(context, compiled.memory_analysis().temp_size_in_bytes, int(max(sizes)))
"""


def test_memory_grows_no_faster_than_the_context_and_no_pair_array_exists():
    done = run_python("-c", MEMORY, timeout=280, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    (_, short, _), (context, long, largest) = (map(int, line.split()) for line in done.stdout.splitlines()[-2:])
    assert 0 < long <= 4.2 * short
    assert largest < 512 * 16 * context
