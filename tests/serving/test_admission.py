"""Bad input is refused at the door, with the field's name; what is not supported is refused, not ignored."""

from __future__ import annotations

import pytest

from jaxspec.decoding.processors import LogitRules
from jaxspec.serving import admission
from jaxspec.serving.facts import Facts
from jaxspec.serving.failure import Failure, Status
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from tests.helpers.scripted_runner import VOCAB, ByteCodec

BYTES = ByteCodec()
FACTS = Facts("table", "none", "none", vocab_size=VOCAB, max_context=32, slots=4)


def request(prompt=(1, 2, 3), **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParameters(**sampling))


def refused(bad: pb.GenerateRequest, codec: ByteCodec | None = BYTES) -> str:
    with pytest.raises(Failure) as caught:
        admission.admit(bad, FACTS, codec)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_are_those_of_sampling_params():
    admitted = admission.admit(request(), FACTS, None)
    assert admitted.prompt_ids == (1, 2, 3)
    assert admitted.params == admission.SamplingParams()


def test_everything_set_arrives():
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125}
    given |= {"seed": 11, "max_new_tokens": 9, "ignore_eos": True}
    admitted = admission.admit(request(stop_token_ids=[5, 6], **given), FACTS, None)
    assert admitted.params == admission.SamplingParams(stop_token_ids=(5, 6), **given)


def test_zero_that_is_set_is_not_taken_for_a_default():
    assert admission.admit(request(top_k=0, seed=0, temperature=0.0), FACTS, None).params.seed == 0
    assert admission.admit(request(), FACTS, None).params.seed is None


def test_text_and_chat_prompts():
    assert admission.admit(pb.GenerateRequest(text="hi"), FACTS, ByteCodec()).prompt_ids == (104, 105)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = admission.admit(pb.GenerateRequest(messages=chat), FACTS, ByteCodec()).prompt_ids
    assert bytes(ids).decode() == "<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -3}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
    ],
)
def test_bad_sampling_names_the_field(sampling, field):
    assert f"sampling.{field}" in refused(request(**sampling))


UNSUPPORTED = {"allowed_token_ids": [1]}


def test_B08_every_unsupported_parameter_is_refused_by_name():
    fields = set(pb.SamplingParameters.DESCRIPTOR.fields_by_name)
    assert fields == set(UNSUPPORTED) | admission.SUPPORTED["SamplingParameters"]
    for name, value in UNSUPPORTED.items():
        message = refused(request(**{name: value}))
        assert f"sampling.{name}" in message and "not support" in message


def test_rules_stops_and_log_probabilities_arrive():
    given = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25, "logit_bias": {3: -1.0}}
    asked = request(**given, min_new_tokens=2, stop=["END", "x"], logprobs=2, prompt_logprobs=5, n=3)
    asked.priority = -4
    admitted = admission.admit(asked, FACTS, BYTES)
    assert admitted.params.rules == LogitRules(**given, min_tokens=2)
    assert admitted.params.stop == ("END", "x")
    assert (admitted.logprobs, admitted.prompt_logprobs, admitted.n, admitted.priority) == (2, 5, 3, -4)
    assert [(one.logprobs, one.prompt_logprobs) for one in admitted.samples()] == [(5, True), (5, False), (5, False)]
    plain = admission.admit(request(), FACTS, BYTES)
    assert (plain.logprobs, plain.prompt_logprobs, plain.n, plain.priority, plain.grammar) == (None, None, 1, 0, None)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"min_new_tokens": 200}, "min_new_tokens"),
        ({"stop": ["ok", ""]}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1, "logprobs": 3}, "prompt_logprobs"),
        ({"n": 0}, "n: "),
        ({"n": 5}, "n: "),
        ({"grammar": pb.Grammar(marker="x")}, "grammar"),
        ({"grammar": pb.Grammar(regex="a+")}, "grammar"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(sampling, field):
    assert "sampling." in (message := refused(request(**sampling))) and field in message


def test_fields_of_a_newer_client_are_refused():
    field_99 = bytes([0x98, 0x06, 0x01])  # number 99, varint 1
    newer = pb.GenerateRequest.FromString(request().SerializeToString() + field_99)
    assert "field 99" in refused(newer)
    inside = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParameters.FromString(field_99))
    assert "sampling.field 99" in refused(inside)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage.FromString(field_99)])
    assert "messages.messages[1].field 99" in refused(pb.GenerateRequest(messages=chat))


def test_format_version():
    assert admission.admit(pb.GenerateRequest(format_version=1, text="a"), FACTS, ByteCodec())
    assert "format_version" in refused(pb.GenerateRequest(format_version=2, text="a"))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_B35_ids_outside_the_vocabulary_never_reach_the_model(token):
    message = refused(request([5, token]))
    assert "token_ids[1]" in message and str(VOCAB) in message


def test_prompts_that_are_no_prompt():
    assert "prompt" in refused(pb.GenerateRequest())
    assert "token_ids" in refused(request([]))
    assert "text" in refused(pb.GenerateRequest(text=""))
    assert "messages" in refused(pb.GenerateRequest(messages=pb.Chat()))
    assert "messages[0].role" in refused(pb.GenerateRequest(messages=pb.Chat(messages=[pb.ChatMessage(content="x")])))


def test_B21_prompt_that_leaves_no_room_is_refused():
    assert admission.admit(request([1] * 31), FACTS, None)
    for length in (32, 33):
        message = refused(request([1] * length))
        assert message.startswith("token_ids: ") and str(length) in message and "32" in message


def test_text_needs_a_tokenizer():
    assert "token_ids" in refused(pb.GenerateRequest(text="hi"), codec=None)
