"""What a run must keep to be the same run: data, order, model, objective, schedule. Stored with every checkpoint.

Resuming with anything of it changed would train on other data or on another schedule without a word; so it is
refused, and the message says what changed. What may change is everything else: limits in seconds, logging, saving,
evaluation, export, what a step keeps in memory.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jaxspec.config import TrainConfig
from jaxspec.errors import ResumeError
from jaxspec.training.data import Examples

__all__ = ["changes", "check", "fingerprint"]

# a data file may move, its content may not change; what a step keeps, and in how many slices, is memory alone
_FREE = {"data.path", "objective.chunk_blocks", "objective.keep_products"}


def reads_total(config: TrainConfig) -> bool:
    """Whether the learning rate depends on how many steps the run has."""
    return config.optimizer.schedule != "constant" or config.optimizer.warmup_ratio > 0


def fingerprint(
    config: TrainConfig, examples: Examples, drafter_config: dict[str, Any], target: str, total_steps: int | None
) -> dict[str, Any]:
    """Named parts, each JSON-able.

    Args:
      drafter_config: the drafter's config.json; hashed.
      target: identity of the target's weights (name and revision).
      total_steps: of the schedule.
    """
    sections = {"objective": config.objective, "data": config.data, "optimizer": config.optimizer}
    parts = {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in section.model_dump(mode="json").items()
        if f"{name}.{key}" not in _FREE
    }
    return parts | {
        "data.content": examples.content_hash(),
        "data.rendered_template": examples.template,
        "target": target,
        "target.dtype": config.target.dtype,
        "drafter": _hash(drafter_config),
        "drafter.dtype": config.drafter.dtype,
        "drafter.source": config.drafter.source,
        "run.seed": config.run.seed,
        "schedule steps": total_steps if reads_total(config) else None,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def changes(stored: dict[str, Any], current: dict[str, Any]) -> str | None:
    """Every part that differs, with both values; None where all are equal."""
    names = [name for name in sorted((stored.keys() | current.keys()) - _FREE) if stored.get(name) != current.get(name)]
    said = (f"{name}: the run has {_short(stored.get(name))}, now {_short(current.get(name))}" for name in names)
    return "; ".join(said) or None


def check(stored: dict[str, Any], current: dict[str, Any], directory: str) -> None:
    """Raise ResumeError naming every part that differs."""
    if differing := changes(stored, current):
        raise ResumeError(
            f"run.directory {directory}: cannot go on from its checkpoint, since this changed: {differing}; "
            "restore it, or start anew with run.fresh=true or another run.directory"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:12]}...{text[-4:]}"
