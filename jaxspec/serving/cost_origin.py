"""Where a cost table comes from: the manifest beside it, and the refusal of a table that was measured elsewhere.

The table's own format is the field's and says nothing of the machine; a table of another device, model or drafter would
be wrong without a sign of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxspec.errors import ConfigError, problem
from jaxspec.serving.cost import CostTable, save_cost_table
from jaxspec.serving.cost_fit import Cell, misfit

__all__ = ["check_origin", "manifest_path", "origin", "save_profile"]


def manifest_path(table: Path) -> Path:
    """`table.json` -> `table.manifest.json`."""
    return table.with_suffix(".manifest.json")


def origin(target: Any, draft: Any, num_proposals: int) -> dict[str, str]:
    """What a round's cost depends on, of a loaded target and drafter: the device's kind, shapes and dtype."""
    config, embedding = target.model.config, target.model.embedding(target.params)
    device = next(iter(embedding.devices()))
    shape = f"{config.num_layers} layers, hidden {config.hidden_size}, MLP {config.intermediate_size}"
    weights = sum(leaf.size for leaf in jax.tree.leaves(draft.params))
    return {
        "device": device.device_kind,
        "dtype": embedding.dtype.name,
        "target": f"{config.family}, {shape}, vocabulary {config.vocab_size}",
        "drafter": f"{draft.drafter.method}, {num_proposals} proposals, {weights} parameters",
    }


def save_profile(
    table: CostTable, cells: Sequence[Cell], made_for: dict[str, str], path: Path, **about: Any
) -> dict[str, Any]:
    """Writes the table and, beside it, its manifest, which is returned."""
    save_cost_table(table, path)
    median, worst = misfit(table, cells)
    packages = ("jax", "jaxlib", "jaxspec-decoding")
    manifest = {
        **about,
        "sha256": _digest(path),
        "made_for": made_for,
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "misfit": {"median": median, "worst": worst},
        "cells": [asdict(cell) for cell in cells],
    }
    manifest_path(path).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_origin(path: Path, here: dict[str, str]) -> str | None:
    """ConfigError when the manifest beside the table says that it was measured for something else, or that it is
    another table's. Returns a line for the operator where there is no manifest (another server's table)."""
    manifest = manifest_path(path)
    field = f"engine.cost_table: {path}"
    if not manifest.exists():
        return f"{path} has no manifest ({manifest.name}): nothing says that it was measured on this {here['device']}"
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        digest, made_for = said["sha256"], dict(said["made_for"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(problem(f"{field}: {manifest.name}", str(error), "a manifest of jaxspec profile")) from error
    again = "measure one here: jaxspec profile"
    if digest != _digest(path):
        raise ConfigError(problem(field, f"another table than {manifest.name} describes", "its own manifest", again))
    for name, value in here.items():
        if made_for.get(name) != value:
            found = f"a table that was measured for the {name} {made_for.get(name)!r}"
            raise ConfigError(problem(field, found, f"{value!r}", again))
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
