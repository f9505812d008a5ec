"""From the wire to the runner: prompt ids and sampling parameters, or INVALID_ARGUMENT naming the field.

What is set and not supported is refused, never dropped: a caller who asked for a stop string must not get an answer
that ignores it. The list below says what is supported, so a field added to the proto is refused until it is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.errors import RequestError
from jaxspec.serving.facts import FORMAT_VERSION, Facts
from jaxspec.serving.failure import Failure
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.text import Codec

__all__ = ["Admitted", "admit"]

SUPPORTED = {
    "GenerateRequest": {"format_version", "request_id", "text", "token_ids", "messages", "sampling"},
    "SamplingParameters": {
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop_token_ids", "ignore_eos"),
    },
    "TokenIds": {"ids"},
    "Chat": {"messages"},
    "ChatMessage": {"role", "content"},
}


@dataclass(frozen=True)
class Admitted:
    """A request that the runner may be given."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


def admit(request: pb.GenerateRequest, facts: Facts, codec: Codec | None) -> Admitted:
    """Checks and converts one request; Failure (INVALID_ARGUMENT) for the first thing that is wrong with it."""
    for message, path in _messages(request, ""):
        _check_fields(message, path)
    if request.format_version not in (0, FORMAT_VERSION):
        raise Failure.invalid("format_version", request.format_version, str(FORMAT_VERSION), "use a matching client")
    params = _sampling(request.sampling, facts)
    return Admitted(_prompt(request, facts, codec), params)


def _messages(message: Message, path: str) -> Iterator[tuple[Message, str]]:
    """The message and every message inside it that is set, with their paths."""
    yield message, path
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for index, child in enumerate(value if field.is_repeated else [value]):
            yield from _messages(child, f"{path}{field.name}{f'[{index}]' if field.is_repeated else ''}.")


def _check_fields(message: Message, path: str) -> None:
    supported = SUPPORTED.get(message.DESCRIPTOR.name, set())
    for field, value in message.ListFields():
        if field.name not in supported:
            found: Any = "a value" if field.message_type is not None else list(value) if field.is_repeated else value
            raise Failure.invalid(f"{path}{field.name}", found, "no value", "this server does not support it yet")
    unknown = UnknownFieldSet(message)
    if len(unknown):
        known = f"a field of {message.DESCRIPTOR.full_name}"
        raise Failure.invalid(f"{path}field {unknown[0].field_number}", expected=known, action="is the client newer?")


def _sampling(sampling: pb.SamplingParameters, facts: Facts) -> SamplingParams:
    # Only what is set is passed on, so that the defaults are those of SamplingParams and stand in one place.
    given = {field.name: value for field, value in sampling.ListFields()}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    params = SamplingParams(**given)
    try:
        params.validate(facts.vocab_size)
    except RequestError as error:
        raise Failure.invalid(f"sampling.{error}") from error
    return params


def _prompt(request: pb.GenerateRequest, facts: Facts, codec: Codec | None) -> tuple[int, ...]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise Failure.invalid("prompt", "nothing", "one of text, token_ids or messages")
    if kind == "token_ids":
        ids = list(request.token_ids.ids)
    elif codec is None:
        raise Failure.invalid(kind, expected="token_ids", action="this target has no tokenizer")
    elif kind == "text":
        ids = codec.encode(request.text)
    else:
        ids = _chat(request.messages, codec)
    try:
        validate_prompt(ids, facts.vocab_size, facts.max_context)
    except RequestError as error:
        raise Failure.invalid(kind + str(error).removeprefix("prompt")) from error
    return tuple(ids)


def _chat(chat: pb.Chat, codec: Codec) -> list[int]:
    if not chat.messages:
        raise Failure.invalid("messages", "0 messages", "at least 1")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise Failure.invalid(f"messages[{index}].role", "nothing", "system, user or assistant")
    try:
        return codec.chat([{"role": message.role, "content": message.content} for message in chat.messages])
    except RequestError as error:
        raise Failure.invalid(str(error)) from error
