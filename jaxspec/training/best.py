"""The weights whose measured tau was highest, kept beside the checkpoints in the drafter's public format.

A whole drafter in `DIRECTORY/best`: it can be served while the run goes on, and it is replaced in one piece, so that a
run that dies leaves the earlier best or the new one. What it was measured with stands in the file's metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.drafter import Draft, save_drafter
from jaxspec.checkpoints.store import TensorFolder, read_config, write_folder
from jaxspec.config import TrainConfig
from jaxspec.errors import CheckpointError, ConfigError, problem

__all__ = ["Best", "Found", "about"]

_EVALUATION = "jaxspec.evaluation"


@dataclasses.dataclass(frozen=True)
class Found:
    """A measured drafter: optimizer steps it was trained for, and its tau."""

    step: int
    tau: float


def about(config: TrainConfig, step: int, tau: float | None) -> dict[str, str]:
    """What an export's `__metadata__` says of its weights, all as text: `jaxspec.weights` is "average" (the moving
    average of optimizer.ema_decay) or "parameters"."""
    decay = config.optimizer.ema_decay
    said = {"format": "pt", "jaxspec.weights": "parameters" if decay is None else "average", "jaxspec.step": str(step)}
    if decay is not None:
        said["jaxspec.ema_decay"] = repr(decay)
    return said if tau is None else said | {"jaxspec.tau": repr(tau)}


class Best:
    """Reads and replaces `directory`.

    Args:
      draft: architecture and, where it has them, its own tables; its parameters are not read.
      say: told when an earlier best is forgotten, since it was measured with other prompts.
    """

    def __init__(self, config: TrainConfig, directory: Path, draft: Draft, say: Callable[[str], None]):
        self._config, self._directory, self._draft = config, directory, draft
        self._evaluation = _evaluation(config)
        self.found = self._read(say)

    def offer(self, step: int, tau: float, params: Any) -> bool:
        """Keeps `params` (on the host or on devices) where no earlier tau was as high; says whether it did."""
        if not math.isfinite(tau) or (self.found is not None and tau <= self.found.tau):
            return False
        metadata = about(self._config, step, tau) | {_EVALUATION: self._evaluation}
        draft = dataclasses.replace(self._draft, params=params)
        save_drafter(self._directory, draft, dtype=self._config.drafter.dtype, metadata=metadata)
        self.found = Found(step, tau)
        return True

    def copy_to(self, folder: Path) -> Found:
        """Write the best drafter into `folder`, whole, and say which it is.

        Raises:
          ConfigError: none was measured.
        """
        if self.found is None:
            found = "no evaluation of this run gave a tau"
            raise ConfigError(problem("run.export_weights", f"best, but {found}", "last, or run.eval_every"))
        tensors = TensorFolder(self._directory)
        values = {name: tensors.read(name) for name in tensors.names()}
        write_folder(folder, values, read_config(self._directory), metadata=tensors.metadata())
        return self.found

    def _read(self, say: Callable[[str], None]) -> Found | None:
        if not (self._directory / "config.json").is_file():
            return None
        metadata = TensorFolder(self._directory).metadata()
        if metadata.get(_EVALUATION) != self._evaluation:
            say("run.eval_prompts or run.eval_new_tokens changed: the best drafter so far is measured anew")
            return None
        try:
            return Found(int(metadata["jaxspec.step"]), float(metadata["jaxspec.tau"]))
        except (KeyError, ValueError) as error:
            action = "delete it: the next evaluation writes it anew"
            raise CheckpointError(
                problem(str(self._directory), f"a best drafter without {error}", "jaxspec.step and jaxspec.tau", action)
            ) from error


def _evaluation(config: TrainConfig) -> str:
    """Changes with what tau is measured on."""
    digest = hashlib.sha256(str(config.run.eval_new_tokens).encode())
    if config.run.eval_prompts is not None and Path(config.run.eval_prompts).is_file():
        digest.update(Path(config.run.eval_prompts).read_bytes())
    return digest.hexdigest()[:16]
