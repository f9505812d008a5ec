"""Applies one-line faults to copies of the project and sees whether a test notices; the faults: `tests/mutants.py`.

Every fault gets a copy of its own, in which the named tests must fail. First the same tests run on an unchanged copy,
where they must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COPIED = (
    "jaxspec",
    "pallas_kernels",
    "tests",
    "configs",
    "constraints",
    "demo",
    "tools",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "train.py",
    "serve.py",
)
LIMIT_SECONDS = 600
_NO_TESTS = 5  # pytest's exit code when nothing was collected: a wrong test name must not count as a kill


@dataclass(frozen=True)
class Mutant:
    """One change of text that makes the program wrong and keeps it running.

    `old` must occur exactly once in `file`. `tests` are what pytest is given: files or node ids (no -k, so that the
    unchanged tree can be checked with all of them at once). `why` says which trap it is.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed: bool
    why: str
    seconds: float


def copy(destination: Path) -> Path:
    """A copy of the project without caches; golden cases are linked, since nothing changes them."""
    destination.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", "golden")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=skip)
        elif source.is_file():
            shutil.copy2(source, destination / name)
    if (ROOT / "tests" / "golden").is_dir():
        (destination / "tests" / "golden").symlink_to(ROOT / "tests" / "golden", target_is_directory=True)
    return destination


def apply(mutant: Mutant, tree: Path) -> str | None:
    """Changes the one place; returns what is wrong with the mutant itself, or None."""
    file = tree / mutant.file
    if not file.is_file():
        return f"{mutant.file} does not exist"
    text = file.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        return f"`old` occurs {count} times in {mutant.file}, expected once"
    changed = text.replace(mutant.old, mutant.new)
    if changed == text:
        return "`new` equals `old`"
    file.write_text(changed, encoding="utf-8")
    return None


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """(pytest's exit code, the end of its output). Everything is imported from the copy."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-rf",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--rootdir",
        str(tree),
        *tests,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"stopped after {LIMIT_SECONDS} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])


def judge(mutant: Mutant, scratch: Path) -> Verdict:
    start = time.monotonic()
    tree = copy(scratch / mutant.id)
    wrong = apply(mutant, tree)
    if wrong:
        return Verdict(mutant, False, wrong, time.monotonic() - start)
    code, output = run_tests(tree, mutant.tests)
    shutil.rmtree(tree, ignore_errors=True)
    seconds = time.monotonic() - start
    if code == 0:
        return Verdict(mutant, False, f"NOT NOTICED by {' '.join(mutant.tests)}", seconds)
    if code != 1:
        return Verdict(mutant, False, f"pytest ended with {code}, which is no failed test:\n{output}", seconds)
    failed = next((line for line in output.splitlines() if line.startswith("FAILED")), "a test failed")
    return Verdict(mutant, True, failed.partition(" - ")[0], seconds)


def clean_passes(mutants: list[Mutant], scratch: Path) -> bool:
    """The tests that the faults name, on an unchanged copy."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests if not test.startswith("-")))
    code, output = run_tests(copy(scratch / "clean"), tests)
    if code:
        print(output)
        print("the unchanged tree does not pass" if code != _NO_TESTS else "no tests were found")
    return code == 0


def main(mutants: list[Mutant], description: str) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", metavar="ID", help="faults whose id holds this text")
    parser.add_argument("--list", action="store_true", help="list the faults and stop")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    args = parser.parse_args()
    repeated = {m.id for m in mutants if sum(m.id == other.id for other in mutants) > 1}
    if repeated:
        parser.error(f"ids are given twice: {', '.join(sorted(repeated))}")
    chosen = [mutant for mutant in mutants if not args.only or any(text in mutant.id for text in args.only)]
    if not chosen:
        parser.error(f"no fault has an id with {args.only}")
    if args.list:
        for mutant in chosen:
            print(f"{mutant.id:<34} {mutant.file:<40} {mutant.why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if not clean_passes(chosen, Path(folder)):
            return 1
        killed = 0
        with ThreadPoolExecutor(args.jobs) as pool:
            for verdict in pool.map(lambda mutant: judge(mutant, Path(folder)), chosen):
                killed += verdict.killed
                state = "pass" if verdict.killed else "FAIL"
                print(f"{state} {verdict.mutant.id} ({verdict.seconds:.0f} s): {verdict.why}", flush=True)
    print(f"{killed} passed, {len(chosen) - killed} failed")
    return 0 if killed == len(chosen) else 1
