"""An output that is made row by row and survives a kill at any moment: nothing lost, nothing twice.

Rows go to OUT.partial in the order in which they are ready, each as one line. Its first line is the record: what the
rows were made with. OUT itself appears at the end, whole and in the order of the input, and then its account with the
record as OUT.json. The same work again goes on from the rows that are there; with another record it is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from jaxspec.checkpoints.atomic import replacing_file
from jaxspec.errors import DataError, ResumeError, problem
from jaxspec.training.fingerprint import changes
from jaxspec.training.outputs import account_path, writing

__all__ = ["Journal", "finished", "locked", "partial_path"]


def partial_path(out: Path) -> Path:
    """Where the rows are kept until all are there."""
    return out.with_name(out.name + ".partial")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process an output. Raises DataError where another one has it."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.with_name(f".{out.name}.lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise DataError(problem("--out", f"{out}, in use by another process", "one process an output")) from error
    try:
        yield
    finally:
        lock.release()


def finished(out: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The account of an output that is there and was made with this record; None where there is still work to do.

    Raises ResumeError for an output that was made with another record, or by something else.
    """
    if partial_path(out).exists() or not out.exists():
        return None
    try:
        account = json.loads(account_path(out).read_text(encoding="utf-8"))
        stored = account["record"]
    except (OSError, ValueError, KeyError, TypeError):
        stored = None
    if not isinstance(stored, dict):
        raise ResumeError(
            problem(
                "--out",
                f"{out}, which is there without a record of what made it",
                "a new name",
                "or replace it with --force",
            )
        )
    _check(stored, record, out)
    return account


def _check(stored: dict[str, Any], record: dict[str, Any], out: Path) -> None:
    if differing := changes(stored, json.loads(json.dumps(record))):
        raise ResumeError(
            f"--out {out}: cannot go on, since this changed: {differing}; restore it, or start anew with --force or "
            "another name"
        )


class Journal:
    """OUT.partial, open for appending; contains the `id` of every row that is there.

    Raises:
      ResumeError: the rows that are there were made with another record.
      DataError: a line in the middle of the file is broken, or the file cannot be written.
    """

    def __init__(self, out: Path, record: dict[str, Any]):
        self._out, self._record = out, record
        self._places: dict[int, int] = {}  # id -> offset of its line
        with writing(out):
            self._file: BinaryIO = partial_path(out).open("a+b")
            try:
                self._read()
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row. Once this returns, a kill of the process does not lose it."""
        with writing(self._out):
            self._places[row["id"]] = self._write(row)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows in the order of their ids."""
        for _, place in sorted(self._places.items()):
            self._file.seek(place)
            yield json.loads(self._file.readline())

    def finish(self, rows: Iterator[dict[str, Any]], account: dict[str, Any]) -> dict[str, Any]:
        """Writes OUT out of `rows`, then its account, and removes OUT.partial. `account` may be filled while the rows
        are taken. Returns the account with the record."""
        with writing(self._out):
            account_path(self._out).unlink(missing_ok=True)  # never the account of another file beside the new one
            with replacing_file(self._out) as fresh, fresh.open("wb") as file:
                for row in rows:
                    file.write(_line(row))
            whole = {"record": self._record, **account}
            with replacing_file(account_path(self._out)) as fresh:
                fresh.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            self._file.close()
            partial_path(self._out).unlink()
        return whole

    def _write(self, row: dict[str, Any]) -> int:
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(row))
        self._file.flush()
        return place

    def _read(self) -> None:
        """Takes up what is there; a last line that was torn by a kill is cut off, a record without rows replaced."""
        self._file.seek(0)
        place, stored = 0, {}
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if number > 1:
                    self._places[int(row["id"])] = place
                else:
                    stored = dict(row["record"])
            except (ValueError, KeyError, TypeError) as error:
                where = f"{partial_path(self._out)}, line {number}"
                raise DataError(
                    problem(where, "a broken row", "what was written", "start anew with --force")
                ) from error
            place += len(line)
        if self._places:
            _check(stored, self._record, self._out)
        self._file.truncate(place if self._places else 0)
        if not self._places:
            self._write({"record": self._record})


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
