"""Checkpoints of a run: Orbax, asynchronous, complete or absent.

A checkpoint holds the state (parameters, moments, counters, typed key) and a JSON part (input position, fingerprint,
seconds spent, resolved config). Orbax writes under a temporary name and commits at the end, so a process that is
killed in the middle leaves the checkpoint before it as the newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxspec.errors import CheckpointError, ResumeError, problem
from jaxspec.training.directory import gone
from jaxspec.training.state import TrainState, abstract

__all__ = ["Checkpoints"]


class Checkpoints:
    """Reads and writes the checkpoints under `directory`.

    Args:
      keep: how many of the newest are kept.
      keep_every: those of steps that it divides are kept too; 0 keeps none of them.
    """

    def __init__(self, directory: Path, keep: int, keep_every: int = 0):
        self.directory = directory
        logging.getLogger("absl").addFilter(_not_told_twice)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every or None, create=True, cleanup_tmp_directories=True
        )
        with self._writing():
            self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self._saved = self._durable = self._manager.latest_step()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def resumable(self) -> int | None:
        """`latest`, once every byte of it was found readable.

        Raises:
          ResumeError: it is damaged. The message names the newest step that is intact and how to go on from it: which
            checkpoint is given up is the user's decision.
        """
        damaged: list[tuple[Path, str]] = []
        intact = None
        for step in sorted(self._manager.all_steps(), reverse=True):
            folder = self.directory / str(step)
            what = _damage(folder)
            if what is None:
                intact = step
                break
            damaged.append((folder, what))
        if not damaged:
            return intact
        if intact is None:
            action = "no older one is intact: set run.fresh=true or another run.directory"
        else:
            given_up = " and ".join(str(folder) for folder, _ in damaged)
            action = f"step {intact} is intact: to go on from it, delete {given_up}"
        newest, what = damaged[0]
        found = f"the newest checkpoint, step {newest.name}, is damaged ({what})"
        raise ResumeError(problem(f"run.directory {self.directory.parent}", found, action=action))

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Start writing; returns once the arrays are on the host. A step that is already saved is left alone.

        Raises:
          CheckpointError: this checkpoint, or the one before it, cannot be written.
        """
        if self._saved == step:
            return
        self._durable = self.durable()
        self._saved = step
        with self._writing():
            if not self.directory.is_dir():  # orbax would make it anew, without what else a run directory holds
                raise FileNotFoundError
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(_parts(state)), meta=ocp.args.JsonSave(meta))
            )

    def durable(self) -> int | None:
        """Step of the newest checkpoint that is known to be whole on the disk; the one in the making becomes it when
        Orbax has given it its name."""
        if self._saved != self._durable and (self.directory / str(self._saved)).is_dir():
            self._durable = self._saved
        return self._durable

    def wait(self) -> None:
        """Return when everything is durable. Raises CheckpointError where it cannot become so."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the writer's threads pass on errors of the system and of tensorstore alike
            if not self.directory.is_dir():
                raise CheckpointError(gone(self.directory.parent)) from error
            raise CheckpointError(
                problem(
                    f"checkpoints in {self.directory}",
                    f"a checkpoint that cannot be written ({_first_line(error)})",
                    "a writable place with room",
                    "mend that and give the same command: the run goes on from its last whole checkpoint",
                )
            ) from error

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
        wanted_parts = ocp.args.Composite(state=ocp.args.StandardRestore(_parts(target)))
        try:
            state = TrainState(**self._manager.restore(step, args=wanted_parts).state)
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
        try:
            with self._writing():
                self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(_not_told_twice)


def _parts(state: TrainState) -> dict[str, Any]:
    """The state by the names of its fields, without an average where there is none: a run that keeps none has the same
    files whether the field exists or not."""
    parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if part is not None}


def _not_told_twice(record: logging.LogRecord) -> bool:
    """Orbax's threads log the traceback of an error that `wait` or the next `save` raises anyway."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _damage(folder: Path) -> str | None:
    """What is wrong with the files of one checkpoint, or None. Reads every array once, one after the other: orbax
    reads all at the same time, and its other readers end in tracebacks of their own when one of them fails. The values
    themselves carry no checksum."""
    state = folder / "state"
    try:
        about = sorted((state / "array_metadatas").iterdir())
        for text in (folder / "meta" / "metadata", state / "_METADATA", *about):
            json.loads(text.read_bytes())
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": str(state.absolute())}}
        names = [key.decode() for key in ts.KvStore.open(store).result().list().result()]
        arrays = [name.removesuffix(".zarray") for name in names if name.endswith("/.zarray")]
        for name in arrays:
            ts.open({"driver": "zarr", "kvstore": store | {"path": name}}, open=True).result().read().result()
    except (OSError, ValueError) as error:  # ValueError: tensorstore's, and text that is not JSON or not UTF-8
        return _first_line(error)
    return None if arrays and about else "it holds no arrays, or does not say which"


def _first_line(error: Exception) -> str:
    """What an error says, within the length that a line can bear; the system's reason alone where it is given."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of tensorstore's text, behind long paths
    if code:
        return os.strerror(int(code[1]))
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
