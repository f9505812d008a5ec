"""From the wire to the engine: prompt ids and sampling parameters, or INVALID_ARGUMENT naming the field.

What is set and not supported is refused, never dropped: a caller who asked for a stop string must not get an answer
that ignores it. The list below says what is supported, so a field added to the proto is refused until it is listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.errors import RequestError
from jaxspec.serving.facts import FORMAT_VERSION, Facts
from jaxspec.serving.failure import Failure
from jaxspec.serving.grammar import Grammar, GrammarCompiler
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.text import Codec

__all__ = ["Admitted", "admit"]

SUPPORTED = {
    "GenerateRequest": {"format_version", "request_id", "text", "token_ids", "messages", "sampling", "priority"},
    "SamplingParameters": {
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop_token_ids", "ignore_eos", "stop"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_new_tokens"),
        *("n", "logprobs", "prompt_logprobs", "grammar"),
    },
    "Grammar": {"json_schema", "regex", "ebnf", "marker"},
    "TokenIds": {"ids"},
    "Chat": {"messages"},
    "ChatMessage": {"role", "content"},
}


_RULES = {  # on the wire -> field of LogitRules
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "min_new_tokens": "min_tokens",
}


@dataclass(frozen=True)
class Admitted:
    """A request that the engine may be given, `n` times. `params` asks for as many log probabilities as the larger of
    `logprobs` and `prompt_logprobs`, which are what the client wants to see.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    n: int = 1
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def samples(self) -> list[SamplingParams]:
        """Parameters of each of the n answers. The first one alone brings the prompt's log probabilities."""
        others = dataclasses.replace(self.params, prompt_logprobs=False)
        return [self.params, *[others] * (self.n - 1)]


def admit(
    request: pb.GenerateRequest, facts: Facts, codec: Codec | None, grammars: GrammarCompiler | None = None
) -> Admitted:
    """Checks and converts one request; Failure (INVALID_ARGUMENT) for the first thing that is wrong with it.

    A grammar is compiled here, which may take a second, so that the engine's thread finds it ready.
    """
    for message, path in _messages(request, ""):
        _check_fields(message, path)
    if request.format_version not in (0, FORMAT_VERSION):
        raise Failure.invalid("format_version", request.format_version, str(FORMAT_VERSION), "use a matching client")
    sampling = request.sampling
    params = _sampling(sampling, facts)
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= facts.slots:
        raise Failure.invalid("sampling.n", n, f"1 to the server's {facts.slots} slots")
    return Admitted(
        _prompt(request, facts, codec),
        params,
        _grammar(sampling.grammar, grammars) if sampling.HasField("grammar") else None,
        n,
        request.priority,
        sampling.logprobs if sampling.HasField("logprobs") else None,
        sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


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
    given = {field.name: value for field, value in sampling.ListFields() if field.name not in ("n", "grammar")}
    for name in ("stop_token_ids", "stop"):
        if name in given:
            given[name] = tuple(given[name])
    rules = {ours: given.pop(theirs) for theirs, ours in _RULES.items() if theirs in given}
    asked = [given[name] for name in ("logprobs", "prompt_logprobs") if name in given]
    if asked and min(asked) < 0:
        raise Failure.invalid("sampling.logprobs and prompt_logprobs", min(asked), "0 or more")
    given["logprobs"] = max(asked, default=None)
    given["prompt_logprobs"] = "prompt_logprobs" in given
    params = SamplingParams(**given, rules=LogitRules(**{**rules, "logit_bias": dict(rules.get("logit_bias", {}))}))
    try:
        params.validate(facts.vocab_size)
    except RequestError as error:
        said = str(error)
        raise Failure.invalid("sampling." + said.replace("min_tokens", "min_new_tokens")) from error
    return params


def _grammar(asked: pb.Grammar, grammars: GrammarCompiler | None) -> Grammar:
    kind = asked.WhichOneof("form")
    if kind is None:
        raise Failure.invalid("sampling.grammar", "nothing", "one of json_schema, regex or ebnf")
    if grammars is None:
        raise Failure.invalid("sampling.grammar", "one", "none", "this server runs without engine.grammar")
    grammar = Grammar(kind, getattr(asked, kind), asked.marker)
    try:
        grammars.start(grammar)
    except RequestError as error:
        raise Failure.invalid(f"sampling.{error}") from error
    return grammar


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
