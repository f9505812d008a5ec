"""Writes constraints/py3XX.txt: `name==version` of everything the project installs, as the running Python has it.

    .venv/bin/python tools/freeze_constraints.py
    .venv-3.12/bin/python tools/freeze_constraints.py

It follows the dependencies of pyproject.toml (extras demo and dev included) through the installed packages, so packages
that happen to lie in the environment for another reason are left out.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("demo", "dev")


def closure(requirements: list[str]) -> tuple[dict[str, str], list[str]]:
    """Name -> version of all that `requirements` pull in on this machine, and the names that are not installed."""
    found: dict[str, str] = {}
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    todo = [(text, "") for text in requirements]
    while todo:
        text, extra = todo.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if all((name, wanted) in seen for wanted in extras):
            continue
        seen.update((name, wanted) for wanted in extras)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        found[name] = distribution.version
        todo += [(line, wanted) for line in distribution.requires or () for wanted in {*extras, ""}]
    return found, sorted(set(missing))


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    found, missing = closure(wanted)
    out = ROOT / "constraints" / f"py{sys.version_info[0]}{sys.version_info[1]}.txt"
    head = f"# Made by tools/freeze_constraints.py on Python {sys.version_info[0]}.{sys.version_info[1]}.\n"
    out.write_text(head + "".join(f"{name}=={found[name]}\n" for name in sorted(found)), encoding="utf-8")
    print(f"{out.relative_to(ROOT)}: {len(found)} packages")
    if missing:
        print(f"not installed here, so not pinned: {', '.join(missing)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
