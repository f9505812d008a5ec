"""Out of memory at load, at compile and in a step is answered by the plan's table and the one setting to change."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import TrainConfig, build
from jaxspec.training import inputs, main, memory, plan
from jaxspec.training.state import Placement
from tests.training import world
from tests.training.test_run import Lines

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


def failing(*arguments, **options):
    raise jax.errors.JaxRuntimeError(FULL)


def parts():
    state = types.SimpleNamespace(
        params={"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)},
        opt_state={"mu": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)},
        ema=None,
    )
    return state, {"t": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}


def compiled(temporaries: int):
    facts = dict(argument_size_in_bytes=16 << 20, output_size_in_bytes=8 << 20, alias_size_in_bytes=8 << 20,
                 temp_size_in_bytes=temporaries, generated_code_size_in_bytes=0)  # fmt: skip
    return types.SimpleNamespace(
        memory_analysis=lambda: types.SimpleNamespace(**facts), cost_analysis=dict, as_text=lambda: ""
    )


@pytest.mark.parametrize(
    ("executable", "named", "where"),
    [
        (None, "optimizer.batch_size=1 with optimizer.accumulation=2", "compiling the step"),
        (compiled(64 << 20), "optimizer.batch_size=1 with optimizer.accumulation=2", "running the step"),
        (compiled(1 << 20), "more devices", "running the step"),  # one device: nothing to split over
    ],
)
def test_the_table_and_one_setting(tmp_path, executable, named, where):
    config, said = world.config(tmp_path, tmp_path / "d"), []
    with pytest.raises(memory.OutOfMemory) as caught, memory.answered(
        config, *parts(), Placement.of(), said.append, executable
    ):  # fmt: skip
        failing()
    text = str(caught.value)
    assert named in text and where in text and "17179869184" in text and "\n" not in text
    table = "\n".join(said)
    assert "target and tables 0.01 GiB" in table and "moments on a device: 0.00 GiB" in table and named in table
    assert ("temporaries" in table) is (executable is not None)


def test_every_other_error_passes_as_it_is(tmp_path):
    config = world.config(tmp_path, tmp_path / "d")
    for context in (memory.answered(config, *parts(), Placement.of(), print), memory.while_loading(config)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), context:
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_the_advice_follows_what_is_most_of_it_and_what_there_is(tmp_path):
    config = world.config(tmp_path, tmp_path / "d", optimizer__batch_size=4)
    found = plan.Plan(8, 1, 70, 10, 20, 100, 10, 110, 0.0, 0.0, {})
    assert plan.advice(config, found).startswith("mesh.fsdp=2")
    assert plan.advice(config, found, 8).startswith("mesh.fsdp=2")
    assert plan.advice(config, found, 1).startswith("target.quantization=int8")
    work = plan.Plan(8, 1, 10, 10, 20, 40, 70, 110, 0.0, 0.0, {})  # what the step makes is most of it
    for objective, setting in (
        ({}, "objective.chunk_blocks=256"),
        ({"chunk_blocks": 16}, "objective.keep_products=false"),
        ({"chunk_blocks": 16, "keep_products": False}, "data.max_length=32"),
    ):
        tree = {"drafter": {"method": "eagle3"}, "objective": objective, "data": {"path": "d", "max_length": 64}}
        tree |= {"version": 1, "target": {"source": "tiny"}, "optimizer": {"batch_size": 1}}
        made = build(TrainConfig, tree | {"run": {"directory": "d", "steps": 1}})
        assert plan.advice(made, work).startswith(setting)
    odd = world.config(tmp_path, tmp_path / "d", optimizer__batch_size=3)
    assert plan.advice(odd, found, 8).startswith("mesh.tensor=2")  # 3 sequences cannot be split over two


def test_a_program_without_a_text_is_planned_all_the_same(tmp_path, monkeypatch):
    """libtpu may be newer than the jaxlib that would print its program."""

    def unreadable(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (xla/hlo/ir/hlo_instruction.cc:390)")

    step = jax.jit(lambda x: x + 1).lower(1.0).compile()
    monkeypatch.setattr(plan, "collectives", unreadable)
    found = plan.account(step, *parts(), Placement.of(), 2**30)
    config = world.config(tmp_path, tmp_path / "d")
    text = "\n".join(plan.lines(found, config))
    assert "collectives: unknown: this jaxlib cannot read" in text and "OK: total" in text


@pytest.mark.ci
def test_a_run_answers_at_load_at_compile_and_in_a_step(tmp_path, monkeypatch):
    data = world.write_data(tmp_path / "data.npz")
    config = world.config(tmp_path / "run", data, run__steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "load_target", failing)
        with pytest.raises(memory.OutOfMemory, match=r"target\.source tiny.*target\.quantization=int8"):
            main.run(config, reporter=Lines())
    assert not (tmp_path / "run").exists()
    for patched in (failing, lambda *a, **o: failing):
        reporter = Lines()
        with monkeypatch.context() as patch:
            patch.setattr(main, "compile_step", patched)
            if patched is not failing:
                patch.setattr(
                    memory.plan, "account", lambda compiled, *rest: plan.Plan(1, 0, 1, 1, 2, 4, 9, 13, 0.0, 0.0, {})
                )
            with pytest.raises(memory.OutOfMemory, match=r"optimizer\.batch_size=1"):
                main.run(config, target=world.target(), reporter=reporter)
        assert "what the step needs of each device" in reporter.text and "moments on a device" in reporter.text
