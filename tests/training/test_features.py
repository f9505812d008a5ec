"""Runs with stored features: they are the online run, bit for bit where nothing was rounded, and resume as it does."""

from __future__ import annotations

import json
import os
import signal
import threading

import jax
import numpy as np
import pytest

from jaxspec.config import TrainConfig, load_config, render
from jaxspec.errors import ConfigError, DataError, ResumeError
from jaxspec.training import main
from jaxspec.training.featurestore import run as capturing
from jaxspec.training.featurestore.consumer import SpoolBatches
from jaxspec.training.featurestore.manifest import layout_of
from jaxspec.training.featurestore.shards import Reader
from jaxspec.training.plan import planned_step
from jaxspec.training.state import Placement
from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK, run_python
from tests.training import world
from tests.training.test_run import Lines, assert_same


@pytest.fixture
def data(tmp_path):
    return world.write_data(tmp_path / "data.npz")


def train(config, **options):
    reporter = options.pop("reporter", None) or Lines()
    return main.run(config, target=world.target(), reporter=reporter, **options), reporter


def capture(config):
    return capturing.run(config, target=world.target(), say=lambda line: None)


def stored(tmp_path, mode="offline", **changes):
    return {
        "features__mode": mode, "features__path": str(tmp_path / "features"), "features__storage": "float32",
        "features__shard_examples": 3, **changes,
    }  # fmt: skip


@pytest.mark.ci
def test_offline_is_the_online_run_and_resumes_in_mid_epoch(tmp_path, data):
    train(world.config(tmp_path / "online", data))
    config = world.config(tmp_path / "offline", data, **stored(tmp_path))
    assert capture(config)["examples"] == 7
    stop = Lines({5: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    report, _ = train(config, reporter=stop)
    assert (report["status"], report["step"]) == ("stopped", 5)
    assert train(config)[0]["resumed_from"] == 5
    assert_same(tmp_path / "online", tmp_path / "offline", 10)
    text = json.loads((tmp_path / "features" / "manifest.json").read_text())
    assert text["revision"] == "r1" and text["taps"] == [0, 1] and text["shards"][0]["sha256"]
    with pytest.raises(ResumeError, match=r"features\.mode: the run has 'offline', now None"):
        train(world.config(tmp_path / "offline", data))


def test_features_of_another_run_are_refused_at_the_start(tmp_path, data):
    capture(world.config(tmp_path / "run", data, **stored(tmp_path)))
    with pytest.raises(DataError, match=r"manifest\.json\): taps: the files have \[0, 1\], the run wants \[1\]"):
        train(world.config(tmp_path / "run", data, **stored(tmp_path), drafter__target_layer_ids=[1]))
    with pytest.raises(DataError, match="teacher: the files have False, the run wants True"):
        train(world.config(tmp_path / "run", data, "dspark", **stored(tmp_path)))
    with pytest.raises(DataError, match="compute_dtype: the files have 'float32', the run wants 'bfloat16'"):
        train(world.config(tmp_path / "run", data, drafter__dtype="bfloat16", **stored(tmp_path)))
    other = world.write_data(tmp_path / "other.npz", seed=1)
    with pytest.raises(DataError, match="data: the files have"):
        train(world.config(tmp_path / "run", other, **stored(tmp_path)))
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
@REPEATS  # `make test-slow-features-kill` does it with processes that are killed
@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_a_spool_with_two_producers_is_the_online_run(tmp_path, data, method):
    """The teacher's hidden state comes through too; two micro-batches a step, shards of three."""
    more = {"optimizer__accumulation": 2, "run__checkpoint_every": 2}
    if method == "eagle3":
        more |= {"drafter__block_size": 1, "drafter__mask_token_id": None}
    train(world.config(tmp_path / "online", data, method, **more))
    more |= {"features__shard_batches": 3, "features__spool_shards": 3}
    config = world.config(tmp_path / "spooled", data, method, **stored(tmp_path, "spool"), **more)
    made = []
    producers = [threading.Thread(target=lambda: made.append(capture(config)["shards"])) for _ in range(2)]
    for one in producers:
        one.start()
    report, _ = train(config)
    for one in producers:
        one.join()
    assert report["status"] == "finished" and sum(made) == 7  # 20 micro-batches
    assert_same(tmp_path / "online", tmp_path / "spooled", 10)
    counts = capturing.status(str(tmp_path / "features"))
    assert counts["acknowledged"] == counts["steps"] == 10 and counts["shards"] == 0 == counts["acknowledged_twice"]


@REPEATS
def test_int8_trains_near_the_online_run_and_capture_says_what_it_costs(tmp_path, data):
    online, _ = train(world.config(tmp_path / "online", data, "dspark"))
    config = world.config(tmp_path / "int8", data, "dspark", **stored(tmp_path, features__storage="int8"))
    report = capture(config)
    assert 1e-4 < report["relative_error"] < 0.01
    coded, _ = train(config)
    assert coded["metrics"]["loss"] == pytest.approx(online["metrics"]["loss"], rel=0.02)
    assert coded["metrics"]["loss"] != online["metrics"]["loss"]


@REPEATS
def test_a_store_serves_other_drafters_of_its_taps_and_the_target_stays_off_the_device(tmp_path, data, monkeypatch):
    held = []
    real = main.compile_step

    def compiled(spec, state, frozen, batch, placement):
        held.append((frozen.target, "teacher" in batch))
        return real(spec, state, frozen, batch, placement)

    monkeypatch.setattr(main, "compile_step", compiled)
    capture(world.config(tmp_path / "dspark", data, "dspark", **stored(tmp_path)))
    for method in ("dspark", "dflash"):
        train(world.config(tmp_path / method, data, method, run__steps=2, **stored(tmp_path)))
    assert held == [({}, True), ({}, False)]


ON_A_MESH = """
import sys
from pathlib import Path
from jaxspec.training.featurestore import run
from tests.training import world
place = Path(sys.argv[1])
changes = dict(features__mode="offline", features__storage="float32", optimizer__batch_size=4, mesh__fsdp=2)
config = world.config(place / "run", place / "data.npz", "dspark", features__path=str(place / "mesh"), **changes)
run.run(config, target=world.target(), say=lambda line: None)
"""


@pytest.mark.ci
def test_a_capture_on_a_mesh_is_the_capture_of_one_device(tmp_path, data):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {QUICK}"}
    done = run_python("-c", ON_A_MESH, str(tmp_path), **flags)
    assert done.returncode == 0, done.stderr
    changes = stored(tmp_path) | {"features__shard_examples": 64, "optimizer__batch_size": 4}
    capture(world.config(tmp_path / "run", data, "dspark", **changes))
    found = []
    for name in ("mesh", "features"):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        reader = Reader(tmp_path / name / manifest["shards"][0]["file"])
        found.append([layout_of(manifest).decode(record) for record in reader.read(range(len(reader)))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one["input_ids"], other["input_ids"])
        for part in ("features", "teacher"):
            np.testing.assert_allclose(one[part], other[part], atol=1e-5)


@pytest.mark.ci
def test_a_plan_of_stored_features_counts_them_and_no_target(root):
    """Arguments of the compiled step: the features come in with the batch, the target's layers do not."""
    planned = []
    for changes in ([], ["features.mode=offline", "features.path=x", "features.storage=float32"]):
        keys = [
            "target.source=configs/models/smollm2-135m.json",
            "data.num_anchors=4",
            "run.anchor_attention=reference",
        ]
        config = load_config(TrainConfig, root / "configs" / "quickstart.yaml", [*keys, *changes])
        planned.append(planned_step(config, Placement.of()))
    online, offline = planned
    assert offline.target == 2 * 49152 * 576 * 4 < online.target  # embedding and head
    saved, features = online.target - offline.target, 4 * 224 * 3 * 576 * 4
    assert online.arguments - offline.arguments == pytest.approx(saved - features, rel=1e-3)


def test_what_contradicts_itself_is_refused(tmp_path, data):
    for changes, match in (
        ({"features__path": "x"}, "features.mode and features.path contradict"),
        ({"features__mode": "offline"}, "features.mode and features.path contradict"),
        ({"features__mode": "offline", "features__path": str(tmp_path / "run")}, "features.path and run.directory"),
        ({"features__mode": "spool", "features__path": "x"}, "features.mode and run.checkpoint_every contradict"),
        (
            {"features__mode": "spool", "features__path": "x", "features__spool_shards": 4, "run__checkpoint_every": 5},
            "features.spool_shards to at least 5",
        ),
    ):
        with pytest.raises(ConfigError, match=match.replace(".", r"\.")):
            world.config(tmp_path / "run", data, **changes)
    config = world.config(tmp_path / "run", data, **stored(tmp_path, "spool"), run__checkpoint_every=4)
    path = tmp_path / "again.yaml"
    path.write_text(render(config))
    assert load_config(TrainConfig, path) == config
    with pytest.raises(ConfigError, match=r"features\.mode: online, expected offline or spool; give --out"):
        capture(world.config(tmp_path / "run", data))


@pytest.mark.ci
def test_the_trainer_hears_a_signal_while_it_waits_for_a_shard(tmp_path, data, monkeypatch):
    config = world.config(tmp_path / "run", data, **stored(tmp_path, "spool"), run__checkpoint_every=4)
    asked = []
    real = SpoolBatches.ready

    def ready(self):
        asked.append(real(self))
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return asked[-1]

    monkeypatch.setattr(SpoolBatches, "ready", ready)
    report, _ = train(config)
    assert asked[:3] == [False] * 3
    assert (report["status"], report["reason"], report["step"]) == ("stopped", "SIGTERM", 0)


def test_no_batch_moves_more_than_it_must(tmp_path, data):
    """The padded batch of a step holds what its layout says and nothing of the target."""
    from jaxspec.training.featurestore.codec import Layout
    from jaxspec.training.pipeline import BATCH_FIELDS, batch_shapes

    shapes = batch_shapes(2, 4, 24, Layout(64, 16, "int8"))
    assert set(shapes) == {*BATCH_FIELDS, "codes", "scales", "first", "teacher"}
    assert shapes["codes"].shape == (2, 4, 24, 64) and shapes["codes"].dtype == np.int8
    assert shapes["scales"].shape == (2, 4, 24, 2) and shapes["first"].shape == (2, 4, 64)
    assert shapes["teacher"].dtype == jax.numpy.bfloat16


def test_the_command_says_where_to(tmp_path, data, monkeypatch, capsys):
    """`--out` and `--spool` are the two keys; a spool's account is printed; both together are refused."""
    from jaxspec.cli import main as command

    seen = []
    report = {"status": "finished", "shards": 3, "examples": 7, "bytes": 99, "relative_error": 0.0046}
    monkeypatch.setattr(capturing, "run", lambda config, **options: seen.append(config.features) or report)
    path = tmp_path / "x.yaml"
    path.write_text(render(world.config(tmp_path / "run", data, run__checkpoint_every=4)))
    base = ["capture", "--config", str(path)]
    assert command([*base, "--out", str(tmp_path / "2026"), "features.storage=int8"]) == 0
    assert (seen[0].mode, seen[0].path, seen[0].storage) == ("offline", str(tmp_path / "2026"), "int8")
    assert "3 shards in" in (out := capsys.readouterr().out) and "int8 error 0.460% of a row's norm" in out
    assert command([*base, "--spool", str(tmp_path / "s"), "--json"]) == 0
    assert seen[1].mode == "spool" and json.loads(capsys.readouterr().out) == report
    assert command([*base, "--spool", str(tmp_path / "s"), "--status"]) == 0
    assert json.loads(capsys.readouterr().out)["acknowledged"] == 0 and len(seen) == 2
    assert command([*base, "--spool", "a", "--out", "b"]) == 2
    assert "--out and --spool: both" in capsys.readouterr().err
