"""A run over a mesh: the same numbers however it is split, and the split that was asked for."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.config import TrainMeshSection
from jaxspec.errors import ConfigError
from jaxspec.parallel.training import TrainingRules
from jaxspec.training.state import Placement, choose
from tests.helpers.process import run_on_devices

CODE = """
import jax, numpy as np
from pathlib import Path
from tempfile import mkdtemp
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.state import Placement, abstract
from jaxspec.training.step import compile_step
from tests.training.test_step import make_batch, make_spec, make_world
spec = make_spec(METHOD)
batch = make_batch(rows=8)
batch["loss_mask"][0, 0, 2:] = False  # unequal supervision on the shards
rate = float(spec.learning_rate(np.int32(3)))
results, split = [], []
for data, fsdp, tensor in meshes:
    placement = Placement.of(jax.devices()[: data * fsdp * tensor], fsdp, tensor, small=0)
    state, frozen = (placement.put(tree) for tree in make_world(spec))
    step = compile_step(spec, state, frozen, batch, placement)
    losses = []
    for now in range(STEPS):
        if now == STEPS // 2:  # what one mesh saved goes on on the next one
            checkpoints = Checkpoints(Path(mkdtemp()), 1)
            checkpoints.save(now, state, {})
            checkpoints.wait()
            state = checkpoints.restore(now, abstract(state), placement.shardings(state))
            other = Placement.of(jax.devices()[:4], 2, 2, small=0)
            moved = checkpoints.restore(now, abstract(state), other.shardings(state))
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(*map(np.asarray, map(jax.random.key_data if
                jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else (lambda x: x), (a, b)))), state, moved)
            checkpoints.close()
        state, metrics = step(state, frozen, placement.put_batch(batch))
        losses.append(float(metrics["loss"]))
    results.append((losses, jax.tree.map(np.asarray, state.params)))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    mine = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    split.append(mine / whole)
for losses, params in results[1:]:
    np.testing.assert_allclose(losses, results[0][0], atol=1e-5, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * rate * STEPS, rtol=0), results[0][1], params)
for (_, fsdp, tensor), share in zip(meshes, split):  # vectors are whole, and so is what the axes do not divide
    assert share == 1 if fsdp * tensor == 1 else share < 0.2 + 1 / min(fsdp * tensor, 4), split
print("equal")
"""


def check(method: str, steps: int, meshes: list[tuple[int, int, int]]) -> None:
    head = f"METHOD, STEPS, meshes = {method!r}, {steps}, {meshes}\n"
    assert run_on_devices(head + CODE, 8).split() == ["equal"]


@pytest.mark.ci
def test_B68_a_mesh_trains_the_same_and_restores_anothers_state():
    check("dflash", 4, [(1, 1, 1), (2, 2, 2)])


@pytest.mark.slow("mesh", covers=("jaxspec/training", "jaxspec/drafters", "jaxspec/parallel"))
@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3"])
def test_B68_every_mesh_trains_the_same_and_restores_anothers_state(method, record_property):
    meshes = [(1, 1, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]
    check(method, 10, meshes)
    record_property("seed", 0)
    record_property(f"{method}_meshes", [list(mesh) for mesh in meshes])
    record_property(f"{method}_steps", 10)


def test_rules_split_heads_mlp_and_vocabulary_and_the_longest_other_axis():
    rules = TrainingRules(fsdp=4, tensor=2, small=0)
    assert rules.parameter("model.layers.self_attn.q_proj.weight", (6, 32, 16)) == P(None, "tensor", "fsdp")
    assert rules.parameter("layers.0.self_attn.o_proj.weight", (16, 32)) == P("fsdp", "tensor")
    assert rules.parameter("1.mu.layers.0.mlp.down_proj.weight", (16, 64)) == P("fsdp", "tensor")
    assert rules.parameter("shared.head", (100, 16)) == P("tensor", "fsdp")
    assert rules.parameter("fc.weight", (16, 48)) == P(None, "fsdp")
    assert rules.parameter("norm.weight", (16,)) == P()
    assert rules.parameter("shared.head", (101, 18)) == P(None, None), "what the axes do not divide is whole"
    assert TrainingRules(4, 2).parameter("fc.weight", (16, 48)) == P(), "small things are whole"
    assert TrainingRules().parameter("fc.weight", (1600, 4800)) == P(None, None)


@pytest.mark.parametrize(
    ("asked", "batch", "devices", "shape"),
    [
        ({}, 8, 8, (8, 1, 1)),
        ({}, 6, 8, (6, 1, 1)),
        ({}, 1, 8, (1, 1, 1)),
        ({"fsdp": 2}, 8, 8, (4, 2, 1)),
        ({"tensor": 4}, 8, 8, (2, 1, 4)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 8, (2, 2, 2)),
    ],
)
def test_the_mesh_that_a_config_gives(asked, batch, devices, shape):
    placement = choose(TrainMeshSection(**asked), batch, jax.devices()[:1] * devices)
    assert tuple(placement.mesh.shape.values()) == shape
    assert placement.rules == TrainingRules(shape[1], shape[2])


@pytest.mark.parametrize(
    ("asked", "batch", "devices", "said"),
    [
        ({"fsdp": 3}, 4, 8, "mesh.fsdp: found 3"),
        ({"fsdp": 4, "tensor": 4}, 4, 8, r"mesh\.fsdp x mesh\.tensor: 4 x 4"),
        ({"data": 3}, 4, 8, "mesh.data: found 3"),
        ({"data": 16}, 16, 8, "mesh.data: found 16"),
    ],
)
def test_a_mesh_that_does_not_fit_names_its_key(asked, batch, devices, said):
    with pytest.raises(ConfigError, match=said):
        choose(TrainMeshSection(**asked), batch, jax.devices()[:1] * devices)


def test_a_batch_is_split_over_data_and_fsdp():
    assert Placement.of().rows.spec == P(None, ("data", "fsdp"))


def test_an_array_that_occurs_twice_stays_one():
    table = np.ones((4, 4), np.float32)
    first, second = Placement.of().put((table, table))
    assert first is second
    assert Placement.of().rules == TrainingRules()
