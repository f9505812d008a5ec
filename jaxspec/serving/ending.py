"""Where an answer ends: stop strings, stop ids and length, found token by token whatever the blocks were.

A round may bring tokens past the end; they are cut here, so ids, text, log probabilities and usage all end at the token
that completed the stop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxspec.errors import RequestError, problem
from jaxspec.serving.text import Codec, Detokenizer


class StopStrings:
    """Searches streamed text; what may yet become a stop string is held back.

    The stop that is completed first ends the text, of those completed together the one that began first: what a
    character-wise search finds, so the split into tokens makes no difference.
    """

    def __init__(self, stops: Sequence[str]):
        for stop in stops:
            if not stop:
                raise RequestError(problem("stop", repr(stop), "strings of at least one character"))
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """More text: what is certain now, without the stop string, and whether one was completed."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, at an end that no stop string made."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


class Piece(NamedTuple):
    """What a round brought: ids and text to send, and "stop" or "length" once the answer is over."""

    tokens: tuple[int, ...]
    text: str = ""
    reason: str | None = None
    by_id: bool = False  # the last token is a stop id, which has no text


class AnswerEnd:
    """One answer. `room` is how many tokens it may have; without a codec there is no text and no stop string.

    A stop id is part of the answer's ids, but neither it nor a stop string is part of its text. Before `min_tokens`
    neither counts; a stop string must also begin behind the text of those.
    """

    def __init__(
        self,
        room: int,
        *,
        stop_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        codec: Codec | None = None,
        min_tokens: int = 0,
    ):
        if stops and codec is None:
            raise RequestError(problem("stop", list(stops), "no stop strings", "this target has no tokenizer"))
        self._room, self._stop_ids, self._min_tokens = room, frozenset(stop_ids), min_tokens
        self._stops = StopStrings(stops)
        self._text = None if codec is None else Detokenizer(codec)
        self.emitted = 0
        self.reason: str | None = "length" if room <= 0 else None

    def push(self, tokens: Sequence[int]) -> Piece:
        """The tokens of a round; those behind the end are dropped, as is everything once the answer is over."""
        if self._text is None:
            return self._push_ids(tokens)
        kept, text, by_id = [], "", False
        for token in tokens:
            if self.reason is not None:
                break
            kept.append(int(token))
            by_id = self.emitted >= self._min_tokens and int(token) in self._stop_ids
            text += self._take(int(token), by_id)
        return Piece(tuple(kept), text, self.reason, by_id)

    def _push_ids(self, tokens: Sequence[int]) -> Piece:
        """`push` where there is no text, and so no stop string."""
        if self.reason is not None:
            return Piece((), "", self.reason)
        kept, by_id = tuple(tokens[: self._room - self.emitted]), False
        if not self._stop_ids.isdisjoint(kept):
            counts = range(max(self._min_tokens - self.emitted, 0), len(kept))
            end = next((index for index in counts if kept[index] in self._stop_ids), None)
            if end is not None:
                kept, by_id = kept[: end + 1], True
        self.emitted += len(kept)
        if by_id:
            self.reason = "stop"
        elif self.emitted >= self._room:
            self.reason = "length"
        return Piece(kept, "", self.reason, by_id)

    def stop(self) -> str:
        """Ends the answer where it is (a grammar is complete, say): the text that was held back."""
        self.reason = "stop"
        return self._rest()

    def _take(self, token: int, by_id: bool) -> str:
        self.emitted += 1
        text = "" if self._text is None or by_id else self._text.push([token])
        stopped = False
        if self.emitted > self._min_tokens:
            text, stopped = self._stops.push(text)
        if stopped or by_id:
            self.reason = "stop"
        elif self.emitted >= self._room:
            self.reason = "length"
        if self.reason is not None and not stopped:
            text += self._rest()
        return text

    def _rest(self) -> str:
        """What the tokenizer and the search held back. A stop string that only this completes still counts."""
        tail = "" if self._text is None else self._text.flush()
        text, stopped = self._stops.push(tail)
        if stopped:
            self.reason = "stop"
            return text
        return text + self._stops.flush()
