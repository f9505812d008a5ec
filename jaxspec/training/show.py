"""Tokens with their loss mask, for a person's eyes: coloured on a terminal, with markers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["pieces", "show"]

_SUPERVISED = ("black on green3", "black on green1")  # alternating, so that the edges of tokens are seen
_CONTEXT = ("white on grey23", "white on grey37")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # tokens that one character may be spread over


def pieces(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[str, bool]]:
    """(text, supervised) of every token. Tokens that share a character come together; none is across the mask's
    edge."""
    result: list[tuple[str, bool]] = []
    pending: list[int] = []
    for index, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
        pending.append(int(token))
        text = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        edge = index + 1 == len(ids) or bool(mask[index + 1]) != bool(supervised)
        if edge or len(pending) == _LONGEST or not text.endswith(_REPLACEMENT):
            result.append((text, bool(supervised)))
            pending = []
    return result


def show(console: Console, tokenizer: Any, ids: Sequence[int], mask: Sequence[bool], title: str) -> None:
    """Prints one example. Without colours, `{+` and `+}` stand around what is supervised, `|` between its tokens."""
    parts = pieces(tokenizer, ids, mask)
    console.print(f"--- {title}", markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        text = Text()
        for index, (piece, supervised) in enumerate(parts):
            text.append(piece.replace("\n", "\u21b5\n"), (_SUPERVISED if supervised else _CONTEXT)[index % 2])
        console.print(text)
        return
    line, inside = "", False
    for piece, supervised in parts:
        line += ("|" if inside else "{+") if supervised else "+}" if inside else ""
        line, inside = line + piece, supervised
    console.print(line + ("+}" if inside else ""), markup=False, highlight=False, soft_wrap=True)
