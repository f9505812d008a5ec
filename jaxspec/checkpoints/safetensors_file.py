"""One .safetensors file: its header, one tensor at a time, and writing it in a given order.

The format is an 8-byte little-endian length, a JSON header of that length, then the tensors' bytes. Reading and
writing it here rather than through a library keeps bfloat16 and float8 (via ml_dtypes), the tensors' own order (an
imported draft is exported byte for byte) and errors that say which file and which tensor is wrong.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError

__all__ = ["DTYPES", "Entry", "Header", "LazyTensor", "read_header", "read_tensor", "write_safetensors"]

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit; a larger length means this is no safetensors file


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `start` is counted from the beginning of the file, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself; `entries` are in the order of their bytes."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed only when it is written, so that a large model need not be held twice."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a file, checked against the file's length.

    Raises CheckpointError when the file is absent, truncated, longer than its header says, or not safetensors at all.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= _LARGEST_HEADER:
                raise CheckpointError(
                    f"{path}: found no safetensors header ({size} bytes in the file), expected one; fetch the file "
                    "again"
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: found no such file, expected a safetensors file") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), expected a readable safetensors file"
        ) from error
    if len(raw) < length:
        raise CheckpointError(
            f"{path}: truncated inside its header: found {size} bytes, expected at least {8 + length}; fetch the file "
            "again"
        )
    try:
        table = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: found a header that is not JSON ({error}), expected a safetensors header; fetch the file again"
        ) from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: found a header of type {type(table).__name__}, expected a JSON object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: found __metadata__ of type {type(metadata).__name__}, expected a JSON object")
    entries = {name: _entry(path, name, item, 8 + length) for name, item in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].nbytes)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.start != end:
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {entry.start}, expected {end} (tensors lie one after the "
                "other)"
            )
        end = entry.start + entry.nbytes
    if size != end:
        state = "truncated" if size < end else "too long"
        raise CheckpointError(
            f"{path}: {state}: found {size} bytes, expected {end} from its header; fetch the file again"
        )
    return Header(path, ordered, dict(metadata))


def _entry(path: Path, name: str, item: Any, base: int) -> Entry:
    try:
        code, shape, (first, last) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        sane = all(type(n) is int and n >= 0 for n in (*shape, first, last)) and last >= first
        sane = sane and isinstance(code, str)
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        raise CheckpointError(
            f"{path}: tensor {name!r}: found header entry {item!r}, expected dtype, shape and two data_offsets"
        )
    if code not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r}: found dtype {code!r}, expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[code]
    nbytes = math.prod(shape) * dtype.itemsize  # exact, whatever a header claims
    if last - first != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r}: found {last - first} bytes, expected {nbytes} for {code} {list(shape)}"
        )
    return Entry(dtype, shape, base + first, nbytes)


def read_tensor(header: Header, name: str) -> np.ndarray:
    """One tensor as a fresh, writable array in the dtype of the file."""
    entry = header.entries[name]
    buffer = np.empty(entry.nbytes, np.uint8)
    try:
        with header.path.open("rb") as file:
            file.seek(entry.start)
            count = file.readinto(buffer.data) if entry.nbytes else 0
    except OSError as error:
        raise CheckpointError(f"{header.path}: tensor {name!r} cannot be read ({error.strerror})") from error
    if count != entry.nbytes:
        raise CheckpointError(
            f"{header.path}: tensor {name!r}: found {count} bytes, expected {entry.nbytes}; the file changed while it "
            "was read"
        )
    return buffer.view(entry.dtype).reshape(entry.shape)


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays (numpy, jax or LazyTensor) in the order of the mapping; the bytes are flushed to the disk before
    returning.
    """
    table: dict[str, Any] = {"__metadata__": {str(k): str(v) for k, v in metadata.items()}} if metadata else {}
    offset = 0
    for name, value in tensors.items():
        dtype, shape = np.dtype(value.dtype), tuple(int(n) for n in value.shape)
        if dtype not in _CODES:
            raise CheckpointError(
                f"{path}: tensor {name!r}: found dtype {dtype}, expected one of {', '.join(map(str, _CODES))}"
            )
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        table[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # keeps the tensors aligned for readers that map the file
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        for name, value in tensors.items():
            array = np.ascontiguousarray(value.read() if isinstance(value, LazyTensor) else np.asarray(value))
            if array.nbytes != table[name]["data_offsets"][1] - table[name]["data_offsets"][0]:
                raise CheckpointError(
                    f"{path}: tensor {name!r}: found {array.dtype} {array.shape}, expected {value.dtype} "
                    f"{tuple(value.shape)}"
                )
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
