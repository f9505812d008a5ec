"""Golden cases on disk: finding them and reading what each says of itself (kind, config, checks, tensors)."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxspec.errors import DataError, problem

CASE_FILE = "case.json"
INPUTS_FILE = "inputs.safetensors"
EXPECTED_FILE = "expected.safetensors"
MODES = {"exact": (), "close": ("rtol", "atol"), "scaled": ("relative_to_max", "atol"), "diagnostic": ()}

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Check:
    """How one expected tensor is compared. `margin` names the tensor whose rows at or below `above` are excused."""

    mode: str
    rtol: float = 0.0
    atol: float = 0.0
    relative_to_max: float = 0.0
    margin: str | None = None
    above: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One folder with a case.json. `name` is its path below the folder that was searched."""

    name: str
    folder: Path
    kind: str
    config: Mapping[str, Any]
    checks: Mapping[str, Check]
    dtypes: Mapping[str, str]  # of the expected tensors, as case.json declares them
    target_dir: Path | None
    draft_dir: Path | None

    @functools.cached_property
    def inputs(self) -> Tensors:
        """Tensors of inputs.safetensors."""
        return read_tensors(self.folder / INPUTS_FILE)

    @functools.cached_property
    def expected(self) -> Tensors | None:
        """Tensors of expected.safetensors, or None where the folder has none."""
        path = self.folder / EXPECTED_FILE
        return read_tensors(path) if path.exists() else None

    def wants(self, name: str) -> bool:
        """Whether a tensor of this name is among the checks."""
        return name in self.checks

    def input(self, name: str) -> np.ndarray:
        """One input tensor; DataError when the case does not have it."""
        if name not in self.inputs:
            raise DataError(
                problem(f"{self.name}/{INPUTS_FILE}", f"no tensor {name!r}", f"the input that kind {self.kind} needs")
            )
        return self.inputs[name]

    def arrays(self, *names: str) -> Tensors:
        """Inputs as a compiled step takes them: integers of 64 bits as int32, everything else as it is."""
        found = {name: self.input(name) for name in names}
        return {name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in found.items()}

    def setting(self, name: str) -> Any:
        """One value of the case's config; DataError when it is not there."""
        if name not in self.config:
            raise DataError(
                problem(f"{self.name}/{CASE_FILE}: config.{name}", "nothing", f"the value that kind {self.kind} needs")
            )
        return self.config[name]


def find_cases(root: Path) -> list[Path]:
    """Every folder below `root` (itself included) that holds a case.json, sorted by path. Links are followed.

    A folder is entered once, however many links lead to it, so loops end. Raises DataError if `root` is no folder.
    """
    if not root.is_dir():
        raise DataError(problem("conformance folder", str(root), "a folder that exists"))
    return sorted(_walk(root, set()), key=lambda path: path.relative_to(root).as_posix())


def _walk(folder: Path, seen: set[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    if (folder / CASE_FILE).is_file():
        yield folder
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            yield from _walk(child, seen)


def case_name(folder: Path, root: Path) -> str:
    """Path of a case below the searched folder; the folder's own name where they are the same."""
    relative = folder.relative_to(root).as_posix()
    return folder.resolve().name if relative == "." else relative


def read_case(folder: Path, root: Path) -> Case:
    """Reads case.json. Raises DataError when it is unreadable or says something this format does not have."""
    name, path = case_name(folder, root), folder / CASE_FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(problem(f"{name}/{CASE_FILE}", str(error), "a readable JSON file")) from error
    if not isinstance(said, dict):
        raise DataError(problem(f"{name}/{CASE_FILE}", type(said).__name__, "a JSON object"))
    for key, kind in (("kind", str), ("checks", dict)):
        if not isinstance(said.get(key), kind):
            raise DataError(problem(f"{name}/{CASE_FILE}: {key}", repr(said.get(key)), f"a {kind.__name__}"))
    if not said["checks"]:
        raise DataError(problem(f"{name}/{CASE_FILE}: checks", "nothing", "at least one tensor"))
    declared = said.get("expected") or {}
    return Case(
        name=name,
        folder=folder,
        kind=said["kind"],
        config=said.get("config") or {},
        checks={tensor: _check(name, tensor, entry) for tensor, entry in said["checks"].items()},
        dtypes={tensor: entry["dtype"] for tensor, entry in declared.items() if "dtype" in entry},
        target_dir=folder / said["target_dir"] if said.get("target_dir") else None,
        draft_dir=folder / said["draft_dir"] if said.get("draft_dir") else None,
    )


def _check(case: str, tensor: str, entry: Any) -> Check:
    field = f"{case}/{CASE_FILE}: checks.{tensor}"
    mode = entry.get("mode") if isinstance(entry, dict) else None
    if mode not in MODES:
        raise DataError(problem(f"{field}.mode", repr(mode), f"one of {', '.join(MODES)}"))
    unknown = set(entry) - {"mode", "rows_where", *MODES[mode]}
    missing = set(MODES[mode]) - set(entry)
    if unknown or missing:
        raise DataError(
            problem(field, f"unknown {sorted(unknown)}, missing {sorted(missing)}", f"the keys of mode {mode!r}")
        )
    rows = entry.get("rows_where")
    if rows is not None and set(rows) != {"tensor", "above"}:
        raise DataError(problem(f"{field}.rows_where", repr(rows), "the keys tensor and above"))
    numbers: dict[str, Any] = {key: float(entry[key]) for key in MODES[mode]}
    for key, number in numbers.items():
        if not 0 <= number < math.inf:
            raise DataError(problem(f"{field}.{key}", repr(number), "a tolerance of 0 or more"))
    if rows is not None:
        return Check(mode, **numbers, margin=rows["tensor"], above=float(rows["above"]))
    return Check(mode, **numbers)


def read_tensors(path: Path) -> Tensors:
    """All tensors of one safetensors file. Raises DataError when it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(problem(path.name, str(error), "a readable safetensors file")) from error
