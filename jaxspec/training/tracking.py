"""Weights & Biases, imported only where `run.wandb` asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from pathlib import Path
from typing import Any

from jaxspec.config import TrainConfig
from jaxspec.errors import ConfigError, problem
from jaxspec.training.directory import write_atomically

__all__ = ["Tracker", "check"]

_ID = "wandb-id"


def check(config: TrainConfig) -> None:
    """Raises ConfigError where `run.wandb` is set and the package is not there; before anything is loaded."""
    if config.run.wandb is not None and importlib.util.find_spec("wandb") is None:
        found = f"{config.run.wandb!r}, but the package wandb is not installed"
        raise ConfigError(problem("run.wandb", found, "the package, or null", "pip install wandb, or leave it out"))


class Tracker:
    """One run of the project `run.wandb`: a resumed run goes on in the same one, whose id is kept in the run directory.

    Raises:
      ConfigError: wandb cannot begin (no login, no network); its own words are in the message.
    """

    def __init__(self, config: TrainConfig, place: Path):
        wandb: Any = importlib.import_module("wandb")
        kept = place / _ID
        if not kept.is_file():
            write_atomically(kept, uuid.uuid4().hex[:12] + "\n")
        try:
            self._run = wandb.init(
                project=config.run.wandb, id=kept.read_text(encoding="utf-8").strip(), name=place.name, dir=str(place),
                resume="allow", config=config.model_dump(mode="json"),
            )  # fmt: skip
        except Exception as error:  # its own errors have no common base
            found = f"{config.run.wandb!r}, and wandb cannot begin ({' '.join(str(error).split())[:200]})"
            action = "run `wandb login`, set WANDB_MODE=offline, or leave it out"
            raise ConfigError(problem("run.wandb", found, "a project that can be reached", action)) from error

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One step's numbers. Steps that wandb has already (written by a process that died) are left as they are."""
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
