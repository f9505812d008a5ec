"""The packed token file: an .npz of token ids, boundaries and what is supervised.

Its arrays are `tokens` (uint16, uint32 or int32, all examples after one another), `offsets` [examples + 1], and either
`loss_mask` [tokens] or, for examples of one prompt and one answer, `prompt_lengths` [examples]: what follows the
prompt is supervised. `about`, the UTF-8 bytes of a JSON object, says what made the file; a trainer checks what it says
of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.atomic import replacing_file
from jaxspec.errors import DataError, problem

__all__ = ["Packed", "packed", "packed_about", "vocabulary_hash", "write_packed"]

_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError)


class Packed(NamedTuple):
    """tokens [total] integers, offsets int64 [n + 1], loss_mask bool [total]; `about` is empty where nothing is
    told."""

    tokens: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray
    about: dict[str, Any]


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 of what each id means: two tokenizers with one hash read each other's token files."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def write_packed(path: Path, content: Packed) -> None:
    """Writes the file, whole or not at all. Raises OSError."""
    with replacing_file(path) as fresh, fresh.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=content.tokens,
            offsets=content.offsets,
            loss_mask=content.loss_mask,
            about=np.frombuffer(json.dumps(content.about).encode(), np.uint8),
        )


def packed(path: Path) -> Packed:
    """Reads the file.

    Raises:
      DataError: unreadable, a field is missing or the fields contradict each other.
    """
    arrays = _arrays(path)
    about = _about(arrays.pop("about", None), path)
    for name, array in arrays.items():
        kinds = "iub" if name == "loss_mask" else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise DataError(_at(path, name, f"{array.dtype} {array.shape}", "one dimension of integers"))
    tokens, offsets = arrays["tokens"], arrays["offsets"].astype(np.int64)
    lengths = np.diff(offsets)
    count = len(arrays["prompt_lengths"]) if "prompt_lengths" in arrays else len(lengths)
    ascending = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(tokens) and (lengths >= 0).all()
    if not ascending:
        found = f"{len(offsets)} from {offsets[:1]} to {offsets[-1:]}"
        raise DataError(_at(path, "offsets", found, f"{count + 1} ascending ones from 0 to {len(tokens)}"))
    if len(tokens) and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise DataError(_at(path, "tokens", f"ids from {tokens.min()} to {tokens.max()}", "token ids"))
    return Packed(tokens, offsets, _loss_mask(arrays, offsets, path), about)


def packed_about(path: Path) -> dict[str, Any]:
    """What the file says of itself alone; empty where it says nothing. Raises DataError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return _about(file["about"] if "about" in file.files else None, path)
    except _BROKEN as error:
        raise DataError(problem(f"data.path ({path.name})", f"unreadable ({error})", "an .npz token file")) from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The known arrays of the file; exactly one of the two that say what is supervised."""
    wanted = ("tokens", "offsets", "loss_mask", "prompt_lengths", "about")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(problem(f"data.path ({path.name})", "a single array", "an .npz token file"))
        with file:
            arrays = {name: file[name] for name in wanted if name in file.files}
    except _BROKEN as error:
        raise DataError(problem(f"data.path ({path.name})", f"unreadable ({error})", "an .npz token file")) from error
    expected = "arrays tokens, offsets, and loss_mask or prompt_lengths"
    for name in ("tokens", "offsets"):
        if name not in arrays:
            raise DataError(problem(f"data.path ({path.name})", f"no array {name!r}", expected))
    if ("loss_mask" in arrays) == ("prompt_lengths" in arrays):
        found = "both loss_mask and prompt_lengths" if "loss_mask" in arrays else "neither loss_mask nor prompt_lengths"
        raise DataError(problem(f"data.path ({path.name})", found, expected))
    return arrays


def _loss_mask(arrays: dict[str, np.ndarray], offsets: np.ndarray, path: Path) -> np.ndarray:
    lengths = np.diff(offsets)
    if "loss_mask" in arrays:
        mask = arrays["loss_mask"]
        if len(mask) != offsets[-1] or (len(mask) and mask.max() > 1) or (mask.dtype.kind == "i" and (mask < 0).any()):
            raise DataError(_at(path, "loss_mask", f"{len(mask)} values", f"{offsets[-1]} values, each 0 or 1"))
        return mask.astype(bool)
    prompts = arrays["prompt_lengths"].astype(np.int64)
    if ((prompts < 0) | (prompts > lengths)).any():
        raise DataError(_at(path, "prompt_lengths", "one outside its example", "0 <= prompt length <= example length"))
    return np.arange(offsets[-1]) >= np.repeat(offsets[:-1] + prompts, lengths)


def _about(array: np.ndarray | None, path: Path) -> dict[str, Any]:
    if array is None:
        return {}
    try:
        about = json.loads(array.tobytes())
    except ValueError as error:
        raise DataError(_at(path, "about", f"no JSON ({error})", "the bytes of a JSON object")) from error
    if not isinstance(about, dict):
        raise DataError(_at(path, "about", repr(about), "a JSON object"))
    return about


def _at(path: Path, name: str, found: str, expected: str) -> str:
    return problem(f"data.path ({path.name}) {name}", found, expected)
