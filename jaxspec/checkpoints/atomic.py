"""Folders and files that appear whole or not at all.

They are built under a temporary name beside their destination, flushed, then renamed. An existing folder is moved
aside only after the new one is complete and is put back if the last rename fails.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxspec.errors import CheckpointError

__all__ = ["replacing_file", "replacing_folder"]


@contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file to write that becomes `path` when the block ends without an error, and vanishes
    otherwise. Raises OSError as the system does; then nothing was changed.
    """
    path = Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new-{uuid.uuid4().hex[:12]}")
    try:
        yield fresh
        _flush(fresh)
        os.replace(fresh, path)
        _flush(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def replacing_folder(directory: str | os.PathLike[str], marker: str = "config.json") -> Iterator[Path]:
    """Yield an empty folder that becomes `directory` when the block ends without an error, and vanishes otherwise.

    An existing `directory` is replaced only if it is empty or is itself a flat folder with the file `marker`; anything
    else (somebody's home, a folder of results) raises CheckpointError before any work is done.
    """
    directory = Path(os.path.abspath(directory))
    check_replaceable(directory, marker)
    suffix = uuid.uuid4().hex[:12]
    fresh = directory.with_name(f".{directory.name}.new-{suffix}")
    aside = directory.with_name(f".{directory.name}.old-{suffix}")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _flush(*fresh.iterdir(), fresh)
        if directory.exists():
            directory.rename(aside)
        try:
            fresh.rename(directory)
        except OSError:
            if aside.exists():
                aside.rename(directory)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written ({error.strerror or error}), expected a writable place with room; nothing "
            "was changed"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if directory.exists():
            shutil.rmtree(aside, ignore_errors=True)


def check_replaceable(directory: Path, marker: str = "config.json") -> None:
    """Whether `replacing_folder` would take this place. Raises CheckpointError naming what is in the way."""
    if not directory.exists():
        above = next(folder for folder in directory.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise CheckpointError(
                f"{directory}: {above} is no folder that can be written, expected one; choose another"
            )
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: found a file, expected a folder or nothing; choose another name")
    entries = list(directory.iterdir())
    if entries and (not (directory / marker).is_file() or any(entry.is_dir() for entry in entries)):
        raise CheckpointError(
            f"{directory}: found a folder that is not a checkpoint, expected an empty one, a checkpoint or nothing; "
            "choose another name"
        )


def _flush(*paths: Path) -> None:
    """Put files, and the entries of folders, on the disk, so that a rename cannot outlive what it names."""
    for path in paths:
        if os.name == "nt":  # folders cannot be opened there, and a file opened for reading cannot be flushed
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
