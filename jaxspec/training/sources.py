"""Files of rows, read one row at a time: JSON lines, one JSON array, Parquet.

A row comes with its place ("file, line 3"), which errors and reports name. Nothing but the row at hand is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxspec.errors import DataError, problem

__all__ = ["SUFFIXES", "rows"]

SUFFIXES = (".jsonl", ".json", ".parquet")
_CHUNK = 1 << 20  # characters
_BATCH = 256  # rows of a Parquet file


def rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file, in order; what a row must be is the caller's business.

    Args:
      path: .jsonl, .json (an array, else one object a line) or .parquet (needs pyarrow, the extra `data`).
      field: what named the file; it heads an error.

    Raises:
      DataError: no such file, another kind of file, or a broken one; the message has the file and, of JSON, the place.
    """
    if not path.is_file():
        raise DataError(problem(field, f"no file {str(path)!r}", f"a file ending in {', '.join(SUFFIXES)}"))
    if path.suffix == ".parquet":
        return _parquet(path, field)
    if path.suffix not in SUFFIXES:
        raise DataError(problem(field, path.name, f"a file ending in {', '.join(SUFFIXES)}"))
    return _array(path, field) if path.suffix == ".json" and _is_array(path) else _lines(path, field)


def _lines(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path.name}, line {number}"
            try:
                yield place, json.loads(line)
            except json.JSONDecodeError as error:
                found = f"no JSON: {error.msg} at column {error.colno}"
                raise DataError(problem(f"{field} ({place})", found, "one JSON object a line")) from error
            except UnicodeDecodeError as error:
                raise DataError(problem(f"{field} ({place})", f"no UTF-8 ({error.reason})", "UTF-8 text")) from error
            except RecursionError:
                raise DataError(
                    problem(f"{field} ({place})", "JSON nested too deeply", "one JSON object a line")
                ) from None


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _array(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Elements of one large array. Text is read until an element is whole, twice as much each time it is not."""
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, row in enumerate(_elements(file), 1):
                yield f"{path.name}, row {number}", row
        except UnicodeDecodeError as error:
            raise DataError(problem(f"{field} ({path.name})", f"no UTF-8 ({error.reason})", "UTF-8 text")) from error
        except (json.JSONDecodeError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            raise DataError(problem(f"{field} ({path.name})", f"a broken JSON array: {why}", "a whole one")) from error


def _elements(file: TextIO) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    text = _ahead("", file)[1:]
    separator = ""  # what must stand before the next element
    while True:
        text = _ahead(text, file)
        if text.startswith("]"):
            if (text[1:] + file.read()).strip():
                raise json.JSONDecodeError("text behind its end", "", 0)
            return
        if not text.startswith(separator):
            raise json.JSONDecodeError("no comma between two rows" if text else "no end", "", 0)
        text = _ahead(text.removeprefix(separator), file)
        while True:
            try:
                row, end = decoder.raw_decode(text)
                break
            except json.JSONDecodeError:
                more = file.read(max(_CHUNK, len(text)))
                if not more:
                    raise
                text += more
        yield row
        text, separator = text[end:], ","


def _ahead(text: str, file: TextIO) -> str:
    """`text` without leading white space; where nothing is left, what the file has next."""
    text = text.lstrip()
    while not text and (more := file.read(_CHUNK)):
        text = more.lstrip()
    return text


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            problem(
                f"{field} ({path.name})",
                "a Parquet file, and pyarrow is not installed",
                "pyarrow",
                'pip install "jaxspec-decoding[data]"',
            )
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(problem(f"{field} ({path.name})", f"unreadable ({reason})", "a whole Parquet file")) from error
