"""Checkpoints: typed keys, another mesh, refusal of what does not fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import OptimizerSection
from jaxspec.errors import ResumeError
from jaxspec.training import optimizer as opt
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.state import Placement, create
from tests.helpers.process import run_on_devices


def state_of(size=4, seed=3):
    params = {
        "layers": [{"w": jnp.arange(size * 2.0).reshape(size, 2)}, {"w": jnp.ones((size, 2))}],
        "norm": jnp.ones(size),
    }
    state = create(params, opt.build(OptimizerSection()), jax.random.key(seed))
    clip, adam, decay = state.opt_state
    moments = jax.tree.map(
        lambda leaf: leaf + seed, (adam.mu, adam.nu)
    )  # an empty optimizer would compare equal to itself
    state = dataclasses.replace(state, opt_state=(clip, adam._replace(mu=moments[0], nu=moments[1]), decay))
    return jax.device_put(state, Placement.of().replicated)


def test_B60_typed_keys_come_back_and_draw_the_same(tmp_path):
    state = state_of()
    checkpoints = Checkpoints(tmp_path / "c", 2)
    checkpoints.save(1, state, {"note": [1, 2]})
    checkpoints.wait()
    back = checkpoints.restore(1, state_of(seed=9), Placement.of().replicated)
    assert checkpoints.meta(1) == {"note": [1, 2]} and checkpoints.latest() == 1
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, (back.params, back.opt_state), (state.params, state.opt_state))
    assert jnp.issubdtype(back.key.dtype, jax.dtypes.prng_key) and jax.tree.structure(back) == jax.tree.structure(state)
    np.testing.assert_array_equal(jax.random.uniform(back.key, (5,)), jax.random.uniform(state.key, (5,)))


def test_only_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", 2)
    for step in (1, 2, 2, 3):
        checkpoints.save(step, state_of(), {})
    checkpoints.wait()
    checkpoints.close()
    assert sorted(int(entry.name) for entry in (tmp_path / "c").iterdir()) == [2, 3]


@pytest.mark.parametrize("other", ["shape", "structure"])
def test_a_checkpoint_of_another_drafter_is_refused(tmp_path, other):
    checkpoints = Checkpoints(tmp_path / "c", 2)
    checkpoints.save(1, state_of(), {})
    checkpoints.wait()
    like = state_of(size=6)
    if other == "structure":
        like = create({"elsewhere": jnp.ones(3)}, opt.build(OptimizerSection()), jax.random.key(0))
    with pytest.raises(ResumeError, match=r"run\.fresh=true"):
        checkpoints.restore(1, like, Placement.of().replicated)
    checkpoints.close()


@pytest.mark.ci
def test_B58_restore_on_another_mesh(tmp_path):
    code = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jaxspec.config import OptimizerSection
        from jaxspec.training import optimizer as opt
        from jaxspec.training.checkpoint import Checkpoints
        from jaxspec.training.state import create

        def mesh(shape, names):
            count = int(np.prod(shape))
            return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:count])

        values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
        state = create({{"w": jnp.asarray(values)}}, opt.build(OptimizerSection()), jax.random.key(3))

        def rows(state, mesh, spec):
            return jax.tree.map(lambda leaf: NamedSharding(mesh, spec if leaf.ndim == 2 else P()), state)

        whole = mesh((8,), ("data",))
        saved = jax.device_put(state, rows(state, whole, P("data")))
        checkpoints = Checkpoints(__import__("pathlib").Path({str(tmp_path / "c")!r}), 2)
        checkpoints.save(1, saved, {{}})
        checkpoints.wait()
        both = ("data", "fsdp")
        asked = [((2, 2), both, P("data", "fsdp")), ((1,), ("data",), P()), ((2, 4), both, P("fsdp", "data"))]
        for inside in (False, True):
            for shape, names, spec in asked:
                there = mesh(shape, names)
                sharding = rows(state, there, spec)
                if inside:
                    with jax.set_mesh(there):
                        back = checkpoints.restore(1, state, sharding)
                else:
                    back = checkpoints.restore(1, state, sharding)
                assert back.params["w"].sharding == sharding.params["w"], back.params["w"].sharding
                np.testing.assert_array_equal(back.params["w"], values)
                np.testing.assert_array_equal(back.opt_state[1].mu["w"], 0)
                assert jax.random.uniform(back.key) == jax.random.uniform(state.key)
        checkpoints.close()
        print("equal")
    """
    assert run_on_devices(code, 8).split() == ["equal"]
