"""Tile sizes as data: `pallas_kernels/<kernel>/tuning.json`, a table a chip, a heuristic where it has no entry."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import jax

log = logging.getLogger(__name__)


def chip() -> str:
    """Kind of the device that is compiled for: the abstract mesh's, where one is set, else the default device's."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind


def tiles(kernel: str, key: str, heuristic: Mapping[str, int]) -> dict[str, int]:
    """The chip's entry for `key`, or the heuristic with one warning a chip, kernel and key."""
    return dict(_tiles(kernel, chip(), key, tuple(heuristic.items())))


@functools.cache
def _tiles(kernel: str, kind: str, key: str, heuristic: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    table = json.loads((Path(__file__).parent / kernel / "tuning.json").read_text(encoding="utf-8"))
    found = table.get(kind, {}).get(key)
    if found is None:
        log.warning("%s: no tuned tiles for %s at %s, using the heuristic %s", kernel, kind, key, dict(heuristic))
        return heuristic
    if set(found) != {name for name, _ in heuristic}:
        expected = ", ".join(name for name, _ in heuristic)
        raise ValueError(f"{kernel}/tuning.json, {kind}, {key}: found {', '.join(found)}, expected {expected}")
    return tuple(found.items())
