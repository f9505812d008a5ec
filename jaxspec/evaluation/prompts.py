"""Prompt files: one JSON object a line, with the prompt under "prompt"."""

from __future__ import annotations

import json
from pathlib import Path

from jaxspec.errors import DataError


def read_prompts(path: Path, field: str) -> list[str]:
    """The "prompt" of every line. Raises DataError naming `field`, the file and the line."""
    where = f"{field} {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: found no readable text ({error}), expected JSONL") from error
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # a JSON string may hold U+2028: no splitlines
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f'{where}, line {number}: expected a JSON object with "prompt"') from error
        if not isinstance(prompt, str):
            raise DataError(f'{where}, line {number}: found {prompt!r}, expected a string under "prompt"')
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{where}: found no prompts, expected at least one line")
    return prompts
