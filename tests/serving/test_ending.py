"""Stop strings over token boundaries, stop ids and length, whatever blocks the tokens came in (B15, B16, B17, B19)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.serving.ending import AnswerEnd, StopStrings

pytestmark = pytest.mark.ci


class Pieces:
    """A codec whose ids are given pieces of bytes."""

    def __init__(self, *pieces: str | bytes):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def decode(self, ids) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


def run(end: AnswerEnd, blocks: list[list[int]]) -> tuple[list[int], str, str | None]:
    pieces = [end.push(block) for block in blocks]
    return [t for p in pieces for t in p.tokens], "".join(p.text for p in pieces), pieces[-1].reason


def splits(tokens: list[int]) -> list[list[list[int]]]:
    """Every way to cut a list into blocks."""
    cuts = itertools.product([False, True], repeat=len(tokens) - 1)
    ways = []
    for cut in cuts:
        blocks = [[tokens[0]]]
        for token, new in zip(tokens[1:], cut, strict=True):
            blocks.append([token]) if new else blocks[-1].append(token)
        ways.append(blocks)
    return ways


def test_B15_a_stop_inside_a_block_ends_text_and_ids() -> None:
    codec = Pieces("a", "END", "E", "ND", "b", "c", "d", "e", "f", "g")
    end = AnswerEnd(100, stops=["END"], codec=codec)
    assert run(end, [[0, 0], [0, 2, 3, 4, 5, 6, 7, 8, 9]]) == ([0, 0, 0, 2, 3], "aaa", "stop")
    assert end.push([4, 5]).tokens == ()  # B16: nothing after the end


@pytest.mark.parametrize(
    ("pieces", "stops", "tokens", "text", "kept"),
    [
        (["x", "E", "N", "D", "y"], ["END"], [0, 1, 2, 3, 4], "x", 4),  # three tokens
        (["x", "E", "NDy"], ["END"], [0, 1, 2, 0], "x", 3),  # ends inside a token
        (["xEN", "D"], ["END"], [0, 1, 0], "x", 2),
        (["STOP"], ["STOP"], [0, 0], "", 1),  # the whole first block
        (["a", "bc", "d"], ["cd", "b"], [0, 1, 2], "a", 2),  # two stops: the earlier end wins
        (["aABCDz"], ["ABCD", "BC"], [0], "aA", 1),  # inside one token too, as character by character
        (["A", "B"], ["AB", "B"], [0, 1], "", 2),  # completed together: the earlier start
        (["E", "E", "ND"], ["END"], [0, 1, 2], "E", 3),  # a false start
        (["é", b"\xc3", b"\xa9"], ["éé"], [0, 1, 2, 0], "", 3),  # a stop that ends in half a character
    ],
)
def test_B15_the_split_into_blocks_makes_no_difference(pieces, stops, tokens, text: str, kept: int) -> None:
    for blocks in splits(tokens):
        end = AnswerEnd(100, stops=stops, codec=Pieces(*pieces))
        assert run(end, blocks) == (tokens[:kept], text, "stop"), blocks


def test_text_that_may_become_a_stop_is_held_back_and_given_at_the_end() -> None:
    end = AnswerEnd(3, stops=["END"], codec=Pieces("a", "E", "N"))
    assert [end.push([token]).text for token in (0, 1)] == ["a", ""]
    last = end.push([2])
    assert (last.text, last.reason) == ("EN", "length")


def test_streamed_text_equals_a_search_over_the_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("ab"), 12))
        stops = ["".join(rng.choice(list("ab"), int(rng.integers(1, 5)))) for _ in range(int(rng.integers(1, 4)))]
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        expected = text[: min(ends)[1]] if ends else text
        search, out, stopped = StopStrings(stops), "", False
        while text and not stopped:
            size = int(rng.integers(1, 4))
            piece, stopped = search.push(text[:size])
            out, text = out + piece, text[size:]
        assert (out if stopped else out + search.flush()) == expected
        assert stopped == bool(ends)


@pytest.mark.parametrize("block", [1, 2, 3, 6, 8])
def test_B17_stop_and_length_in_one_block(block: int) -> None:
    STOP = 9
    cases = [
        ([1, 2, STOP, 4, 5, 6], 5, 3, "stop"),
        ([1, 2, 3, 4, 5, STOP], 5, 5, "length"),
        ([1, 2, 3, 4, STOP, 6], 5, 5, "stop"),
        ([STOP, 1, 2], 5, 1, "stop"),  # B19: the very first token
        ([1, 2, 3, 4, 5, 6, 7, 8], 1, 1, "length"),
        ([1, 2], 0, 0, "length"),
    ]
    letters = "abcdefghij"
    for (tokens, room, kept, reason), codec in itertools.product(cases, (None, Pieces(*letters))):
        blocks = [tokens[i : i + block] for i in range(0, len(tokens), block)]
        got, text, why = run(AnswerEnd(room, stop_ids=[STOP], codec=codec), blocks)
        said = "" if codec is None else "".join(letters[token] for token in tokens[:kept] if token != STOP)
        assert (got, text, why) == (tokens[:kept], said, reason)


def test_B19_an_end_at_every_slot_of_the_block() -> None:
    for slot in range(8):
        tokens = [1] * 8
        tokens[slot] = 6 + slot % 2
        assert run(AnswerEnd(100, stop_ids=[6, 7]), [tokens]) == (tokens[: slot + 1], "", "stop")
        assert run(AnswerEnd(100), [tokens]) == (tokens, "", None)  # ignore_eos: no ids to stop at


def test_min_tokens_keep_both_kinds_of_stop_away() -> None:
    codec = Pieces("a", "END", "E", "ND")
    assert run(AnswerEnd(9, stops=["END"], codec=codec, min_tokens=2), [[1, 0, 1, 0]]) == ([1, 0, 1], "ENDa", "stop")
    assert run(AnswerEnd(9, stops=["END"], codec=codec, min_tokens=1), [[2, 3, 1]]) == ([2, 3, 1], "END", "stop")
    for blocks in splits([0, 0, 0, 0]):
        assert run(AnswerEnd(9, stop_ids=[0], min_tokens=2), blocks) == ([0, 0, 0], "", "stop")


def test_stops_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(RequestError, match="stop"):
        StopStrings([""])
    with pytest.raises(RequestError, match="no tokenizer"):
        AnswerEnd(5, stops=["x"])
