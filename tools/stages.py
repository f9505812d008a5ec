"""Runs the stages of `make test` one after the other, prints the seconds of each and ends with an honest exit code.

A failed stage does not stop the later ones (one run shows everything that is wrong), except setup, which all need.
Runs on the standard library alone: the first stage makes the environment that the others use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON, PYTHON312 = ".venv/bin/python", ".venv-3.12/bin/python"
WORKERS = "2"
NEWEST = (
    "tests/decoding/test_identity.py",
    "tests/decoding/test_smollm2.py",
    "tests/drafters/test_dflash2_serving.py",
    "tests/drafters/test_dflash2_training.py",
    "tests/drafters/test_eagle_identity.py",
    "tests/drafters/test_tree_confidence.py",
    "tests/drafters/test_untrained_methods.py",
    "tests/oracle",
    "tests/serving/test_profile.py",
    "tests/test_bench_devices.py",
    "tests/test_bench_training.py",
    "tests/training/test_broken_runs.py",
    "tests/training/test_run.py",
    "tests/training/test_step.py",
)
"""Files whose longer tests run on one Python alone: on the newest, with the newest jax, where there is one, so that
neither takes 15 minutes. Without it they run with the rest."""


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    limit: int
    """Seconds after which the stage is stopped and counts as failed."""
    needed: bool = False
    only_if: str | None = None
    """A path that must exist, or the stage is left out (and says so)."""


def _pytest(python: str, *more: str) -> tuple[str, ...]:
    return (python, "-m", "pytest", "-q", "-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder", *more)


def stages() -> Iterator[Stage]:
    """Each as it comes up: whether there is a 3.12 is known after the set-up."""
    yield Stage("setup", ("make", "--no-print-directory", "setup"), 150, needed=True)
    yield Stage("setup-312", ("make", "--no-print-directory", "setup-312"), 150)
    yield Stage("lint", ("make", "--no-print-directory", "lint"), 100)
    stamp = ".venv-3.12/.stamp-setup"
    elsewhere = [f"--fast-only={path}" for path in NEWEST] if (ROOT / stamp).exists() else []
    yield Stage("tests", _pytest(PYTHON, "--durations=25", *elsewhere), 1300)
    yield Stage("fast tests on 3.12", _pytest(PYTHON312, "-m", "not ci"), 360, only_if=stamp)
    yield Stage("longer tests on 3.12", _pytest(PYTHON312, "-m", "ci", *NEWEST), 900, only_if=stamp)
    yield Stage("slow results", (PYTHON, "tools/slow_results.py", "stale"), 20)


def run(stage: Stage) -> bool:
    if stage.only_if and not (ROOT / stage.only_if).exists():
        print(f"stage {stage.name}: left out, {stage.only_if} does not exist", flush=True)
        return True
    print(f"stage {stage.name}: {' '.join(stage.command)}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(stage.command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(timeout=stage.limit)
        outcome = "ok" if code == 0 else f"FAILED (exit {code})"
    except subprocess.TimeoutExpired:
        code, outcome = 1, f"FAILED (stopped after {stage.limit} s)"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the usual case: the whole group has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f"stage {stage.name}: {time.monotonic() - start:.0f} s, {outcome}", flush=True)
    return code == 0


def main() -> int:
    start, failed = time.monotonic(), []
    for stage in stages():
        if run(stage):
            continue
        failed.append(stage.name)
        if stage.needed:
            break
    verdict = "all stages passed" if not failed else f"failed: {', '.join(failed)}"
    print(f"total: {time.monotonic() - start:.0f} s, {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
