"""ArrayRecord files: written whole, read record by record. The library is imported only here, when it is used."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import DataError, problem
from jaxspec.training.featurestore.storage import Storage

__all__ = ["SUFFIX", "Reader", "digest", "file_bytes", "require", "whole", "write_shard"]

SUFFIX = ".arrayrecord"
_OPTIONS = "group_size:1,uncompressed"  # a record is read alone, and floats do not compress
_BLOCK = 1 << 16  # the file format's blocks: a file is a whole number of them, each with a small header


def require() -> Any:
    """The library. Raises DataError where there is none (it has no release for Windows)."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise DataError(
            problem(
                "features.mode",
                "no array-record on this machine",
                "it where features are stored",
                'pip install array-record (Linux and macOS), or set features.mode="online"',
            )
        ) from error
    return array_record_module


def whole(storage: Storage, about: dict[str, Any], hashed: bool = True) -> bool:
    """Whether a shard's file is what its account (file, bytes, sha256) says; without `hashed` only its size is."""
    name = about["file"]
    if not storage.exists(name) or storage.size(name) != about["bytes"]:
        return False
    return not hashed or digest(storage.local(name)) == about["sha256"]


def file_bytes(sizes: Iterable[int]) -> int:
    """Upper bound of the bytes of a file with records of these sizes."""
    payload = sum(size + 160 for size in sizes)  # a chunk and its header for each record, then the index
    return (-(-payload // (_BLOCK - 24)) + 3) * _BLOCK


def write_shard(storage: Storage, name: str, records: Iterable[bytes]) -> dict[str, Any]:
    """Writes a file that appears whole; {"file", "bytes", "sha256"}. The same records give the same bytes."""
    module = require()
    with storage.publish(name) as fresh:
        with _system(storage):
            writer = module.ArrayRecordWriter(str(fresh), _OPTIONS)
        try:
            for record in records:
                with _system(storage):
                    writer.write(record)
        finally:
            with _system(storage):
                writer.close()
        about = {"file": name, "bytes": fresh.stat().st_size, "sha256": digest(fresh)}
    return about


@contextlib.contextmanager
def _system(storage: Storage) -> Iterator[None]:
    """Around the library's calls: a RuntimeError is how it says that the system refused."""
    try:
        yield
    except RuntimeError as error:
        found = f"{storage}, which cannot be written ({' '.join(str(error).split())[:120]})"
        raise DataError(problem("features.path", found, "a writable place with room")) from error


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Reader:
    """Random access to the records of one file."""

    def __init__(self, path: Path):
        module = require()
        self._path = path
        try:
            self._reader = module.ArrayRecordReader(str(path))
        except (RuntimeError, ValueError) as error:
            raise damaged(path, error) from error

    def __len__(self) -> int:
        return int(self._reader.num_records())

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Records by index. Raises DataError for a damaged file."""
        try:
            return list(self._reader.read(list(indices)))
        except (RuntimeError, IndexError, ValueError) as error:
            raise damaged(self._path, error) from error

    def close(self) -> None:
        """Releases the file."""
        self._reader.close()


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that cannot be read."""
    reason = " ".join(str(error).split())[:160]
    return DataError(
        problem(
            f"features.path ({path.name})",
            f"damaged ({reason})",
            "a whole file",
            "capture again: the same command makes it anew",
        )
    )
