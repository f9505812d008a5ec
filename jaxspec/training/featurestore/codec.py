"""One example's features as bytes, and back.

A record is a header, the token ids and the loss mask, then the features of the L real rows (padding is not stored):

    bfloat16, float32   features [L, T*H], teacher [L, H]
    int8                first bfloat16 [T*H], codes int8 [L-1, T*H], scales bfloat16 [L-1, T*H/32], teacher bf16 [L, H]

int8: a group of 32 channels of a row shares the scale max|x| / 127, rounded up to bfloat16, so no code leaves
[-127, 127] and the error of a value is at most half its scale. Row 0 is kept apart: its channels reach tens of
thousands in some targets (an attention sink), hundreds of times what the rows after it have.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.errors import ConfigError, DataError, problem

__all__ = ["GROUP", "Layout", "dequantise", "encode_rows", "quantise", "reconstruction_error"]

GROUP = 32  # channels that share a scale
_HEADER = struct.Struct("<4sIII")  # magic, example id, length L, width T*H
_MAGIC = b"jsf1"
_BF16 = np.dtype(ml_dtypes.bfloat16)


def quantise(features: jax.Array) -> tuple[jax.Array, jax.Array]:
    """codes int8 [..., C] and scales bfloat16 [..., C / 32] of features [..., C]; see the top of this file."""
    groups = features.astype(jnp.float32).reshape(*features.shape[:-1], -1, GROUP)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1) / 127.0, jnp.uint32)
    upper = ((bits + 0xFFFF) >> 16) << 16  # the next bfloat16 that is not smaller
    scales = jax.lax.bitcast_convert_type(upper, jnp.float32)
    codes = jnp.rint(groups / jnp.where(scales > 0, scales, 1.0)[..., None])
    return codes.reshape(features.shape).astype(jnp.int8), scales.astype(jnp.bfloat16)


def dequantise(codes: jax.Array, scales: jax.Array, first: jax.Array) -> jax.Array:
    """float32 features [B, S, C] of codes [B, S, C], scales [B, S, C / 32] and the first rows [B, C]."""
    groups = codes.astype(jnp.float32).reshape(*codes.shape[:-1], -1, GROUP)
    features = (groups * scales.astype(jnp.float32)[..., None]).reshape(codes.shape)
    return features.at[:, 0].set(first.astype(jnp.float32))


def encode_rows(features: jax.Array, teacher: jax.Array | None, storage: str) -> dict[str, jax.Array]:
    """What a record keeps of features [B, S, C] and of the teacher's hidden state [B, S, H], on the device.

    With int8 also `error` and `energy` float32 [B, S]: the squared error of a row (0 for the first) and its square.
    """
    kind = jnp.float32 if storage == "float32" else jnp.bfloat16
    kept = {} if teacher is None else {"teacher": teacher.astype(kind)}
    if storage != "int8":
        return {"features": features.astype(kind), **kept}
    codes, scales = quantise(features)
    first = features[:, 0].astype(jnp.bfloat16)
    exact = features.astype(jnp.float32)
    error = jnp.sum((dequantise(codes, scales, first) - exact) ** 2, axis=-1).at[:, 0].set(0.0)
    return {"codes": codes, "scales": scales, "first": first, "error": error, "energy": jnp.sum(exact**2, -1), **kept}


def reconstruction_error(features: jax.Array) -> dict[str, float]:
    """What int8 costs features [B, S, C]: `relative` is the root of squared error over squared value, rows from 1 on;
    `largest` the largest error as a share of its group's largest value; `first` the same as `relative` of row 0, which
    is bfloat16."""
    codes, scales = quantise(features)
    first = features[:, 0].astype(jnp.bfloat16)
    exact = features.astype(jnp.float32)
    error = dequantise(codes, scales, first) - exact
    tops = jnp.max(jnp.abs(exact).reshape(*exact.shape[:-1], -1, GROUP), -1)
    share = jnp.max(jnp.abs(error).reshape(*exact.shape[:-1], -1, GROUP), -1) / jnp.where(tops > 0, tops, 1.0)
    norm = lambda rows: jnp.sqrt(jnp.sum(rows**2))  # noqa: E731
    return {
        "relative": float(norm(error[:, 1:]) / norm(exact[:, 1:])),
        "largest": float(jnp.max(share[:, 1:])),
        "first": float(norm(error[:, 0]) / norm(exact[:, 0])),
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes and dtypes of a store's records. width = T*H channels; teacher = H, or 0 where none is stored."""

    width: int
    teacher: int
    storage: str

    def __post_init__(self) -> None:
        if self.storage == "int8" and self.width % GROUP:
            expected = f"bfloat16, since {self.width} channels are no multiple of {GROUP}"
            raise ConfigError(problem("features.storage", "int8", expected))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is not quantised."""
        return np.dtype(np.float32) if self.storage == "float32" else _BF16

    def parts(self, length: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Name -> (shape, dtype) of a record's arrays, in their order."""
        parts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "input_ids": ((length,), np.dtype("<i4")),
            "loss_mask": ((length,), np.dtype(np.uint8)),
        }
        if self.storage == "int8":
            parts["first"] = ((self.width,), _BF16)
            parts["codes"] = ((length - 1, self.width), np.dtype(np.int8))
            parts["scales"] = ((length - 1, self.width // GROUP), _BF16)
        else:
            parts["features"] = ((length, self.width), self.dtype)
        if self.teacher:
            parts["teacher"] = ((length, self.teacher), self.dtype)
        return parts

    def record_bytes(self, length: int) -> int:
        """Size of a record."""
        sizes = (int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.parts(length).values())
        return _HEADER.size + sum(sizes)

    def encode(self, example_id: int, arrays: dict[str, np.ndarray]) -> bytes:
        """A record of the arrays that `parts` names (int8: codes and scales of all L rows; the first is dropped).

        Raises:
          DataError: the features of a real row are no numbers.
        """
        length = len(arrays["input_ids"])
        pieces = [_HEADER.pack(_MAGIC, example_id, length, self.width)]
        for name, (shape, dtype) in self.parts(length).items():
            array = arrays[name][1:] if name in ("codes", "scales") else arrays[name]
            array = np.ascontiguousarray(array, dtype)
            if array.shape != shape:
                raise ValueError(f"{name}: {array.shape}, expected {shape}")
            if dtype.kind in "fV" and not np.isfinite(array.astype(np.float32)).all():
                raise DataError(
                    problem(f"example {example_id}", f"{name} that are no numbers", "finite ones", "set target.dtype")
                )
            pieces.append(array.tobytes())
        return b"".join(pieces)

    def decode(self, record: bytes) -> dict[str, Any]:
        """The arrays of a record (views of its bytes) and `example_id`. Raises DataError for another kind of record."""
        if len(record) < _HEADER.size:
            raise DataError(problem("features.path", f"a record of {len(record)} bytes", "a whole one"))
        magic, example_id, length, width = _HEADER.unpack_from(record)
        found = (magic, width, len(record))
        expected = (_MAGIC, self.width, self.record_bytes(length))
        if found != expected:
            raise DataError(problem("features.path", f"a record with {found}", f"{expected}", "capture it again"))
        arrays: dict[str, Any] = {"example_id": example_id}
        place = _HEADER.size
        for name, (shape, dtype) in self.parts(length).items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(record, dtype, count, place).reshape(shape)
            place += count * dtype.itemsize
        return arrays

    def fields(self, seq_len: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Name -> (shape, dtype) of what a padded sequence of a batch has of it."""
        shapes = self.parts(seq_len + 1) if self.storage == "int8" else self.parts(seq_len)
        fields = {name: part for name, part in shapes.items() if name not in ("input_ids", "loss_mask")}
        if self.teacher:
            fields["teacher"] = ((seq_len, self.teacher), self.dtype)
        return fields

    def stack(self, records: Sequence[dict[str, Any]], seq_len: int, rows: int) -> dict[str, np.ndarray]:
        """Arrays [rows, ...] as `fields` says, zero behind each sequence's end and in rows without a record."""
        stacked = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in self.fields(seq_len).items()}
        for place, record in enumerate(records):
            for name, array in stacked.items():
                if name == "first":
                    array[place] = record[name]
                else:
                    start = 1 if name in ("codes", "scales") else 0
                    rows_kept = record[name][: seq_len - start]
                    array[place, start : start + len(rows_kept)] = rows_kept
        return stacked
