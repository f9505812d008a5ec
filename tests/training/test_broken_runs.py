"""Runs that something from outside breaks: a full disk, a damaged checkpoint, a folder taken away, data that teaches
nothing. Each ends in one typed error, and none in a drafter that was not trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.config import OptimizerSection
from jaxspec.errors import CheckpointError, ConfigError, DataError, ResumeError
from jaxspec.training import optimizer as opt
from jaxspec.training.anchors import any_anchor, supervised_anchors
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.directory import MARKER, check, locked, prepare, writing
from jaxspec.training.loop import TrainingError
from jaxspec.training.state import create
from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK, environment
from tests.training import world
from tests.training.test_checkpoint import state_of
from tests.training.test_run import Lines, train

pytestmark = pytest.mark.ci

# Trains `directory`; at step 8, once the checkpoint of step 5 is whole, no file may grow beyond so many bytes.
CHILD = """
import resource, sys, time
from pathlib import Path
from jaxspec.errors import JaxspecError
from tests.training import world
from tests.training.test_run import Lines
from jaxspec.training import main

directory, limit = Path(sys.argv[1]), int(sys.argv[3])

def fill():
    while not (directory / "checkpoints" / "5").exists():
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

config = world.config(directory, Path(sys.argv[2]), run__checkpoint_every=5, run__keep=1)
try:
    report = main.run(config, target=world.target(), reporter=Lines({8: fill} if limit >= 0 else {}))
    print(report["status"], report["resumed_from"], report["step"])
except JaxspecError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of a file")
@pytest.mark.parametrize("limit", [6000, pytest.param(0, marks=REPEATS)], ids=["checkpoint", "log"])
def test_a_full_disk_is_one_error_and_the_run_goes_on_from_its_last_checkpoint(tmp_path, limit):
    """6000 bytes are room for the log, not for the checkpoint of step 10; 0 are room for nothing."""
    data, place = world.write_data(tmp_path / "data.npz"), tmp_path / "run"

    def child(limit: int) -> str:
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(place), str(data), str(limit)]
        quick = environment(XLA_FLAGS=QUICK)
        done = subprocess.run(command, env=quick, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    line = child(limit)
    assert line.startswith("CheckpointError: ") and line.count("\n") == 1, line
    assert str(place) in line and "File too large" in line and "the same command" in line
    assert child(-1).split() == ["finished", "5", "10"]


@pytest.mark.parametrize("call", ["save", "wait_until_finished"])
def test_a_writer_that_fails_is_a_checkpoint_error_that_names_the_folder(tmp_path, monkeypatch, call):
    checkpoints = Checkpoints(tmp_path / "c", 2)

    def fails(*_: object, **__: object) -> None:
        raise ValueError("OUT_OF_RANGE: Error writing a file of long name [os_error_code='28']")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, call, fails)
        with pytest.raises(CheckpointError, match=rf"{tmp_path / 'c'}.*No space left on device"):
            checkpoints.save(1, state_of(), {})
            checkpoints.wait()
    checkpoints.close()


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture
def three_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 3)
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(), {"step": step})
    checkpoints.wait()
    checkpoints.close()
    return tmp_path / "run" / "checkpoints"


def resumable(folder: Path) -> int | None:
    checkpoints = Checkpoints(folder, 3)
    try:
        return checkpoints.resumable()
    finally:
        checkpoints.close()


@pytest.mark.parametrize("how", ["half", "gone", "flipped"])
@pytest.mark.parametrize("name", ["meta/metadata", "state/_METADATA", "state/d/*", "state/manifest.ocdbt",
                                  "state/array_metadatas/*"])  # fmt: skip
def test_a_damaged_checkpoint_is_named_with_the_intact_one_before_it(three_checkpoints, name, how, capfd):
    assert resumable(three_checkpoints) == 3
    (file,) = (three_checkpoints / "3").glob(name)
    content = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "half":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    with pytest.raises(ResumeError, match=r"step 3, is damaged \(.*step 2 is intact: .*delete .*/3$"):
        resumable(three_checkpoints)
    assert "Traceback" not in capfd.readouterr().err
    shutil.rmtree(three_checkpoints / "3")  # what the message says
    assert resumable(three_checkpoints) == 2


def test_a_truncated_array_is_found(tmp_path):
    """An array too large to stand in the index: the index is whole, only reading the array tells."""
    checkpoints = Checkpoints(tmp_path / "c", 3)
    weights = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    checkpoints.save(1, create(weights, opt.build(OptimizerSection()), jax.random.key(0)), {})
    checkpoints.wait()
    checkpoints.close()
    assert resumable(tmp_path / "c") == 1
    file = max((path for path in (tmp_path / "c" / "1" / "state").rglob("d/*")), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    assert len(content) > 4 * 64 * 64 * 0.8
    file.write_bytes(content[:1000])
    with pytest.raises(ResumeError, match=r"step 1, is damaged .*no older one is intact"):
        resumable(tmp_path / "c")


def test_the_intact_checkpoint_is_looked_for_behind_every_damaged_one(three_checkpoints):
    for step in (3, 2):
        (three_checkpoints / str(step) / "meta" / "metadata").write_text("{")
    with pytest.raises(ResumeError, match=r"step 1 is intact: .*delete .*/3 and .*/2$"):
        resumable(three_checkpoints)
    (three_checkpoints / "1" / "meta" / "metadata").write_text("{")
    with pytest.raises(ResumeError, match=r"no older one is intact: set run\.fresh=true"):
        resumable(three_checkpoints)


def test_a_run_with_a_damaged_checkpoint_is_refused_until_the_user_gives_it_up(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    config = world.config(tmp_path / "run", data, run__checkpoint_every=5)
    train(config)
    (tmp_path / "run" / "checkpoints" / "10" / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(ResumeError, match="step 5 is intact"):
        train(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "10")
    report, _ = train(config)
    assert (report["status"], report["resumed_from"], report["step"]) == ("finished", 5, 10)


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_link_to_a_run_directory_takes_the_same_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "run")
    second = locked(tmp_path / "elsewhere" / "link")
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process"), second:
        raise AssertionError("the second one must not get in")


def test_a_fresh_start_through_a_link_moves_the_run_and_not_the_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")  # to a folder that is made by the first run
    assert prepare(link, fresh=False) is None and (tmp_path / "run" / MARKER).is_file()
    assert prepare(link, fresh=True) == tmp_path / "run.previous"
    assert link.is_symlink() and (tmp_path / "run" / MARKER).is_file()


def test_links_in_a_circle_are_a_config_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for use in (lambda place: check(place, fresh=False), lambda place: locked(place).__enter__()):
        with pytest.raises(ConfigError, match=r"run\.directory"):
            use(tmp_path / "a")


@pytest.mark.parametrize("every", [0, 5])
def test_a_run_directory_that_is_deleted_under_a_run_is_one_error(tmp_path, every):
    place, data = tmp_path / "run", world.write_data(tmp_path / "data.npz")

    def delete() -> None:
        while every and not (place / "checkpoints" / "5").exists():
            time.sleep(0.01)
        shutil.rmtree(place)

    with pytest.raises(CheckpointError, match=rf"run\.directory {place}.*moved or deleted"):
        train(world.config(place, data, run__checkpoint_every=every), reporter=Lines({8: delete}))
    assert not place.exists()  # nor made anew by the export


def test_a_run_directory_that_cannot_be_made_is_not_called_deleted(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(CheckpointError, match="No space left on device"), writing(tmp_path / "run"):
        prepare(tmp_path / "run", fresh=False)


# -- data that teaches nothing ----------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[tuple[int, int]]) -> Path:
    """Sequences of these lengths, supervised from these places on."""
    lengths = [length for length, _ in rows]
    tokens = np.arange(sum(lengths)) % 30 + 2
    np.savez(path, tokens=tokens, offsets=np.cumsum([0, *lengths]), prompt_lengths=[start for _, start in rows])
    return path


@pytest.mark.parametrize("rows", [[(6, 2)] * 4, [(16, 12)] * 4], ids=["shorter than a block", "answers at the end"])
def test_data_without_a_place_for_an_anchor_is_refused_before_anything_is_written(tmp_path, rows):
    data = write_rows(tmp_path / "data.npz", rows)
    config = world.config(tmp_path / "run", data, data__anchor_rule="legacy", drafter__block_size=8)
    with pytest.raises(DataError, match=r"data\.anchor_rule.*no place for an anchor in any of the 4 sequences"):
        train(config)
    assert not (tmp_path / "run").exists()
    report, _ = train(world.config(tmp_path / "run", data, drafter__block_size=8))  # the other rule has places
    assert report["status"] == "finished" and report["metrics"]["supervised_anchors"] > 0


def test_the_legacy_rule_needs_two_candidates():
    mask = np.arange(16) >= 8
    assert not any_anchor([mask], 16, "legacy", 8)  # candidates end at 16 - 8
    assert any_anchor([mask], 16, "legacy", 7)
    assert not any_anchor([mask, mask], 16, "legacy", 8)
    assert any_anchor([mask], 16, "adjacent", 8) and not any_anchor([mask[:0]], 16, "adjacent", 8)


@pytest.mark.parametrize("limit", [{"run__steps": 10}, {"run__steps": 60, "run__log_every": 1}], ids=["end", "early"])
def test_a_run_in_which_no_step_learned_anything_exports_nothing(tmp_path, monkeypatch, limit):
    """Past the first check: anchors can be placed, but none is ever kept."""
    monkeypatch.setattr("jaxspec.training.main.any_anchor", lambda *_: True)
    data = write_rows(tmp_path / "data.npz", [(16, 12)] * 4)
    config = world.config(tmp_path / "run", data, data__anchor_rule="legacy", drafter__block_size=8, **limit)
    with pytest.raises(TrainingError, match=rf"no supervised anchor in all {min(limit['run__steps'], 20)} steps"):
        train(config)
    assert not (tmp_path / "run" / "export").exists()


def test_supervised_anchors_are_counted_in_the_log(tmp_path):
    data = world.write_data(tmp_path / "data.npz")
    train(world.config(tmp_path / "run", data))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["supervised_anchors"] == line["anchors"] > 0 for line in lines)


def test_an_anchor_with_nothing_supervised_behind_it_is_not_counted():
    mask = np.zeros((2, 8), bool)
    mask[0, [1, 2, 5]] = mask[1, 7] = True
    anchors, keep = np.array([[1, 2, 5, 0], [4, 7, 3, 0]]), np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    for proposals, expected in [(2, [[1, 0, 0, 0], [0, 0, 0, 0]]), (3, [[1, 1, 0, 0], [1, 0, 0, 0]])]:
        np.testing.assert_array_equal(supervised_anchors(anchors, keep, mask, proposals), np.array(expected, bool))
