"""The best weights by tau: kept, survive a restart, exported on demand; and which checkpoints stay."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.store import TensorFolder
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.training import main
from jaxspec.training.best import Best
from jaxspec.training.build import fresh_drafter
from tests.training import world
from tests.training.test_run import Lines

TAUS = {2: 1.5, 4: 2.5, 6: 2.5, 8: 1.25, 10: 1.0}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    return path


def made(tmp_path, prompts, **changes):
    data = tmp_path / "data.npz"
    if not data.exists():
        world.write_data(data)
    asked = {"run__eval_every": 2, "run__eval_prompts": str(prompts), **changes}
    return world.config(tmp_path / "run", data, **asked)


def draft_of(config, value):
    drafter = fresh_drafter(config, world.MODEL)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), drafter.abstract_params(jnp.float32))
    return Draft(drafter, None), params


def test_only_a_higher_tau_replaces_it_and_it_says_what_it_is(tmp_path, prompts):
    config, said = made(tmp_path, prompts), []
    place = tmp_path / "best"
    for step, tau, value, kept in (
        (2, 1.5, 1.0, True),
        (4, 1.5, 2.0, False),
        (6, 1.75, 3.0, True),
        (8, float("nan"), 4.0, False),
    ):
        draft, params = draft_of(config, value)
        best = Best(config, place, draft, said.append)  # every time anew, as after a restart
        assert best.offer(step, tau, params) is kept
    tensors = TensorFolder(place)
    assert tensors.metadata()["jaxspec.tau"] == "1.75" and tensors.metadata()["jaxspec.step"] == "6"
    assert np.unique(tensors.read("fc.weight")).tolist() == [3.0]
    assert best.copy_to(tmp_path / "out").step == 6
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()
    assert not said
    prompts.write_text('{"prompt": "another"}\n')  # a tau of other prompts says nothing about these
    fresh = Best(config, place, draft, said.append)
    assert fresh.found is None and "measured anew" in said[0] and fresh.offer(10, 1.0, params)


def test_without_a_measured_one_there_is_nothing_to_export(tmp_path, prompts):
    config = made(tmp_path, prompts)
    best = Best(config, tmp_path / "best", draft_of(config, 1.0)[0], print)
    with pytest.raises(ConfigError, match=r"run\.export_weights"):
        best.copy_to(tmp_path / "out")
    draft, params = draft_of(config, 1.0)
    best.offer(2, 1.5, params)
    path = tmp_path / "best" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"jaxspec.tau", b"jaxspec.tax"))
    with pytest.raises(CheckpointError, match="writes it anew"):
        Best(config, tmp_path / "best", draft, print)


def test_best_needs_evaluations(tmp_path, prompts):
    with pytest.raises(ConfigError, match=r"run\.export_weights and run\.eval_every"):
        made(tmp_path, prompts, run__eval_every=0, run__export_weights="best")
    with pytest.raises(ConfigError, match=r"run\.export_weights"):
        main.run(made(tmp_path, prompts, run__export_weights="best"), target=world.target(), reporter=Lines())
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_a_run_exports_its_best_across_a_restart_and_later_its_last(tmp_path, prompts):
    seen = {}

    def evaluate(target, drafter, shared):
        def measure(params):
            step = 2 * (len(seen) + 1)
            seen[step] = np.asarray(params["fc"]["weight"])
            return {"tau": TAUS[step]}

        return measure

    config = made(tmp_path, prompts, run__export_weights="best")
    stop = Lines({5: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    first = main.run(config, target=world.target(), evaluate=evaluate, reporter=stop)
    assert first["status"] == "stopped" and first["best"] == {"step": 4, "tau": 2.5} and first["export"] is None
    reporter = Lines()
    report = main.run(config, target=world.target(), evaluate=evaluate, reporter=reporter)
    assert report["weights"] == {"from": "best", "ema_decay": None, "step": 4, "tau": 2.5}
    assert "of step 4, the best by tau (2.500)" in reporter.text and report["metrics"]["eval/tau"] == 1.0
    found = TensorFolder(report["export"])
    np.testing.assert_array_equal(found.read("fc.weight"), seen[4])
    again = main.run(made(tmp_path, prompts), target=world.target(), evaluate=evaluate, reporter=Lines())
    assert again["status"] == "already finished" and again["weights"]["from"] == "last"
    np.testing.assert_array_equal(TensorFolder(again["export"]).read("fc.weight"), seen[10])


@pytest.mark.ci
def test_checkpoints_stay_by_number_by_period_and_are_due_by_time(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    policy = {"run__checkpoint_seconds": 1e-9, "run__keep": 2, "run__keep_every": 4}  # by time alone: every step
    main.run(world.config(tmp_path / "a", data, **policy), target=world.target(), reporter=Lines())
    kept = sorted(int(path.name) for path in (tmp_path / "a" / "checkpoints").iterdir() if path.name.isdigit())
    assert kept == [4, 8, 9, 10]
