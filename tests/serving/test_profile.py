"""`jaxspec profile`: rounds measured under load, the fit, the file, and a server that plans with it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.cli import main as jaxspec
from jaxspec.config import ServeConfig, load_config
from jaxspec.decoding.plan import Schedule
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.simulated import SimulatedProgram
from jaxspec.errors import ConfigError
from jaxspec.serving import main
from jaxspec.serving.budget import search
from jaxspec.serving.cost import AdditiveTable, StepsTable, load_cost_table, save_cost_table, unmeasured
from jaxspec.serving.cost_fit import Cell, fit, misfit
from jaxspec.serving.cost_origin import check_origin, manifest_path, save_profile
from jaxspec.serving.engine import Engine
from jaxspec.serving.profiling import measure, nothing_stands
from tests.helpers.worlds import by_lane, random_table, script, scripted, table_target, tiny_draft, tiny_target

M = 4
GOLDEN = Path(__file__).parents[1] / "golden"
TRUTH = AdditiveTable(
    0.002, (1, 4, 16), (0.0, 0.001, 0.003), (2, 5, 8, 20, 40, 80), (0.0, 0.0, 0.001, 0.002, 0.006, 0.01)
)


def cells(noise: float = 0.0, seed: int = 0) -> list[Cell]:
    rng = np.random.default_rng(seed)
    found = []
    for requests, rows in itertools.product(TRUTH.bs_probes, TRUTH.m_probes):
        seconds = float(TRUTH.step_seconds(requests, np.array(rows))) * np.exp(noise * rng.normal())
        found.append(Cell(requests, rows, seconds, 32))
    return [*found, Cell(1, 1, 1e-9, 32, drafting=False)]  # a plain round says nothing about budgets


def test_the_fit_finds_an_additive_law_again() -> None:
    table = fit(cells(), "additive")
    assert isinstance(table, AdditiveTable)
    for field in dataclasses.fields(AdditiveTable):
        np.testing.assert_allclose(getattr(table, field.name), getattr(TRUTH, field.name), atol=1e-9)
    assert max(misfit(table, cells())) < 1e-6


@pytest.mark.parametrize("form", ["additive", "steps"])
def test_a_fitted_table_never_falls_however_noisy_the_rounds(form: str, tmp_path: Path) -> None:
    for seed in range(20):
        table = fit(cells(noise=0.5, seed=seed), form)
        rows = np.arange(1, 100)
        for requests in (1, 2, 4, 9, 16):
            assert (np.diff(table.step_seconds(requests, rows)) >= 0).all()
        at = [table.step_seconds(requests, rows) for requests in range(1, 17)]
        assert (np.diff(at, axis=0) >= 0).all()
        save_cost_table(table, tmp_path / "table.json")
        assert load_cost_table(tmp_path / "table.json") == table
        assert min(misfit(table, cells(noise=0.5, seed=seed))) > 0


def test_a_bucket_of_steps_is_probed_at_its_lower_edge() -> None:
    table = fit([Cell(2, 4, 0.1, 8), Cell(2, 10, 0.2, 8), Cell(4, 10, 0.2, 8), Cell(4, 20, 0.5, 8)], "steps")
    assert isinstance(table, StepsTable)
    assert (table.sample_batch_tokens, table.max_batch_tokens) == ((1, 5, 11), 20)
    np.testing.assert_allclose(table.sample_steps_per_sec, (10, 5, 2))


def test_nothing_measured_is_no_table() -> None:
    with pytest.raises(ConfigError, match="no measured round"):
        fit([Cell(1, 1, 0.1, 8, drafting=False)], "additive")


def test_the_search_asks_for_what_would_run() -> None:
    """Between two buckets a round costs the upper one, however cheap the table thinks the rows in between."""
    table = AdditiveTable(1.0, (1,), (0.0,), (4, 20), (0.0, 16.0))
    survival = np.cumprod(np.full((4, M), 0.9), axis=1)
    run = (4, (4, 12, 20))
    assert search(survival, table, Schedule(M)).budget != 8
    decision = search(survival, table, Schedule(M), run=run)
    assert decision.budget in (0, 8, 16)
    assert decision.step_seconds == float(table.step_seconds(4, np.array(4 + decision.budget)))
    padded = search(survival[:3], table, Schedule(M), run=run, prefill_rows=7)
    assert padded.step_seconds in [float(table.step_seconds(4, np.array(rows + 7))) for rows in run[1]]


# -- measured on an engine --------------------------------------------------------------------------------------------


class Clock:
    """Seconds that executables take, by their shape."""

    def __init__(self, cost: Callable[[int, int, bool, int], float]):
        self.now, self._cost = 0.0, cost

    def __call__(self) -> float:
        return self.now

    def drive(self, engine: Engine, built: dict[str, Any]) -> Engine:

        def timed(shape: Any) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self.now += self._cost(shape.slots, shape.rows, shape.drafting, shape.prefill)
                return executable(*args)

            executable = built[str(shape)]
            return call

        engine.executables.built = {str(shape): timed(shape) for shape in engine.executables.shapes}
        return engine


def table_engine(confident: bool = False, **changes: Any) -> Engine:
    table = random_table(2, 64, seed=3)
    draft = scripted(table, M, script(table, M, by_lane((1, 3))))
    if confident:
        draft.params["confidence"] = np.full((16, 64, M), 0.7, np.float32)
    options = {"num_slots": 4, "slot_buckets": (1, 4), "max_context": 64, "prefill_chunk": 8, "page_size": 4}
    options |= {"rules": False, "max_logprobs": None, "row_shares": (0.5,), "cost_table": unmeasured(1)}
    options |= {"cache_fill": float("nan"), "program": nothing_stands}
    return Engine(table_target(table), draft, **{**options, **changes})


@pytest.fixture(scope="module")
def profiled() -> Engine:
    return table_engine()


@pytest.fixture
def executables(profiled: Engine) -> Iterator[dict[str, Any]]:
    """What the engine runs; a clock's wrappers are taken off again."""
    profiled.warm_up()
    built = profiled.executables.built
    yield built
    profiled.executables.built, profiled.lag = built, 1


@pytest.mark.ci
def test_every_bucket_is_measured_and_the_engine_is_left_as_it_was(profiled: Engine, executables: dict) -> None:
    cost = lambda slots, rows, drafting, prefill: 1.0 + slots + 0.1 * rows + 2 * drafting + 0.5 * (prefill > 0)  # noqa: E731
    clock = Clock(cost)
    engine = clock.drive(profiled, executables)
    engine.lag = 0
    planner, switch = engine.drafting.planner, engine.drafting.switch
    found = measure(engine, context=20, steps=5, settle=3, clock=clock)
    shapes = {(one.requests, one.rows, one.drafting, one.prefill) for one in found}
    assert shapes == {
        (1, 1, False, 0), (1, 2, True, 0), (1, 5, True, 0),
        (4, 4, False, 0), (4, 10, True, 0), (4, 20, True, 0),
        (4, 12, False, 8), (4, 18, True, 8), (4, 28, True, 8),
    }  # fmt: skip
    for one in found:
        assert one.seconds == pytest.approx(cost(one.requests, one.rows - one.prefill, one.drafting, one.prefill))
        assert one.steps == 5
    assert (engine.live, engine.compile_count, engine.held_pages) == (0, 0, 0)
    assert (engine.drafting.planner, engine.drafting.switch, planner.forced_fraction) == (planner, switch, None)
    median, worst = misfit(fit(found, "additive"), found)
    assert median < 0.02 and worst < 0.1


@pytest.mark.ci
def test_overlapped_rounds_are_told_apart(profiled: Engine, executables: dict) -> None:
    """The time passes where a round is read, which is a step after it was dispatched."""
    cost = lambda slots, rows, drafting, prefill: 1.0 + slots + 0.1 * rows + 2 * drafting + 5.0 * (prefill > 0)  # noqa: E731
    clock, waiting = Clock(lambda *shape: waiting.append(cost(*shape)) or 0.0), collections.deque[float]()
    engine = clock.drive(profiled, executables)
    read = engine._read

    def reading(flight: Any) -> None:
        clock.now += waiting.popleft()
        read(flight)

    engine._read = reading  # type: ignore[method-assign]
    try:
        seen: list[Cell] = []
        assert measure(engine, context=20, steps=4, settle=3, clock=clock, progress=seen.append) == seen
    finally:
        del engine._read
    assert {(one.requests, one.drafting, one.prefill > 0) for one in seen} >= {(1, True, False), (4, True, True)}
    for one in seen:
        assert one.seconds == pytest.approx(cost(one.requests, one.rows - one.prefill, one.drafting, one.prefill))
    with pytest.raises(ConfigError, match="context"):
        measure(engine, context=64)
    handle = engine.admit([1], greedy(9))
    with pytest.raises(ConfigError, match="idle"):
        measure(engine)
    engine.cancel(handle)


@pytest.mark.ci
def test_an_engine_plans_with_the_table_that_was_measured_on_it() -> None:
    """The drafter accepts little; a steep table keeps budgets small, a flat one lets everything be verified."""
    proposed = {}
    engine = table_engine(overlap=False, pause_drafting=False, program=half, slot_buckets=(4,))
    engine.warm_up()
    built = engine.executables.built
    for slope in (0.0, 1.0):
        clock = Clock(lambda slots, rows, drafting, prefill, slope=slope: 1.0 + slope * rows)
        clock.drive(engine, built)
        engine.drafting.planner.table = fit(measure(engine, steps=4, settle=3, clock=clock), "additive")
        load = [engine.admit([1, 2, 3], greedy(30)) for _ in range(4)]
        events = [event for _ in range(400) if engine.live for event in engine.step()]
        assert len({event.handle for event in events}) == len(load)
        proposed[slope] = np.mean([event.proposed for event in events if event.from_round])
    assert proposed[1.0] < 0.7 * proposed[0.0]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def half(decoder: Any, drafter: Any, *args: Any, **more: Any) -> SimulatedProgram:
    return SimulatedProgram(decoder, drafter, *args, rates=(0.3,) * M, confidence=(0.3,) * M, **more)


@pytest.mark.ci
def test_simulated_rounds_accept_at_the_asked_rates_and_say_the_asked_confidence() -> None:
    rates = (0.9, 0.6, 0.6, 0.2)
    program = lambda *args, **more: SimulatedProgram(*args, rates=rates, confidence=(0.5,) * M, **more)  # noqa: E731
    engine = table_engine(program=program, pause_drafting=False, slot_buckets=(4,), row_shares=(), confident=True)
    said: list[Any] = []
    publish = engine.drafting.publish
    engine.drafting.publish = lambda confidence, decoding: (said.append(confidence), publish(confidence, decoding))[1]
    accepted: list[int] = []
    for lane in range(60):
        for _ in range(4):
            engine.admit([lane % 16, 5], greedy(58))
        events = [event for _ in range(100) if engine.live for event in engine.step()]
        accepted += [event.accepted for event in events if event.from_round and event.finish_reason is None]
    found = np.array(accepted)
    for slot, share in enumerate(np.cumprod(rates)):
        assert abs((found > slot).mean() - share) < 0.03
    np.testing.assert_allclose(np.asarray(said[0]), 0.5)


def test_simulated_acceptance_takes_one_probability_a_proposal() -> None:
    target = tiny_target()
    drafter = tiny_draft(target).drafter
    build = lambda **more: SimulatedProgram(target.model, drafter, 64, 1, 16, **{"confidence": (1.0,) * M, **more})  # noqa: E731
    assert build(rates=(0.5,) * M).rates == (0.5,) * M
    for wrong in ((0.5,) * 3, (1.5,) * M, (float("nan"),) * M):
        with pytest.raises(ConfigError, match="rates"):
            build(rates=wrong)


# -- the file ---------------------------------------------------------------------------------------------------------

HERE = {"device": "cpu", "dtype": "float32", "target": "llama, 2 layers", "drafter": "dspark, 4 proposals"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    save_profile(fit(cells(), "additive"), cells(), HERE, path, form="additive")
    return path


def test_a_table_is_taken_where_it_was_measured_and_nowhere_else(saved: Path) -> None:
    assert check_origin(saved, HERE) is None
    for name in HERE:
        with pytest.raises(ConfigError, match=f"measured for the {name}.*jaxspec profile"):
            check_origin(saved, {**HERE, name: "something else"})


def test_a_manifest_of_another_table_is_refused(saved: Path) -> None:
    saved.write_text(saved.read_text() + " ")
    with pytest.raises(ConfigError, match=r"table.manifest.json"):
        check_origin(saved, HERE)
    manifest_path(saved).write_text("{}")
    with pytest.raises(ConfigError, match="sha256"):
        check_origin(saved, HERE)


def test_a_table_of_another_server_has_no_manifest_and_that_is_said(saved: Path) -> None:
    manifest_path(saved).unlink()
    assert "table.manifest.json" in (check_origin(saved, HERE) or "")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_the_command_measures_writes_and_the_server_plans_with_it(tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "serve.yaml", tmp_path / "cost.json"
    file.write_text("version: 1\ntarget: {source: x, dtype: float32}\n")
    overrides = [
        f"target.source={GOLDEN / 'targets' / 'q3a'}", f"drafter={GOLDEN / '03_dflash_gen_q3a' / 'draft'}",
        f"compilation_cache={tmp_path / 'xla'}", "engine.num_slots=1", "engine.num_proposals=1",
        "engine.max_context=64", "engine.rules=false", "engine.max_logprobs=null", "engine.prefill_chunk=16",
    ]  # fmt: skip
    asked = ["profile", "--config", str(file), "--out", str(out), "--steps", "4", "--json", *overrides]
    assert jaxspec(asked) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest == json.loads(manifest_path(out).read_text())
    assert manifest["made_for"]["device"] == "cpu" and [one["rows"] for one in manifest["cells"]] == [1, 1, 2]
    table = load_cost_table(out)
    assert isinstance(table, AdditiveTable)
    assert all(np.diff(series).min(initial=0) >= 0 for series in (table.alpha_seconds, table.theta_seconds))

    config = load_config(ServeConfig, file, [*overrides, f"engine.cost_table={out}"])
    loaded = main.load(config, lambda: None)
    assert loaded.runner.drafting.planner.table == table
    capsys.readouterr()
    manifest["made_for"]["device"] = "NVIDIA H200"
    manifest_path(out).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="measured for the device 'NVIDIA H200', expected 'cpu'"):
        main.load(config, lambda: None)


def test_without_a_drafter_there_is_nothing_to_plan(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("version: 1\ntarget: {source: x}\n")
    assert jaxspec(["profile", "--config", str(file), "--out", str(tmp_path / "cost.json")]) == 2
    assert "drafter" in capsys.readouterr().err
