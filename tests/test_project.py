"""Rules of the house that a reader can rely on: floors of imports, size of files, no leftovers, one version."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 25_000

# An import goes down, or stays in its room. Rooms on one floor (training, serving) do not see each other.
FLOORS: dict[str, float] = {
    "pallas_kernels": 0,
    "jaxspec": 1,
    "jaxspec.errors": 1,
    "jaxspec.platform": 2,
    "jaxspec.config": 2,
    "jaxspec.parallel": 2.5,
    "jaxspec.models": 3,
    "jaxspec.drafters": 4,
    "jaxspec.checkpoints": 5,
    "jaxspec.decoding": 6,
    "jaxspec.training": 8,
    "jaxspec.serving": 8,
    "jaxspec.api": 8.5,
    "jaxspec.evaluation": 9,
    "jaxspec.commands": 10,
    "jaxspec.cli": 11,
    "jaxspec.__main__": 12,
}
FORBIDDEN = {"torch", "tensorflow", "torchvision", "vllm", "sglang"}


def sources() -> list[Path]:
    return sorted(path for folder in ("jaxspec", "pallas_kernels") for path in (ROOT / folder).rglob("*.py"))


def written() -> list[Path]:
    return [path for path in sources() if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def room(module: str) -> str:
    """The room a module belongs to: `jaxspec.models.rope` -> `jaxspec.models`."""
    first, _, rest = module.partition(".")
    return first if first == "pallas_kernels" or not rest else f"{first}.{rest.partition('.')[0]}"


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of a file, also those inside functions; relative ones resolved."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from jaxspec import models` imports a room; `from jaxspec import __version__` the front door
            for alias in node.names:
                deeper = f"{module}.{alias.name}"
                yield (deeper if module == "jaxspec" and deeper in FLOORS else module), node.lineno


def violations(path: Path, found: list[tuple[str, int]]) -> list[str]:
    own = room(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    if own not in FLOORS:
        return [f"{path.relative_to(ROOT)}: {own} has no floor; add it to FLOORS"]
    wrong = []
    for module, line in found:
        other = room(module)
        if not module.startswith(("jaxspec", "pallas_kernels")) or other == own:
            continue
        if (
            other not in FLOORS
            or FLOORS[other] > FLOORS[own]
            or (FLOORS[other] == FLOORS[own] and other != "jaxspec.errors" and own != "jaxspec.errors")
        ):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {module}")
    return wrong


def test_imports_never_point_upward() -> None:
    front_door = ROOT / "jaxspec" / "__init__.py"  # its `load` is lazy and for type checkers; test_cli checks that
    wrong = [line for path in sources() if path != front_door for line in violations(path, list(imports(path)))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("jaxspec/models/x.py", "jaxspec.drafters.base"),
        ("jaxspec/training/x.py", "jaxspec.serving.worker"),
        ("jaxspec/serving/x.py", "jaxspec.training.data"),
        ("jaxspec/decoding/x.py", "jaxspec.evaluation"),
        ("jaxspec/config/x.py", "jaxspec.models"),
        ("pallas_kernels/x/api.py", "jaxspec.errors"),
        ("jaxspec/evaluation/x.py", "jaxspec.cli"),
    ],
)
def test_the_floor_check_sees_a_wrong_import(file: str, module: str) -> None:
    assert violations(ROOT / file, [(module, 1)])


def test_no_other_framework_on_any_path() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources()
        for module, line in imports(path)
        if module.partition(".")[0] in FORBIDDEN
    ]
    assert not found, "\n".join(found)


def test_files_stay_small() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes"
        for path in written()
        if path.stat().st_size > LIMIT_BYTES
    ]
    assert not large, f"over {LIMIT_BYTES} bytes, split them: {large}"


def leftovers(path: Path) -> Iterator[str]:
    """Unfinished or swallowed: TODO marks, NotImplementedError, handlers that do nothing."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: NotImplementedError"
        if isinstance(node, ast.ExceptHandler) and all(isinstance(item, ast.Pass) for item in node.body):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: an exception is swallowed"


def test_nothing_unfinished_or_swallowed() -> None:
    found = [line for path in written() for line in leftovers(path)]
    assert not found, "\n".join(found)


def tracked() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


MACHINE_PATH = re.compile(
    r"(?<![\w.~])/(?:" + "|".join(("tmp", "root", "work", "home", "Users", "mnt")) + r")/[A-Za-z0-9_.]"
)


def test_no_path_of_one_machine_in_any_text() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert not found, "\n".join(found)


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == jaxspec.__version__
    assert f"## {jaxspec.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["py311.txt", "py312.txt"])
def test_constraints_hold_names_and_versions_only(file: str) -> None:
    lines = [
        line
        for line in (ROOT / "constraints" / file).read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    wrong = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line)]
    assert len(lines) > 50 and not wrong, wrong


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["demo"],
    ]
    names = {re.split(r"[\s<>=;\[]", line)[0].lower().replace("_", "-") for line in wanted}
    for file in ("py311.txt", "py312.txt"):
        pinned = {
            line.partition("==")[0] for line in (ROOT / "constraints" / file).read_text(encoding="utf-8").splitlines()
        }
        assert names <= pinned, f"{file}: {sorted(names - pinned)} not pinned; run make constraints"


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for file in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z0-9-]+)", (ROOT / file).read_text(encoding="utf-8")))
        assert {name for name in named if not name.startswith("test-slow-")} <= targets, file


@pytest.mark.ci
def test_the_wheel_says_that_both_packages_are_typed(tmp_path: Path) -> None:
    for name in ("jaxspec", "pallas_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        names = wheel.namelist()
    assert {"jaxspec/py.typed", "pallas_kernels/py.typed"} <= set(names)
