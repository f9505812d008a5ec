"""The engine over a mesh of eight CPU devices says what the engine on one device says, token for token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.process import QUICK, run_on_devices, run_python

COVERS = ("jaxspec/parallel", "jaxspec/serving", "jaxspec/decoding", "jaxspec/models")


def run(method: str, rounds: str, *meshes: str, timeout: float = 280) -> list[dict[str, Any]]:
    done = run_python(
        "-m", "tests.parallel.same_tokens", method, rounds, *meshes, timeout=timeout, JAX_PLATFORMS="cpu",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1", JAX_DEFAULT_MATMUL_PRECISION="highest",
        XLA_FLAGS=f"--xla_force_host_platform_device_count=8 {QUICK}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["mesh"] for one in found] == list(meshes)
    return found


def check(method: str, found: list[dict[str, Any]]) -> None:
    for one in found:
        data, tensor = (int(size) for size in one["mesh"].split("x"))
        assert all(one["same"]) and one["tokens"] > 100, one
        assert one["accepted"] > 5 or method not in ("small", "grammar"), one
        assert (one["compilations"], one["held_pages"]) == (0, 0), one
        kv = 2 // tensor if 2 % tensor == 0 else 2  # K/V heads of a shard: all of them where they do not divide
        assert one["q"] == [32 // tensor, 32] and one["k"] == [8 * kv, 32], one
        assert one["pool"][0] == 1 and one["pool"][3] == 2 * kv, one
        assert one["anywhere"] < one["pool_bytes"] / 2, one  # no cache is sent around
        # words on whether a branch is taken and on rows: nothing of a cache, an activation or a logit
        assert one["across_data"] <= 512 * (data > 1), one


SAMPLING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxspec.decoding.logprobs import logprobs
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.draws import inverse_cdf
from jaxspec.errors import InvariantError
from jaxspec.parallel.mesh import check_copies, placement

def draw(logits, sampling, u):
    probs = sampling.probabilities(logits)
    tokens = inverse_cdf(probs, u)
    return jnp.argmax(logits, -1), probs, tokens, logprobs(logits[:, 0], tokens[:, 0], 3)

mesh = placement(1, 8).mesh
for rows in (8, 6):  # 6 rows are not shared out over 8 devices
    rng = np.random.default_rng(rows)
    logits = rng.normal(size=(rows, 3, 1024)).astype(np.float32)
    # ties for the best, on several shards, and for the k-th
    logits[:, 0] = np.round(logits[:, 0]); logits[:, 1, [1000, 700, 130]] = 9.0; logits[:, 1, [999, 5, 6]] = 8.0
    t, k, p = np.linspace(0, 2, rows), np.arange(rows), np.linspace(0.3, 1, rows)
    sampling = SlotSampling(*(jnp.asarray(x, d) for x, d in (
        (t, jnp.float32), (k, jnp.int32), (p, jnp.float32), (np.zeros(rows), jnp.float32))))
    u = jnp.asarray(rng.random((rows, 3)), jnp.float32)
    alone = jax.jit(draw)(jnp.asarray(logits), sampling, u)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        split = jax.device_put(logits, NamedSharding(mesh, P(None, None, "tensor")))
        found = jax.jit(draw)(split, *jax.device_put((sampling, u), NamedSharding(mesh, P())))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype == np.float32:  # a sum over another number of rows is vectorised otherwise
            assert np.abs(one - other).max() < 1e-6 and np.array_equal(one == 0, other == 0), rows
        else:
            assert np.array_equal(one, other), (rows, one, other)
    assert (np.asarray(alone[0])[:, 1] == 130).all()

where = NamedSharding(mesh, P("data"))
copies = [jax.device_put(jnp.full((1, 2), value), one) for value, one in zip([7] * 7 + [8], mesh.devices.flat)]
check_copies(jax.make_array_from_single_device_arrays((1, 2), where, [
    jax.device_put(copies[0], one) for one in mesh.devices.flat]), "tokens")
try:
    check_copies(jax.make_array_from_single_device_arrays((1, 2), where, copies), "tokens")
except InvariantError as error:
    print("SEEN", error)
"""


@pytest.mark.ci
def test_ids_sampled_on_a_mesh_are_those_of_one_device() -> None:
    said = run_on_devices(SAMPLING, 8)
    assert "SEEN tokens of data shard 0: values that differ, expected one decision on all its tensor shards" in said


@pytest.mark.ci
@pytest.mark.parametrize(("method", "rounds", "mesh"), [("small", "short", "2x4")])
def test_a_mesh_says_what_one_device_says(method: str, rounds: str, mesh: str) -> None:
    check(method, run(method, rounds, mesh))


@pytest.mark.slow("parallel", covers=COVERS)
@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("none", "full"),
        *((method, budget) for method in ("dflash", "dspark", "small") for budget in ("full", "budget")),
    ],
)
def test_every_mesh_says_what_one_device_says(method: str, budget: str, record_property: Any) -> None:
    found = run(method, budget, "1x2", "1x4", "2x1", "4x1", "2x2", "2x4", "4x2", "8x1", timeout=1500)
    for one in found:
        record_property(f"{method} {budget} {one['mesh']}", {"requests": len(one["same"]), "tokens": one["tokens"]})
    check(method, found)


@pytest.mark.slow("parallel", covers=COVERS)
def test_masks_reach_the_shard_whose_request_asked(record_property: Any) -> None:
    found = run("grammar", "budget", "2x2", "4x1", timeout=1500)
    record_property("grammars", [one["mesh"] for one in found])
    check("grammar", found)
