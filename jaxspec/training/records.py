"""Reading the two data formats: conversations as JSON lines, and packed token files.

JSON lines hold {"messages": [{"role", "content"}]} or ShareGPT's {"conversations": [{"from", "value"}]}. A packed
file is an .npz with `tokens` (uint16, uint32 or int32, all examples after one another), `offsets` [examples + 1] and
`prompt_lengths` [examples]: what follows an example's prompt is supervised.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem

__all__ = ["BadRow", "conversations", "packed"]

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
PACKED_FIELDS = ("tokens", "offsets", "prompt_lengths")


class BadRow(Exception):
    """A readable row that cannot be trained on; `reason` is the name it is counted under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def _text(content: Any) -> str:
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadRow("content is not text")
    text = "".join(part["text"] for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("content is not Unicode text") from None  # a lone surrogate: no tokenizer takes it
    return text


def _messages(row: Any, place: str) -> list[dict[str, str]]:
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        raise DataError(
            problem(
                f"{place}: messages",
                "no list of turns",
                '{"messages": [{"role", "content"}]} or ShareGPT\'s {"conversations": [{"from", "value"}]}',
            )
        )
    result = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise BadRow("turn is not an object")
        role = _ROLES.get(str(turn.get("role", turn.get("from"))))
        if role is None:
            raise BadRow("unknown role")
        result.append({"role": role, "content": _text(turn.get("content", turn.get("value")))})
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in result):
        raise BadRow("no answer")
    return result


def conversations(path: Path) -> Iterator[list[dict[str, str]] | BadRow]:
    """Conversations of a JSON lines file, in order; a row that cannot be used comes as the BadRow that says why.

    Raises:
      DataError: a line is no JSON or no conversation at all; the message has file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"data.path ({path.name}, line {number})"
            try:
                yield _messages(json.loads(line), place)
            except json.JSONDecodeError as error:
                raise DataError(
                    problem(place, f"no JSON: {error.msg} at column {error.colno}", "one JSON object a line")
                ) from error
            except UnicodeDecodeError as error:
                raise DataError(problem(place, f"no UTF-8 ({error.reason})", "UTF-8 text")) from error
            except RecursionError:
                raise DataError(problem(place, "JSON nested too deeply", "one JSON object a line")) from None
            except BadRow as bad:
                yield bad


def packed(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens int32 [total], offsets int64 [n + 1], prompt_lengths int64 [n] of an .npz file.

    Raises:
      DataError: unreadable, a field is missing or the fields contradict each other.
    """
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(problem(f"data.path ({path.name})", "a single array", "an .npz token file"))
        with file:
            missing = [name for name in PACKED_FIELDS if name not in file.files]
            if missing:
                raise DataError(
                    problem(
                        f"data.path ({path.name})", f"no array {missing[0]!r}", f"arrays {', '.join(PACKED_FIELDS)}"
                    )
                )
            tokens, offsets, prompts = (file[name] for name in PACKED_FIELDS)
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError) as error:
        raise DataError(problem(f"data.path ({path.name})", f"unreadable ({error})", "an .npz token file")) from error
    for name, array in zip(PACKED_FIELDS, (tokens, offsets, prompts), strict=True):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                problem(f"data.path ({path.name}) {name}", f"{array.dtype} {array.shape}", "one dimension of integers")
            )
    offsets, prompts = offsets.astype(np.int64), prompts.astype(np.int64)
    lengths = np.diff(offsets)
    if len(offsets) != len(prompts) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or (lengths < 0).any():
        raise DataError(
            problem(
                f"data.path ({path.name}) offsets",
                f"{len(offsets)} from {offsets[:1]} to {offsets[-1:]}",
                f"{len(prompts) + 1} ascending ones from 0 to {len(tokens)}",
            )
        )
    if ((prompts < 0) | (prompts > lengths)).any():
        raise DataError(
            problem(
                f"data.path ({path.name}) prompt_lengths",
                "one outside its example",
                "0 <= prompt length <= example length",
            )
        )
    if len(tokens) and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise DataError(
            problem(f"data.path ({path.name}) tokens", f"ids from {tokens.min()} to {tokens.max()}", "token ids")
        )
    return tokens.astype(np.int32), offsets, prompts
