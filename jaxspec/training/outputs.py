"""The files that the data commands write: where they may go, and one error where they cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxspec.errors import DataError, problem

__all__ = ["check_out", "writing"]


def check_out(out: Path, suffix: str, force: bool) -> None:
    """Raises DataError for another kind of name, for a folder, and for a file that is there unless `force`."""
    if out.suffix != suffix:
        raise DataError(problem("--out", out.name, f"a name ending in {suffix}"))
    if out.is_dir():
        raise DataError(problem("--out", f"the folder {out}", "a file to write"))
    if out.exists() and not force:
        raise DataError(problem("--out", f"{out}, which is there", "a new name", "or replace it with --force"))


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Around work that writes `out`: DataError where the system refuses."""
    try:
        yield
    except OSError as error:
        found = f"{out}, which cannot be written ({error.strerror or error})"
        raise DataError(problem("--out", found, "a writable place with room")) from error
