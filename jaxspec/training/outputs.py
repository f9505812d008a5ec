"""The files that the data commands write: where they may go, and one error where they cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.errors import DataError, problem

__all__ = ["account_path", "check_out", "writing"]


def account_path(out: Path) -> Path:
    """Where an output's account stands: what it was made with and what became of the rows."""
    return out.with_name(f"{out.name}.json")


def check_out(out: Path, suffix: str, force: bool, inputs: Sequence[Path]) -> None:
    """Raises DataError for another kind of name, for a folder, for an input, and for a file that is there unless
    `force`."""
    if out.suffix != suffix:
        raise DataError(problem("--out", out.name, f"a name ending in {suffix}"))
    if out.is_dir():
        raise DataError(problem("--out", f"the folder {out}", "a file to write"))
    taken = {path.resolve() for path in inputs}
    for path in (out, account_path(out)):
        if path.resolve() in taken:
            raise DataError(problem("--out", f"{out}, which would replace the input {path}", "a new name"))
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
