"""Streaming text: the pieces joined are the text of the whole, and no piece ends inside a character."""

from __future__ import annotations

import random

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.errors import RequestError
from jaxspec.serving.text import Detokenizer, TokenizerCodec
from tests.helpers.scripted_runner import EOS, ByteCodec

MARK = "\N{REPLACEMENT CHARACTER}"
SAMPLES = [
    "plain",
    "naïve café, Zürich",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🤷🏽‍♀️",
    f"a real {MARK} mark, {MARK}{MARK}{MARK}{MARK} and then four",
    "",
]


def stream(codec, pieces: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def cut(ids: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while ids:
        width = rng.randint(1, 5)
        pieces.append(ids[:width])
        ids = ids[width:]
    return pieces


@pytest.mark.parametrize("text", SAMPLES)
def test_one_byte_tokens_never_show_half_a_character(text):
    ids = list(text.encode())
    pieces = stream(ByteCodec(), [[token] for token in ids])
    assert "".join(pieces) == text
    assert MARK in text or not any(MARK in piece for piece in pieces)


def test_multi_token_emoji_arrives_whole_with_its_last_byte():
    assert stream(ByteCodec(), [[0xF0], [0x9F], [0x98], [0x80], [33]]) == ["", "", "", "😀", "!", ""]


def test_unfinished_character_is_flushed_as_a_mark():
    assert stream(ByteCodec(), [[65], [0xF0, 0x9F]]) == ["A", "", MARK]


def test_broken_bytes_do_not_hold_the_stream_back():
    pieces = stream(ByteCodec(), [[0xFF]] * 200 + [[65]])
    assert "".join(pieces) == MARK * 200 + "A"
    assert len("".join(pieces[:100])) == 100 - 3


def test_random_bytes_in_random_pieces_equal_the_whole():
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.choice([65, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF, EOS]) for _ in range(rng.randint(1, 40))]
        assert "".join(stream(ByteCodec(), cut(ids, rng))) == ByteCodec().decode(ids), ids


def test_ids_without_text_keep_the_window_small():
    class Counting(ByteCodec):
        longest = 0

        def decode(self, ids):
            Counting.longest = max(Counting.longest, len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting())
    assert detokenizer.push([65]) == "A"
    assert "".join(detokenizer.push([EOS]) for _ in range(500)) == ""
    assert detokenizer.push([66]) == "B"
    assert Counting.longest < 8


def sentencepiece_like() -> Tokenizer:
    """Byte fallback and a decoder that strips the space before the first word, as Llama's."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁": 256, "▁hello": 257, "▁world": 258, "s": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Raw:
    def __init__(self, tokenizer: Tokenizer):
        self.decode = lambda ids: tokenizer.decode(list(ids))


def test_byte_level_decoder_in_random_pieces_equals_the_whole():
    tokenizer, rng = byte_level(), random.Random(5)
    codec = Raw(tokenizer)
    bytes_ = tokenizer.encode("A é😀 ,").ids + tokenizer.encode("日").ids
    for _ in range(300):
        ids = [rng.choice(bytes_) for _ in range(rng.randint(1, 30))]
        assert "".join(stream(codec, cut(ids, rng))) == codec.decode(ids), ids


def test_byte_fallback_decoder_in_random_pieces_equals_the_whole():
    """Whole characters only: byte fallback turns a run with one broken byte into marks, also what was sent of it."""
    codec, rng = Raw(sentencepiece_like()), random.Random(5)
    words = [[256], [257], [258], [259], list("é".encode()), list("😀".encode()), [0x0A], [*"日本".encode()]]
    for _ in range(300):
        ids = [token for _ in range(rng.randint(1, 12)) for token in rng.choice(words)]
        pieces = stream(codec, cut(ids, rng))
        assert "".join(pieces) == codec.decode(ids), ids
        assert not any(MARK in piece for piece in pieces)


def test_real_tokenizer_streams_what_it_encodes():
    tokenizer = byte_level()
    for text in SAMPLES:
        pieces = stream(Raw(tokenizer), [[token] for token in tokenizer.encode(text).ids])
        assert "".join(pieces) == text


class Templated:
    """The three members of a transformers tokenizer that the codec uses."""

    chat_template = "x"

    def __init__(self, error: Exception | None = None):
        self.error = error

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        if self.error:
            raise self.error
        assert add_generation_prompt and not tokenize
        return "".join(message["content"] for message in messages)

    def encode(self, text, add_special_tokens=True):
        return ([1] if add_special_tokens else []) + list(text.encode())


def test_chat_text_gets_no_second_start_token():
    codec = TokenizerCodec(Templated())
    assert codec.chat([{"role": "user", "content": "hi"}]) == [104, 105]
    assert codec.encode("hi") == [1, 104, 105]


def test_chat_without_or_against_the_template_is_refused():
    bare = Templated()
    bare.chat_template = None
    with pytest.raises(RequestError, match="no chat_template"):
        TokenizerCodec(bare).chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="roles must alternate"):
        TokenizerCodec(Templated(TemplateError("roles must alternate"))).chat([{"role": "user", "content": "hi"}])


def test_a_lone_surrogate_is_a_request_error():
    from jaxspec.errors import RequestError
    from jaxspec.serving.text import TokenizerCodec

    codec = TokenizerCodec(object())  # refused before the tokenizer is asked
    for ask in (lambda: codec.encode("\ud800"), lambda: codec.chat([{"role": "user", "content": "a\udcff"}])):
        with pytest.raises(RequestError, match=r"prompt.*surrogate"):
            ask()
