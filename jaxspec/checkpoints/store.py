"""Hugging Face checkpoint folders: config.json beside one .safetensors file or several with an index.

`TensorFolder` reads names, shapes and dtypes from the headers alone and tensors one at a time; `write_folder` writes a
folder atomically. Weights kept as pickle (.bin, .pt, .pth) are refused: opening one runs code that came with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.atomic import replacing_folder
from jaxspec.checkpoints.coverage import match
from jaxspec.checkpoints.safetensors_file import Entry, Header, LazyTensor, read_header, read_tensor, write_safetensors
from jaxspec.errors import CheckpointError

__all__ = ["LazyTensor", "TensorFolder", "match", "read_config", "read_json", "write_folder"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_json(path: str | os.PathLike[str], *, what: str = "a JSON object") -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file and what is wrong with it."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: found no such file, expected {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}), expected {what}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: found text that is not JSON ({error}), expected {what}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: found JSON of type {type(value).__name__}, expected {what}")
    return value


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError where it is none, or its parts have other types."""
    path = _folder(directory) / "config.json"
    config = read_json(path, what="the model's config.json")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{path}: architectures: found {names!r}, expected a list of names")
    for key in ("dflash_config", "eagle_config", "transformer_layer_config"):
        if config.get(key) is not None and not isinstance(config[key], dict):
            raise CheckpointError(f"{path}: {key}: found {config[key]!r}, expected a JSON object")
    return config


def _folder(directory: str | os.PathLike[str]) -> Path:
    directory = Path(directory)
    if not directory.exists():
        raise CheckpointError(
            f"{directory}: found no such folder, expected a checkpoint folder (config.json and *.safetensors)"
        )
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: found a file, expected a checkpoint folder (config.json and *.safetensors)"
        )
    return directory


class TensorFolder:
    """The tensors of a checkpoint folder, read from headers; nothing of their contents is held.

    Raises CheckpointError when the folder, a shard or the index is absent, truncated or contradicts another.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = _folder(directory)
        self._headers: dict[str, Header] = {}
        for path, promised in self._files():
            header = read_header(path)
            lost = [name for name in promised or () if name not in header.entries]
            stray = [name for name in header.entries if promised is not None and name not in promised]
            if lost or stray:
                what = f"lacks {', '.join(lost)}" if lost else f"holds {', '.join(stray)} besides"
                raise CheckpointError(
                    f"{path}: found a shard that {what}, expected what {INDEX} says of it; fetch the checkpoint again"
                )
            for name in header.entries:
                if name in self._headers:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is also in {self._headers[name].path.name}, expected it once"
                    )
                self._headers[name] = header

    def _files(self) -> list[tuple[Path, set[str] | None]]:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.is_file():
            return [(single, None)]
        if index.is_file():
            return self._shards(index)
        others = sorted(path for path in self.directory.glob("*.safetensors") if path.is_file())
        if len(others) == 1:
            return [(others[0], None)]
        if others:
            names = ", ".join(path.name for path in others)
            raise CheckpointError(
                f"{self.directory}: found {names} and no {INDEX}, expected the index that says which tensor is where"
            )
        pickles = sorted(path.name for path in self.directory.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise CheckpointError(
                f"{self.directory}: found only pickle weights ({', '.join(pickles)}), expected *.safetensors; "
                "loading pickle runs code from the file, so convert them with safetensors first"
            )
        raise CheckpointError(f"{self.directory}: found no weights, expected {SINGLE} or {INDEX}")

    def _shards(self, index: Path) -> list[tuple[Path, set[str] | None]]:
        table = read_json(index, what="a safetensors index").get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
            raise CheckpointError(
                f"{index}: weight_map: found {type(table).__name__}, expected tensor names with their shard's file name"
            )
        shards: dict[str, set[str]] = {}
        for name, shard in table.items():
            if Path(shard).name != shard or "\\" in shard:
                raise CheckpointError(
                    f"{index}: tensor {name!r}: found shard {shard!r}, expected a file name in the same folder"
                )
            shards.setdefault(shard, set()).add(name)
        absent = sorted(shard for shard in shards if not (self.directory / shard).is_file())
        if absent:
            raise CheckpointError(
                f"{self.directory}: missing shard {', '.join(absent)}, expected all {len(shards)} shards that {INDEX} "
                "names; fetch them again"
            )
        return [(self.directory / shard, shards[shard]) for shard in sorted(shards)]

    def names(self) -> list[str]:
        """Tensor names, in the order of the bytes."""
        return list(self._headers)

    def _entry(self, name: str) -> Entry:
        if name not in self._headers:
            raise CheckpointError(
                f"{self.directory}: found no tensor {name!r}, expected one of its {len(self._headers)}"
            )
        return self._headers[name].entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._entry(name).dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._headers}

    def read(self, name: str) -> np.ndarray:
        """One tensor, as a fresh array in the dtype of the file (bfloat16 through ml_dtypes)."""
        self._entry(name)
        return read_tensor(self._headers[name], name)

    def bytes_of(self, name: str) -> np.ndarray:
        """One tensor's bytes, uint8 [n], mapped from the file and read-only: what is not touched is not read."""
        entry = self._entry(name)
        if not entry.nbytes:
            return np.empty(0, np.uint8)
        return np.memmap(self._headers[name].path, np.uint8, "r", entry.start, (entry.nbytes,))

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of one tensor (a slice an axis), as a fresh array in the dtype of the file."""
        entry = self._entry(name)
        return np.array(self.bytes_of(name).view(entry.dtype).reshape(entry.shape)[index])

    def metadata(self) -> dict[str, str]:
        """The free-form `__metadata__` of the file, or of the first shard."""
        return dict(next(iter(self._headers.values())).metadata) if self._headers else {}

    def fingerprint(self) -> str:
        """16 hex digits that change with the config, the tensors' names and shapes, or (sampled at two places each)
        their values.

        A stand-in for a revision where the folder has none; reading every byte of a large model at each start would
        take minutes.
        """
        digest = hashlib.sha256(
            (self.directory / "config.json").read_bytes() if (self.directory / "config.json").is_file() else b""
        )
        for name, header in sorted(self._headers.items()):
            entry = header.entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            with header.path.open("rb") as file:
                for offset in (0, max(0, entry.nbytes // 2 - 2048)):
                    file.seek(entry.start + offset)
                    digest.update(file.read(min(4096, entry.nbytes - offset)))
        return digest.hexdigest()[:16]


def write_folder(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    extra_files: Mapping[str, str | bytes | Mapping[str, Any]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint folder atomically; returns it.

    Args:
      tensors: name -> array or LazyTensor, written in this order in this dtype.
      config: config.json.
      extra_files: file name -> text, bytes or a JSON object.
      metadata: `__metadata__` of the safetensors file; {"format": "pt"}, which other readers ask for, when left out.
    """
    with replacing_folder(directory) as fresh:
        write_safetensors(fresh / SINGLE, tensors, {"format": "pt"} if metadata is None else metadata)
        for name, content in {"config.json": config, **(extra_files or {})}.items():
            if isinstance(content, Mapping):
                content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (fresh / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(directory)


def check_floats(folder: TensorFolder, name: str) -> None:
    """Raises CheckpointError for a tensor of whole numbers: weights that were cut to integers are no weights."""
    if folder.dtype(name).kind in "biu":
        raise CheckpointError(
            f"{folder.directory}: tensor {name!r}: found {folder.dtype(name)} values, expected floats"
        )
