"""The moving average of the parameters: its formula, what skips it, exact resume, and that it is what is served."""

from __future__ import annotations

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.store import TensorFolder
from jaxspec.errors import ResumeError
from jaxspec.training import main
from jaxspec.training import optimizer as opt
from jaxspec.training.build import fresh_drafter, initial_params
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.state import Placement, create
from tests.training import world
from tests.training.test_run import Lines

DECAY = 0.6


def run(place, data, reporter=None, evaluate=None, **changes):
    config = world.config(place, data, **{"optimizer__ema_decay": DECAY, "run__steps": 3, **changes})
    return main.run(config, target=world.target(), reporter=reporter or Lines(), evaluate=evaluate)


def state_of(place, step, config):
    """A checkpoint's state."""
    drafter, key = fresh_drafter(config, world.MODEL), jax.random.key(0)
    like = create(initial_params(drafter, key, jnp.float32), opt.build(config.optimizer), key, average=True)
    checkpoints = Checkpoints(place / "checkpoints", 20)
    state = checkpoints.restore(step, like, Placement.of().replicated)
    checkpoints.close()
    return state


def test_the_formula_by_hand():
    """d = min(decay, (1 + n) / (10 + n)): 0.1, 2/11, 3/12, ... until the decay."""
    ema, kept = {"w": jnp.float32(1.0)}, 1.0
    for step, value in enumerate((3.0, -2.0, 5.0, 0.5)):
        ema = opt.averaged(ema, {"w": jnp.float32(value)}, 0.22, jnp.int32(step))
        d = min(0.22, (1 + step) / (10 + step))
        kept = d * kept + (1 - d) * value
        np.testing.assert_allclose(float(ema["w"]), kept, rtol=1e-6)
    assert ema["w"].dtype == jnp.float32


@pytest.mark.ci
def test_the_average_is_kept_resumed_exactly_measured_and_exported(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    config = world.config(tmp_path / "a", data, optimizer__ema_decay=DECAY, run__steps=3)
    measured = []

    def evaluate(target, drafter, shared):
        return lambda params: measured.append(np.asarray(params["fc"]["weight"])) or {"tau": 1.0}

    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    asked = {"run__checkpoint_every": 1, "run__keep": 9, "run__eval_every": 3, "run__eval_prompts": str(prompts)}
    report = run(tmp_path / "a", data, evaluate=evaluate, **asked)
    states = [state_of(tmp_path / "a", step, config) for step in (1, 2, 3)]
    (first, second), params = (np.asarray(one.ema["fc"]["weight"]) for one in states[:2]), states[1].params
    d = 2 / 11  # of the second step
    np.testing.assert_allclose(second, d * first + (1 - d) * np.asarray(params["fc"]["weight"]), rtol=1e-5, atol=1e-7)
    first = np.asarray(states[-1].ema["fc"]["weight"])
    assert not np.array_equal(first, np.asarray(states[-1].params["fc"]["weight"]))
    np.testing.assert_array_equal(measured[-1], first)
    np.testing.assert_array_equal(np.asarray(states[-1].served["fc"]["weight"]), first)
    exported = load_drafter(report["export"], world.target(), "float32")
    np.testing.assert_array_equal(np.asarray(exported.params["fc"]["weight"]), first)
    said = TensorFolder(report["export"]).metadata()
    assert (said["jaxspec.weights"], said["jaxspec.step"], said["jaxspec.ema_decay"]) == ("average", "3", "0.6")
    assert report["weights"] == {"from": "last", "ema_decay": DECAY, "step": 3, "tau": 1.0}

    stop = Lines({2: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert run(tmp_path / "b", data, reporter=stop)["status"] == "stopped"
    assert run(tmp_path / "b", data)["resumed_from"] == 2
    again = state_of(tmp_path / "b", 3, config)
    for one, other in zip(jax.tree.leaves(states[-1].ema), jax.tree.leaves(again.ema), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    with pytest.raises(ResumeError, match=r"optimizer\.ema_decay: the run has 0\.6, now 0\.7"):
        run(tmp_path / "b", data, optimizer__ema_decay=0.7)


@pytest.mark.ci
def test_without_it_the_export_says_parameters_and_the_report_is_a_page(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    reporter = Lines()
    report = run(tmp_path / "a", data, reporter=reporter, optimizer__ema_decay=None, run__steps=10)
    assert TensorFolder(report["export"]).metadata()["jaxspec.weights"] == "parameters"
    page = tmp_path / "a" / "report.html"
    assert f"report: {page}" in reporter.text
    text = page.read_text()
    assert "Loss, by term" in text and "learning_rate: 0.01" in text and "<svg" in text and "dropped" in text
    assert json.loads((tmp_path / "a" / "report.json").read_text())["weights"]["ema_decay"] is None
    parts = (tmp_path / "a" / "checkpoints" / "10" / "state" / "_METADATA").read_text()
    assert "opt_state" in parts and "ema" not in parts  # a run without one reads the files of a release without one
