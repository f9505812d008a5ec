"""Checkpoints of a run: Orbax, asynchronous, complete or absent.

A checkpoint holds the state (parameters, moments, counters, typed key) and a JSON part (input position, fingerprint,
seconds spent, resolved config). Orbax writes under a temporary name and commits at the end, so a process that is
killed in the middle leaves the checkpoint before it as the newest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.errors import ResumeError, problem
from jaxspec.training.state import TrainState, abstract

__all__ = ["Checkpoints"]


class Checkpoints:
    """Reads and writes the checkpoints under `directory`.

    Args:
      keep: how many of the newest are kept.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self._saved = self._manager.latest_step()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Start writing; returns once the arrays are on the host. A step that is already saved is left alone."""
        if self._saved == step:
            return
        self._saved = step
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        )

    def wait(self) -> None:
        """Return when everything is durable; raises what the writer raised."""
        self._manager.wait_until_finished()

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON part alone."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta

    def restore(self, step: int, like: Any, sharding: Any) -> TrainState:
        """The state of `step`, placed as asked: the mesh that wrote it does not matter.

        Args:
          like: a state (arrays or abstract) with the expected structure and shapes.
          sharding: one for every leaf, or a tree of them like the state.

        Raises:
          ResumeError: the checkpoint does not have that structure.
        """
        target = abstract(like, sharding)
        try:
            state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))).state
        except (ValueError, KeyError, TypeError) as error:
            raise ResumeError(
                problem(
                    "run.directory",
                    f"a checkpoint at step {step} that does not hold this run's state ({_first_line(error)})",
                    "parameters and moments of the configured drafter",
                    "set run.fresh=true or another run.directory",
                )
            ) from error
        for (path, wanted), found in zip(
            jax.tree_util.tree_leaves_with_path(target), jax.tree.leaves(state), strict=True
        ):
            if wanted.shape != found.shape or wanted.dtype != found.dtype:
                raise ResumeError(
                    problem(
                        f"checkpoint {jax.tree_util.keystr(path)}",
                        f"{found.dtype} {found.shape}",
                        f"{wanted.dtype} {wanted.shape}",
                        "set run.fresh=true or another run.directory",
                    )
                )
        return state

    def close(self) -> None:
        """Wait and release."""
        self._manager.close()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
