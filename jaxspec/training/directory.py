"""The run directory: whose it is, starting anew, the resolved config beside the results."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from jaxspec.errors import CheckpointError, ConfigError, problem

__all__ = ["MARKER", "check", "locked", "prepare", "resolved", "write_atomically", "writing"]

MARKER = "jaxspec-run.json"
_FORMAT = {"kind": "jaxspec training run", "version": 1}


def write_atomically(path: Path, text: str) -> None:
    """A file that is either the old or the new text, whatever happens in between."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def resolved(directory: Path) -> Path:
    """The directory itself, whatever links and relative parts name it: one run, one lock, one place beside it.

    Raises:
      ConfigError: the links go in a circle.
    """
    try:
        whole = directory.resolve()
        if whole.is_symlink():  # as far as it gets from Python 3.13 on
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return whole
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            problem("run.directory", f"{str(directory)!r}, which cannot be followed ({error})", "a folder or nothing")
        ) from error


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Around work that writes into the run directory: one error that names it where the system refuses.

    Raises:
      CheckpointError: the folder is gone, the disk is full or cannot be written.
    """
    try:
        yield
    except BrokenPipeError:  # whoever reads the log has left; the command line knows
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not directory.is_dir():
            raise CheckpointError(gone(directory)) from error
        raise CheckpointError(
            problem(
                f"run.directory {directory}",
                f"{error.strerror or error}{f' at {error.filename}' if error.filename else ''}",
                "a writable place with room",
                "mend that and give the same command: the run goes on from its last whole checkpoint",
            )
        ) from error


def gone(directory: Path) -> str:
    """The message for a run directory that was taken away under a run."""
    return problem(
        f"run.directory {directory}",
        "moved or deleted while the run was going",
        "it to stay in place",
        "put it back, or start again",
    )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the run directory for this process; the lock ends with the process, however it ends.

    Raises:
      ConfigError: another process trains in it.
    """
    whole = resolved(directory)
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        place = whole.with_name(whole.name + ".lock")
        place.touch()  # the lock library takes a place that cannot be written for one in use
        held = FileLock(place).acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            problem("run.directory", f"{str(directory)!r} in use by another process", "one process a run", "wait")
        ) from error
    except OSError as error:
        raise ConfigError(
            problem("run.directory", f"{error.strerror}: {error.filename}", "a place to write")
        ) from error
    with held:
        yield


def _is_ours(directory: Path) -> bool:
    try:
        return json.loads((directory / MARKER).read_text(encoding="utf-8")).get("kind") == _FORMAT["kind"]
    except (OSError, ValueError, AttributeError):
        return False


def check(directory: Path, fresh: bool) -> None:
    """Whether `prepare` would succeed; touches nothing.

    Raises:
      ConfigError: the place, or the one that an earlier run would be moved to, holds something that is not a run.
    """
    directory = resolved(directory)
    try:
        in_the_way = directory.exists() and not directory.is_dir()
    except OSError as error:
        raise ConfigError(problem("run.directory", str(error.strerror), "a name that the file system takes")) from error
    if in_the_way:
        raise ConfigError(problem("run.directory", f"{str(directory)!r} is a file", "a folder or nothing"))
    if not _holds_files(directory):
        return
    if not _is_ours(directory):
        raise ConfigError(
            problem(
                "run.directory",
                f"{str(directory)!r} holds files but no {MARKER}",
                "an empty folder, nothing, or an earlier run",
                "choose another run.directory",
            )
        )
    aside = _aside(directory)
    if fresh and aside.exists() and not _is_ours(aside):
        raise ConfigError(
            problem(
                "run.fresh",
                f"{str(aside)!r}, which is in the way and is not a run",
                "a free name",
                "move it away, or choose another run.directory",
            )
        )


def prepare(directory: Path, fresh: bool) -> Path | None:
    """Make `directory` a run directory.

    With `fresh` an earlier run in it is moved aside to NAME.previous (the one kept from the time before is deleted
    first).

    Returns:
      where the earlier run was moved to, or None.

    Raises:
      ConfigError: see `check`; nothing was touched.
    """
    check(directory, fresh)
    directory = resolved(directory)
    moved = None
    if fresh and _holds_files(directory):
        moved = _aside(directory)
        if moved.exists():
            shutil.rmtree(moved)
        directory.rename(moved)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / MARKER, json.dumps(_FORMAT) + "\n")
    return moved


def _holds_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _aside(directory: Path) -> Path:
    """Where a run is moved to."""
    return directory.with_name(directory.name + ".previous")
