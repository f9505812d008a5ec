"""The long checks and their results.

    tools/slow_results.py run NAME    runs the tests marked slow("NAME") and writes results/slow/NAME.json
    tools/slow_results.py stale       prints which results are older than the code they cover
    tools/slow_results.py list        names of the long checks

A result holds the commit, seeds, counts, seconds and the covered paths; it is stale when a covered path changed in a
later commit or in the working tree. Being stale is reported, not an error: the person who changed the code decides
when to rerun.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "slow"
LIMIT_SECONDS = 1800


def _git(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


def age(result: dict[str, Any]) -> str | None:
    """Why a result is older than its code, or None when it is current."""
    covers = result.get("covers") or ["jaxspec"]
    commit = result.get("commit")
    if not commit or _git("cat-file", "-e", f"{commit}^{{commit}}")[0]:
        return f"its commit {str(commit)[:12]} is not in this repository"
    code, changed = _git("log", "--format=%h %s", f"{commit}..HEAD", "--", *covers)
    if code:
        return "git cannot compare it with HEAD"
    if changed:
        lines = changed.splitlines()
        return f"{len(lines)} later commit(s) touch {', '.join(covers)}; the newest is {lines[0]}"
    if _git("status", "--porcelain", "--", *covers)[1]:
        return f"uncommitted changes in {', '.join(covers)}"
    return None


def stale() -> int:
    files = sorted(RESULTS.glob("*.json"))
    if not files:
        print("results/slow: no results yet")
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        why = age(result)
        state = f"OLDER than its code: {why}; rerun make test-slow-{file.stem}" if why else "current"
        print(f"{file.relative_to(ROOT)}: {result.get('outcome', '?')}, {result.get('seconds', 0):.0f} s, {state}")
    return 0


def run(name: str) -> int:
    out = RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-s", f"--slow={name}", f"--slow-result={out}",
        "-o", f"timeout={LIMIT_SECONDS}",
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("name")
    commands.add_parser("stale")
    commands.add_parser("list")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.name)
    if arguments.command == "stale":
        return stale()
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "--slow", "?"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
