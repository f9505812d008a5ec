"""From a row of a data set to a conversation: the shapes that public data sets have, told apart by their keys.

    {"messages": [{"role", "content"}]}                    role user, assistant or system
    {"conversations": [{"from", "value"}]}                 ShareGPT: human, gpt, system
    {"instruction", "input", "output"}                     Alpaca
    {"prompt", "answer"}                                   or "response" or "completion" for the answer

A `system` text beside them comes first. An assistant's message may say "finish_reason": "length" (`jaxspec regenerate`
writes it): that answer was cut, so its end of turn is not the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.errors import DataError, problem
from jaxspec.training.sources import rows

__all__ = ["BadRow", "conversations", "prompts"]

Messages = list[dict[str, str]]

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_ANSWERS = ("answer", "response", "completion")
_SHAPES = (
    '{"messages": [{"role", "content"}]}, ShareGPT\'s {"conversations": [{"from", "value"}]}, Alpaca\'s '
    '{"instruction", "input", "output"} or {"prompt", "answer"}'
)


class BadRow(Exception):
    """A readable row that cannot be trained on; `reason` is the name it is counted under."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def conversations(
    path: Path, field: str = "data.path", *, answered: bool = True
) -> Iterator[tuple[str, Messages | BadRow]]:
    """(place, conversation) of every row of a file, in order; a row that cannot be used comes as the BadRow that says
    why.

    Args:
      field: what named the file; it heads an error.
      answered: whether a conversation without an answer cannot be used.

    Raises:
      DataError: the file is broken or a row has none of the shapes; the message has file and place.
    """
    for place, row in rows(path, field):
        try:
            messages = _messages(row, f"{field} ({place})")
            if answered and not any(turn["role"] == "assistant" and turn["content"].strip() for turn in messages):
                raise BadRow("no answer")
            yield place, messages
        except BadRow as bad:
            yield place, bad


def prompts(path: Path, field: str) -> Iterator[str]:
    """What the rows of an evaluation set ask: text, `prompt`, `question`, `turns`, or a conversation's user turns.

    Raises:
      DataError: the file is broken or a row asks nothing; the message has file and place.
    """
    for place, row in rows(path, field):
        if isinstance(row, str):
            yield row
            continue
        asked = [row[key] for key in ("prompt", "question", "turns") if key in row] if isinstance(row, dict) else []
        if asked:
            asked = asked[0] if isinstance(asked[0], list) else asked[:1]
        else:
            try:
                turns = _messages(row, f"{field} ({place})")
            except BadRow as bad:
                raise DataError(problem(f"{field} ({place})", bad.reason, "a prompt as text")) from None
            asked = [turn["content"] for turn in turns if turn["role"] == "user"]
        if not asked or not all(isinstance(text, str) for text in asked):
            raise DataError(problem(f"{field} ({place})", "no prompt", 'text under "prompt", or a conversation'))
        yield from asked


def _messages(row: Any, place: str) -> Messages:
    result = [_turn(turn) for turn in _turns(row, place)]
    cut = [index for index, turn in enumerate(result) if turn.get("finish_reason") == "length"]
    if cut and cut != [len(result) - 1]:
        raise BadRow("a cut answer before the last turn")
    return result


def _turns(row: Any, place: str) -> list[Any]:
    row = _filled(row) if isinstance(row, dict) else {}
    turns: Any
    if "messages" in row or "conversations" in row:
        turns = row.get("messages", row.get("conversations"))
    elif "instruction" in row:
        extra = row.get("input", "")
        if not isinstance(row["instruction"], str) or not isinstance(extra, str):
            raise BadRow("content is not text")
        turns = _pair("\n".join(filter(None, (row["instruction"], extra))), row.get("output"))
    elif "prompt" in row:
        turns = _pair(row["prompt"], next((row[key] for key in _ANSWERS if key in row), None))
    else:
        turns = None
    if not isinstance(turns, list):
        raise DataError(problem(f"{place}: messages", "no list of turns", _SHAPES))
    return [{"role": "system", "content": row["system"]}, *turns] if row.get("system") else turns


def _pair(question: Any, answer: Any) -> list[Any]:
    answers = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [{"role": "user", "content": question}, *answers]


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Without the columns that are null: a table has them in every row."""
    return {key: value for key, value in row.items() if value is not None}


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise BadRow("turn is not an object")
    turn = _filled(turn)
    role = _ROLES.get(str(turn.get("role", turn.get("from"))))
    if role is None:
        raise BadRow("unknown role")
    result = {"role": role, "content": _text(turn.get("content", turn.get("value")))}
    if role == "assistant" and turn.get("finish_reason") == "length":
        result["finish_reason"] = "length"
    return result


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
