"""The smoke run of a method's config: the command that the config's own header gives, as a user would type it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "smollm2"


def methods() -> list[str]:
    """Methods with a config."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def overrides(method: str) -> list[str]:
    """`section.key=value` words of the header's smoke command. Raises ValueError where the header has none."""
    text = (CONFIGS / f"{method}.yaml").read_text(encoding="utf-8")
    found = re.search(r"^# smoke:(.*?)^#( \w+:|$)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{method}.yaml: no smoke command in the header")
    words = shlex.split(re.sub(r"^#", "", found[1], flags=re.MULTILINE))
    start = ["python", "train.py", "--config", f"configs/smollm2/{method}.yaml"]
    if words[: len(start)] != start:
        raise ValueError(f"{method}.yaml: the smoke command begins with {words[: len(start)]}, expected {start}")
    return words[len(start) :]


def directory(method: str) -> Path:
    """Where the smoke run keeps its log."""
    return ROOT / "out" / "smoke" / method


def export(method: str) -> Path:
    """Where the smoke run leaves its drafter."""
    return directory(method) / "drafter"


def train(method: str, *more: str) -> None:
    """Runs the smoke command with `more` overrides; a run that is finished already returns at once."""
    command = [sys.executable, "train.py", "--config", f"configs/smollm2/{method}.yaml", *overrides(method), *more]
    subprocess.run(command, cwd=ROOT, check=True)
