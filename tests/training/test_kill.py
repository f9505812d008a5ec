"""SIGKILL at the worst moments: the same command afterwards ends where an undisturbed run ends, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK, environment
from tests.training import world
from tests.training.test_run import assert_same

# One process that trains `directory` to the end unless `mode` kills it. "before": at step 5, nothing is saved yet.
# "between": at step 8, once the checkpoint of step 5 is whole. "during 5", "during 10": from a thread, the moment the
# unfinished folder of that checkpoint appears.
CHILD = """
import os, signal, sys, threading
from pathlib import Path
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[4])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
from tests.training import world
from tests.training.test_run import Lines
from jaxspec.training import main

directory, data, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)

def watch(step):
    while True:
        if any((directory / "checkpoints").glob(step + ".orbax-checkpoint-tmp*")):
            kill()

def kill_when_saved():
    pause = threading.Event()
    while not (directory / "checkpoints" / "5").exists():
        pause.wait(0.01)
    kill()

at = {"before": {5: kill}, "between": {8: kill_when_saved}}.get(mode, {})
if mode.startswith("during"):
    threading.Thread(target=watch, args=(mode.split()[1],), daemon=True).start()
every = 20 if mode == "before" else 5
reporter = Lines(at)
report = main.run(world.config(directory, data, run__checkpoint_every=every), target=world.target(), reporter=reporter)
print(report["status"], report["resumed_from"], report["step"])
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An undisturbed run of 10 steps, its data, and the folder of compiled programs."""
    place = tmp_path_factory.mktemp("straight")
    data = world.write_data(place / "data.npz")
    assert child(place / "run", data, "none", place / "programs").stdout.split() == ["finished", "None", "10"]
    return place / "run", data, place / "programs"


def child(directory: Path, data: Path, mode: str, programs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(directory), str(data), mode, str(programs)]
    return subprocess.run(
        command, env=environment(XLA_FLAGS=QUICK), capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "resumes_from"),
    [
        ("before", "None"),
        ("during 10", "5"),
        pytest.param("between", "5", marks=REPEATS),
        pytest.param("during 5", "None", marks=REPEATS),
    ],
)
def test_B56_ten_steps_equal_a_killed_and_resumed_run(tmp_path, straight, mode, resumes_from):
    whole, data, programs = straight
    killed = child(tmp_path / "run", data, mode, programs)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()]
    if mode.startswith("during"):
        step = mode.split()[1]
        assert step not in left and any(name.startswith(step + ".") for name in left), f"the kill came too late: {left}"
    assert not (tmp_path / "run" / "report.json").exists() and not (tmp_path / "run" / "export").exists()
    done = child(tmp_path / "run", data, "none", programs)
    assert done.stdout.split() == ["finished", resumes_from, "10"], done.stderr
    assert_same(whole, tmp_path / "run", 10)


@REPEATS
def test_a_second_resume_equals_the_first(tmp_path, straight):
    """Two deaths in one run, the second after a resume, and different processes all the way."""
    whole, data, programs = straight
    for expected in ("between", "between"):
        assert child(tmp_path / "run", data, expected, programs).returncode == -signal.SIGKILL
    assert child(tmp_path / "run", data, "none", programs).stdout.split() == ["finished", "5", "10"]
    assert_same(whole, tmp_path / "run", 10)
