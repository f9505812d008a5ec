"""DeepSpec's target cache, version 2, read where it lies; nothing is unpickled.

    manifest.json   version 2, num_samples, num_shards, target_layer_ids (ascending), hidden_dtype, token_dtype,
                    mask_dtype, index_record_size 56, hidden_size, shards [{shard_id, file_name}],
                    target_model_name_or_path
    samples.idx     records <QIIQQQQQ>: sample id, shard id, sequence length, then the byte offsets of ids, attention
                    mask, loss mask, target hidden states and last hidden states
    shard files     int32 ids, uint8 masks, bfloat16 [S, T*H] raw outputs of the layers, bfloat16 [S, H] after the final
                    norm

The cache names its target, but neither its revision nor its tokenizer. `featurestore.cache` makes features of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import DataError, problem

__all__ = ["MANIFEST", "Samples", "cached_rows", "is_cache"]

MANIFEST = "manifest.json"

_INDEX = struct.Struct("<QIIQQQQQ")
_INDEX_FILE = "samples.idx"
_FIXED = {
    "version": 2, "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8",
    "index_record_size": _INDEX.size,
}  # fmt: skip
_NEEDED = (*_FIXED, "num_samples", "target_layer_ids", "hidden_size", "shards", "target_model_name_or_path")
_BF16 = np.dtype(ml_dtypes.bfloat16)


def is_cache(manifest: dict[str, Any]) -> bool:
    """Whether a manifest is one of these."""
    return "index_record_size" in manifest and "target_layer_ids" in manifest


class Samples:
    """The samples of a cache, by their place in the index.

    Raises:
      DataError: a field of the manifest is missing or another format's, a file is missing, or the index does not fit.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        where = f"features.path ({MANIFEST})"
        for name in _NEEDED:
            if name not in manifest:
                raise DataError(problem(f"{where} {name}", "nothing", "the field of a DeepSpec cache of version 2"))
        for name, expected in _FIXED.items():
            if manifest[name] != expected:
                raise DataError(problem(f"{where} {name}", manifest[name], f"{expected}", "make the cache anew"))
        self.width = len(manifest["target_layer_ids"]) * manifest["hidden_size"]
        self.hidden = manifest["hidden_size"]
        index_file = folder / _INDEX_FILE
        index = index_file.read_bytes() if index_file.is_file() else b""
        if len(index) != manifest["num_samples"] * _INDEX.size:
            expected = f"{manifest['num_samples']} x {_INDEX.size}"
            raise DataError(problem(f"features.path ({_INDEX_FILE})", f"{len(index)} bytes", expected, "copy it again"))
        self._index = list(_INDEX.iter_unpack(index))
        self._files = [folder / Path(shard["file_name"]).name for shard in manifest["shards"]]
        self._check_files()

    def _check_files(self) -> None:
        """Every file is there and as long as what the index says it holds."""
        ends = [0] * len(self._files)
        for sample, shard, length, *offsets in self._index:
            if shard >= len(ends):
                raise DataError(problem(f"features.path ({_INDEX_FILE})", f"sample {sample} in shard {shard}"))
            sizes = (4 * length, length, length, 2 * length * self.width, 2 * length * self.hidden)
            ends[shard] = max(ends[shard], *(a + b for a, b in zip(offsets, sizes, strict=True)))
        for file, end in zip(self._files, ends, strict=True):
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                raise DataError(problem(f"features.path ({file.name})", f"{size} bytes", f"at least {end}"))

    def __len__(self) -> int:
        return len(self._index)

    def tokens(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [L] and loss mask bool [L]; L leaves out what the attention mask masks at the end."""
        _, shard, length, ids, attention, mask, *_ = self._index[place]
        attended = self._read(shard, attention, length, np.dtype(np.uint8)) > 0
        real = int(attended.sum())
        if not attended[:real].all():
            raise DataError(problem(f"features.path (sample {place})", "an attention mask with holes", "one without"))
        tokens = self._read(shard, ids, length, np.dtype("<i4"))[:real]
        return tokens, self._read(shard, mask, length, np.dtype(np.uint8))[:real] > 0

    def hidden_states(self, place: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """features bfloat16 [length, T*H] and last hidden state bfloat16 [length, H]."""
        _, shard, _, _, _, _, features, last = self._index[place]
        read = lambda at, width: self._read(shard, at, length * width, _BF16).reshape(length, width)  # noqa: E731
        return read(features, self.width), read(last, self.hidden)

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`tokens` of every sample."""
        return (self.tokens(place) for place in range(len(self)))

    def _read(self, shard: int, at: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        return np.fromfile(self._files[shard], dtype, count, offset=at)


def cached_rows(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, loss mask) of every sample of a cache, for `data.path`. Raises DataError for any other folder."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not is_cache(manifest):
        expected = "a file of conversations, an .npz token file or the folder of a DeepSpec cache"
        raise DataError(problem("data.path", f"the folder {str(folder)!r}", expected))
    return Samples(folder, manifest).rows()
