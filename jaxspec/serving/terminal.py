"""What the commands that print answers share: the prompt from standard input, a note on a short answer."""

from __future__ import annotations

import sys

from jaxspec.errors import RequestError, problem

__all__ = ["context_note", "read_prompt"]


def context_note(count: int) -> str:
    """What is said of an answer that the end of the context cut short."""
    return f"note: the context was full after {count} new tokens, fewer than were asked for (max_context limits both)"


def read_prompt() -> str:
    """The prompt from standard input, without the line ends around it."""
    try:
        text = sys.stdin.read().strip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(problem("standard input", f"a byte that is not UTF-8 at {error.start}", "text")) from None
    if not text:
        raise RequestError(problem("standard input", "nothing", "the prompt"))
    return text
