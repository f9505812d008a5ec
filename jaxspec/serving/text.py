"""Text to ids and back: a tokenizer behind three methods, and a detokeniser that streams whole characters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from jaxspec.errors import CheckpointError, DataError, RequestError

__all__ = ["Codec", "Detokenizer", "TokenizerCodec"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character lacks at most its last three bytes, and a decoder shows them as at most one mark each.
_LONGEST_PENDING = 3
# Ids that may wait for a character to become whole: far more than a block holds, so only broken bytes get this far.
_PATIENCE = 64


class Codec(Protocol):
    """What the server needs of a tokenizer; every method may be called from any thread."""

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenizerCodec:
    """A `transformers` fast tokenizer as a Codec."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # Fast tokenizers refuse ("Already borrowed") a call that changes their settings while another one runs.
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; RequestError when it is not Unicode (a lone surrogate)."""
        _check_unicode(text)
        with self._lock:
            return list(self.tokenizer.encode(text))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The chat template with the assistant's header at the end; RequestError when there is none or it refuses."""
        from jaxspec.checkpoints.tokenizer import chat_ids

        for turn in messages:
            _check_unicode(turn.get("content", ""))
        with self._lock:
            try:
                return chat_ids(self.tokenizer, messages)
            except (CheckpointError, DataError) as error:
                raise RequestError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt: found a lone surrogate at {error.start}, expected Unicode text") from None


class Detokenizer:
    """Turns tokens into text as they come: the pieces joined are `decode(all ids)`, and none ends inside a character.

    A token may hold half a character, so the ids since the last whole one are decoded again with each new token. The
    window keeps one whole stretch before them, because some decoders treat the first token of a text differently.
    Text that ends in replacement marks waits, all its marks: while a character is incomplete, a byte-fallback decoder
    shows the whole run of bytes before it as marks too. After `_PATIENCE` ids all but the last three are real.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self._ids: list[int] = []  # the window: settled ids, then pending ones
        self._settled = 0  # ids of the window that are known to end at a character
        self._sent = 0  # characters of the decoded window that have gone out

    def push(self, ids: Sequence[int]) -> str:
        """New tokens; returns the text that is now certain, maybe none."""
        before = len(self._ids)
        self._ids.extend(int(token) for token in ids)
        text = self._codec.decode(self._ids)
        certain = len(text)
        limit = _LONGEST_PENDING if len(self._ids) - self._settled > _PATIENCE else len(text)
        while certain and len(text) - certain < limit and text[certain - 1] == _REPLACEMENT:
            certain -= 1
        piece = text[self._sent : certain]
        whole = certain == len(text)
        if whole and piece:
            self._ids = self._ids[self._settled :]
            self._settled = len(self._ids)
            self._sent = len(self._codec.decode(self._ids))
            return piece
        if whole and text:
            # Special tokens, which add no text: an answer of nothing else must not grow the window.
            del self._ids[before:]
        self._sent = max(self._sent, certain)
        return piece

    def flush(self) -> str:
        """The end of the answer: what was held back, with marks for bytes that never came."""
        text = self._codec.decode(self._ids) if self._ids else ""
        piece, self._sent = text[self._sent :], len(text)
        return piece
