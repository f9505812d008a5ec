"""The Python entry: prompts of every kind, and one typed line for whatever is neither prompt nor option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec.api import Engine
from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import ConfigError, RequestError
from tests.helpers.worlds import bigram_draft, tiny_target

pytestmark = pytest.mark.ci


class Letters:
    """A tokenizer of 60 letters."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 60 for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(64 + token) for token in ids)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target()
    return Engine(target, bigram_draft(target), Letters(), num_slots=2, max_context=96, prefill_chunk=16)


def test_text_ids_arrays_and_batches_give_the_same_answers(engine):
    ids = Letters().encode("hello")
    answers = [
        engine.generate("hello", max_new_tokens=9),
        engine.generate(ids, max_new_tokens=9),
        engine.generate(np.array(ids), max_new_tokens=9),
        *engine.generate(["hello", tuple(ids), np.array(ids)], max_new_tokens=9),
        *engine.generate(np.array([ids, ids]), max_new_tokens=9),
    ]
    assert len({answer.token_ids for answer in answers}) == 1
    assert "".join(engine.stream("hello", max_new_tokens=9)) == answers[0].text


@pytest.mark.parametrize(
    "prompt", [None, 5, {"a": 1}, [1.5, 2], [[1.5]], [{"role": "user", "content": 5}], [{}], [None]]
)
def test_what_is_no_prompt_is_named(engine, prompt):
    with pytest.raises(RequestError, match="prompt"):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids: found 5"),
        ({"rules": 5}, "rules: found 5"),
        ({"temprature": 1}, "temprature: unknown"),
        ({"stop": ("x",)}, "outside the serving engine"),
    ],
)
def test_what_is_no_sampling_parameter_is_named(engine, sampling, message):
    with pytest.raises(RequestError, match=message):
        engine.generate("hello", **sampling)


def test_an_open_stream_keeps_the_engine_to_itself(engine):
    stream = engine.stream("hello", max_new_tokens=30)
    next(stream)
    with pytest.raises(RequestError, match="being streamed"):
        engine.generate("hello")
    stream.close()
    assert engine.generate("hello", max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [(None, {}, "target: found None"), ("smollm2", {"nun_slots": 3}, "nun_slots: unknown option")],
)
def test_what_cannot_be_loaded_is_named(target, options, message, monkeypatch):
    monkeypatch.setattr("jaxspec.api.load_target", lambda *_, **__: tiny_target())
    with pytest.raises(ConfigError, match=message):
        jaxspec.load(target, **options)


def test_prompt_log_probabilities_need_an_answer():
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(max_new_tokens=0, logprobs=1, prompt_logprobs=True).validate(8)
