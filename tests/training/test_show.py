"""What `--show` prints: every token, its mask, and characters that several tokens share."""

from __future__ import annotations

import io

from rich.console import Console

from jaxspec.training.show import pieces, show
from jaxspec.training.templates import QWEN
from jaxspec.training.tokenise import encode
from tests.training.test_templates import make_tokenizer, talk


def example(answer):
    tokenizer = make_tokenizer()
    ids, mask = encode(tokenizer, QWEN, talk(answer, answer), 1 << 20)
    return tokenizer, ids.tolist(), mask.tolist()


def test_pieces_are_the_text_and_its_supervision():
    tokenizer, ids, mask = example("hello \u4f60 \u2603")
    parts = pieces(tokenizer, ids, mask)
    assert "".join(text for text, _ in parts) == tokenizer.decode(ids)
    assert "".join(text for text, marked in parts if marked) == "hello \u4f60 \u2603<|im_end|>" * 2
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text, _ in parts)
    assert ("<|im_end|>", True) in parts and ("<|im_end|>", False) in parts


def test_a_cut_inside_a_character_still_shows_every_token():
    tokenizer, ids, mask = example("\u4f60")
    end = mask.index(True) + 1
    assert pieces(tokenizer, ids[:end], mask[:end])[-1] == ("\N{REPLACEMENT CHARACTER}", True)


def test_without_a_terminal_markers_stand_around_what_is_supervised():
    tokenizer, ids, mask = example("hello")
    out = io.StringIO()
    show(Console(file=out, width=20), tokenizer, ids, mask, "1: [x] tokens")
    head, _, text = out.getvalue().partition("\n")
    assert head == "--- 1: [x] tokens"
    assert text.count("{+") == text.count("+}") == 2 and "{+hel|lo|<|im_end|>+}" in text
    assert text.replace("{+", "").replace("+}", "").replace("hel|lo|<", "hello<") == tokenizer.decode(ids) + "\n"


def test_on_a_terminal_colours_tell_them_apart():
    tokenizer, ids, mask = example("hello")
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, color_system="truecolor", width=200), tokenizer, ids, mask, "1")
    shown = out.getvalue()
    green = [part for part in shown.split("\x1b[") if part.startswith("30;48")]
    assert [part.partition("m")[2] for part in green[:2]] == ["hel", "lo"] and "\u21b5" in shown and "{+" not in shown
    assert sum("im_end" in part for part in green) == 2
