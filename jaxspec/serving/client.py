"""Talking to a server: the Client class and the command `jaxspec client`.

    with Client("127.0.0.1:50051") as client:
        for response in client.generate("Why is the sky blue?", max_new_tokens=64):
            print(response.text, end="")

`generate` streams, `complete` collects. This module needs neither jax nor the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxspec.errors import JaxspecError, RequestError, ServerError, problem
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2_grpc as pb_grpc
from jaxspec.serving.terminal import context_note, read_prompt

__all__ = ["Answer", "Client", "add_arguments", "main"]

_FORMAT_VERSION = 1
_OPTIONS = (
    # A long prefill sends nothing: pings keep routers from dropping the quiet connection (gRPC allows one each 10 s).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop_token_ids", "ignore_eos", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_new_tokens"),
    *("n", "logprobs", "prompt_logprobs", "grammar"),
)

_LONGEST = 1e9  # seconds of a call
Prompt = Any  # str | Sequence[int] | Sequence[Mapping[str, str]], told apart at run time


@dataclass(frozen=True)
class Answer:
    """A whole answer; `usage` has the fields of the Usage message. With `context_limit` the context ended before
    max_new_tokens. Log probabilities have the fields of the TokenLogprob message."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str
    context_limit: bool
    usage: dict[str, Any]
    index: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)


class Client:
    """One connection, usable from several threads. Raises RequestError for a refused request, ServerError otherwise."""

    def __init__(self, address: str):
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._generation = pb_grpc.GenerationStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int | None = None,
        **sampling: Any,
    ) -> Iterator[pb.GenerateResponse]:
        """Streams the answer to a text, a list of token ids or a list of {"role", "content"} messages.

        `sampling` are fields of the SamplingParameters message (`grammar` a mapping, {"regex": "a+"}); None leaves the
        server's default. With n > 1 the answers come mixed, told apart by `index`. `timeout` in seconds. Leaving the
        iteration cancels the request.
        """
        call = self._generation.Generate(_request(prompt, request_id, priority, sampling), timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _readable(error, self.address) from error
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, **options: Any) -> Answer:
        """`generate`, collected. RequestError for n > 1, see `complete_all`."""
        if options.get("n") not in (None, 1):
            raise RequestError(problem("n", options["n"], "1", "complete_all collects several answers"))
        return self.complete_all(prompt, **options)[0]

    def complete_all(self, prompt: Prompt, **options: Any) -> list[Answer]:
        """`generate`, collected: all n answers, by index."""
        heard: dict[int, list[pb.GenerateResponse]] = {}
        for response in self.generate(prompt, **options):
            heard.setdefault(response.index, []).append(response)
        answers = [self._answer(heard[index]) for index in sorted(heard)]
        if len(answers) != (options.get("n") or 1):
            raise ServerError(f"the server at {self.address} gave {len(answers)} answers, not what was asked for")
        return answers

    def _answer(self, responses: list[pb.GenerateResponse]) -> Answer:
        last = responses[-1]
        if last.finish_reason not in _REASONS:
            raise ServerError(f"the server at {self.address} ended the answer without a finish_reason")
        return Answer(
            last.request_id,
            [token for response in responses for token in response.token_ids],
            "".join(response.text for response in responses),
            _REASONS[last.finish_reason],
            last.context_limit,
            {one.name: getattr(last.usage, one.name) for one in pb.Usage.DESCRIPTOR.fields},
            last.index,
            [_logprob(one) for response in responses for one in response.logprobs],
            [_logprob(one) for response in responses for one in response.prompt_logprobs],
        )

    def status(self, timeout: float | None = 10.0) -> pb.ServerStatus:
        """Load and counters."""
        try:
            return self._generation.GetStatus(pb.GetStatusRequest(format_version=_FORMAT_VERSION), timeout=timeout)
        except grpc.RpcError as error:
            raise _readable(error, self.address) from error

    def info(self, timeout: float | None = 10.0) -> pb.ModelInfo:
        """What is being served."""
        try:
            request = pb.GetModelInfoRequest(format_version=_FORMAT_VERSION)
            return self._generation.GetModelInfo(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _readable(error, self.address) from error

    def wait_ready(self, timeout: float) -> None:
        """Returns once the server is SERVING; ServerError after `timeout` seconds. Waits for a server yet to start."""
        watch = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True
        )
        try:
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            raise ServerError(f"the server at {self.address} went away before it was serving")
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ServerError(f"the server at {self.address} is not serving after {timeout:g} s") from error
            raise _readable(error, self.address) from error
        finally:
            watch.cancel()


def _logprob(one: pb.TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": best.token_id, "logprob": best.logprob} for best in one.top]
    return {"token_id": one.token_id, "logprob": one.logprob, "rank": one.rank, "top": top}


def _request(prompt: Prompt, request_id: str, priority: int | None, sampling: Mapping[str, Any]) -> pb.GenerateRequest:
    try:
        request = pb.GenerateRequest(format_version=_FORMAT_VERSION, request_id=request_id, priority=priority)
        if isinstance(prompt, str):
            request.text = prompt
        elif len(prompt) and isinstance(prompt[0], Mapping):
            request.messages.CopyFrom(pb.Chat(messages=[pb.ChatMessage(**dict(message)) for message in prompt]))
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=list(prompt)))
        given = {name: value for name, value in sampling.items() if value is not None}
        if isinstance(given.get("stop"), str):  # one string, not its letters
            given["stop"] = [given["stop"]]
        request.sampling.CopyFrom(pb.SamplingParameters(**given))
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise RequestError(
            problem(_misfit(sampling, priority), action=f"it does not fit the wire format: {error}")
        ) from error

    return request


def _misfit(sampling: Mapping[str, Any], priority: int | None) -> str:
    """The first field whose value its message cannot hold."""
    for name, value in sampling.items():
        try:
            pb.SamplingParameters(**{name: value})
        except (TypeError, ValueError):
            return name
    try:
        pb.GenerateRequest(priority=priority)
    except (TypeError, ValueError):
        return "priority"
    return "request"


def _readable(error: grpc.RpcError, address: str) -> JaxspecError:
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return RequestError(details)
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        return ServerError(f"no server at {address} ({details}); start one with serve.py or pass --address host:port")
    return ServerError(f"{code.name}: {details}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jaxspec client`."""
    parser.description = "Send prompts to a running server and print what it answers."
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of the server (default %(default)s)")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="the prompt, as plain text; - reads it from standard input")
    prompt.add_argument("--chat", metavar="TEXT", help="the prompt as a user's turn, in the target's chat template")
    prompt.add_argument("--ids", metavar="1,2,3", help="the prompt as token ids")
    each = 'one object a line: "prompt", "messages" or "token_ids", and if wanted "id" and "sampling" {...}'
    prompt.add_argument("--file", type=Path, metavar="JSONL", help=each)
    prompt.add_argument("--info", action="store_true", help="print what is being served")
    prompt.add_argument("--status", action="store_true", help="print the server's load and counters")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before --chat")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="calls at a time with --file (1)")
    parser.add_argument("--timeout", type=float, metavar="S", help="deadline of each call in seconds (default none)")
    parser.add_argument("--priority", type=int, metavar="INT", help="the higher first out of the server's queue (0)")
    several = 'with --n 2 or more they stand in its "answers"'
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON object: ids, text, reason, usage; {several}"
    )
    sampling = parser.add_argument_group("sampling (the server's defaults when left out)")
    for name, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float), ("seed", int)):
        sampling.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper())
    sampling.add_argument("--max-new-tokens", type=int, metavar="INT")
    sampling.add_argument("--stop-token-ids", metavar="1,2", help="ids that end the answer")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after an end-of-sequence id")
    sampling.add_argument("--min-new-tokens", type=int, metavar="INT", help="nothing stops the answer before")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends the answer; repeatable")
    for name in ("repetition", "presence", "frequency"):
        sampling.add_argument(f"--{name}-penalty", type=float, metavar="FLOAT")
    sampling.add_argument("--logit-bias", metavar="7:1.5,9:-2", help="ids and what is added to their logits")
    sampling.add_argument("--logprobs", type=int, metavar="INT", help="log probabilities, and of so many best ids")
    sampling.add_argument("--prompt-logprobs", type=int, metavar="INT", help="the same for the prompt")
    sampling.add_argument("--n", type=int, metavar="INT", help="answers to the prompt (1)")
    form = "json_schema, regex or ebnf, and its text; @FILE reads it"
    sampling.add_argument("--grammar", nargs=2, metavar=("KIND", "TEXT"), help=form)
    sampling.add_argument("--marker", metavar="TEXT", help="the grammar binds the answer behind this text")


def main(args: argparse.Namespace) -> int:
    """Runs `jaxspec client`: 0, 2 with one line on stderr for an error, 130 after Ctrl-C."""
    try:
        if args.timeout is not None and not 0 < args.timeout <= _LONGEST:
            expected = f"a number of seconds, above 0 and at most {_LONGEST:g}; leave it out for no limit"
            raise RequestError(problem("--timeout", args.timeout, expected))
        with Client(args.address) as client:
            if args.info or args.status:
                return _print_fields(client, args)
            if args.file is not None:
                return _print_file(client, args)
            return _print_answer(client, args)
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _print_fields(client: Client, args: argparse.Namespace) -> int:
    message = (client.info if args.info else client.status)(args.timeout or 10.0)
    # A counter of 0 is a finding; MessageToDict would leave it out.
    fields = {one.name: getattr(message, one.name) for one in message.DESCRIPTOR.fields}
    fields |= {name: dict(fields[name]) for name in ("versions",) if name in fields}
    if args.json:
        print(json.dumps(fields))
    else:
        for name, value in fields.items():
            print(f"{name}: {value}")
    return 0


def _print_answer(client: Client, args: argparse.Namespace) -> int:
    prompt: Prompt
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not args.json:
            raise RequestError(problem(f"--{name.replace('_', '-')}", "no --json", "it, which shows them"))
    if args.system is not None and args.chat is None:
        raise RequestError("--system: found a system turn, expected --chat with it")
    if args.chat is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = [*system, {"role": "user", "content": args.chat}]
    elif args.ids is not None:
        prompt = _ids("--ids", args.ids)
    else:
        prompt = read_prompt() if args.prompt == "-" else args.prompt
    options = {"timeout": args.timeout, "priority": args.priority, **_sampling(args)}
    if args.json:
        print(json.dumps(_shown(client.complete_all(prompt, **options)), ensure_ascii=False))
        return 0
    if args.n not in (None, 1):
        for answer in client.complete_all(prompt, **options):
            print(f"[{answer.index}] " + (answer.text or " ".join(map(str, answer.token_ids))))
        return 0
    ids: list[int] = []
    text, limit = False, False
    for response in client.generate(prompt, **options):
        ids.extend(response.token_ids)
        limit = response.context_limit
        text |= bool(response.text)
        print(response.text, end="", flush=True)
    # A target without a tokenizer has no text to show.
    print("" if text else " ".join(map(str, ids)))
    if limit:
        print(context_note(len(ids)), file=sys.stderr)
    return 0


def _print_file(client: Client, args: argparse.Namespace) -> int:
    """One JSON line an input line, in their order; a line that fails has "error" and the exit status is 2.

    Input keys other than the prompt, "id" and "sampling" are notes on it (a reference, a licence) and stay unread.
    """
    if args.concurrency < 1:
        raise RequestError(problem("--concurrency", args.concurrency, "at least 1"))
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(problem("--file", str(args.file), "a readable JSONL file", str(error))) from error
    lines = text.split("\n")  # a JSON string may hold U+2028: no splitlines
    jobs = [_job(args.file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    defaults = _sampling(args)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        label = {} if job["id"] is None else {"id": job["id"]}
        try:
            options = {"timeout": args.timeout, "priority": args.priority, **defaults, **job["sampling"]}
            done = client.complete_all(job["input"], **options)
        except JaxspecError as error:
            return {**label, "error": str(error)}
        return {**label, **_shown(done)}

    failed = False
    with ThreadPoolExecutor(args.concurrency) as pool:
        for result in pool.map(answer, jobs):
            failed |= "error" in result
            print(json.dumps(result, ensure_ascii=False), flush=True)
    return 2 if failed else 0


def _job(path: Path, number: int, line: str) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        job = json.loads(line)
    except ValueError as error:
        raise RequestError(problem(where, action=f"not JSON: {error}")) from error
    prompts = [name for name in ("prompt", "messages", "token_ids") if isinstance(job, dict) and name in job]
    if len(prompts) != 1:
        raise RequestError(problem(where, prompts, 'an object with one of "prompt", "messages", "token_ids"'))
    sampling = job.get("sampling", {})
    if isinstance(sampling, dict) and isinstance(sampling.get("stop"), str):
        sampling = {**sampling, "stop": [sampling["stop"]]}
    if not isinstance(sampling, dict) or set(sampling) - set(_SAMPLING):
        expected = f"an object with keys out of {', '.join(_SAMPLING)}"
        raise RequestError(problem(f"{where}, sampling", sampling, expected))
    (name,) = prompts
    if not isinstance(job[name], str if name == "prompt" else list):
        raise RequestError(problem(f"{where}, {name}", job[name], "text" if name == "prompt" else "a list"))
    if name == "messages" and not (job[name] and all(_is_message(one) for one in job[name])):
        raise RequestError(problem(f"{where}, messages", repr(job[name]), 'objects with "role" and "content", texts'))
    if name == "token_ids" and not all(isinstance(one, int) and not isinstance(one, bool) for one in job[name]):
        raise RequestError(problem(f"{where}, token_ids", repr(job[name]), "whole numbers"))
    return {"id": job.get("id"), "input": job[name], "sampling": sampling}


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = _ids("--stop-token-ids", given["stop_token_ids"])
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    if "grammar" in given:
        kind, text = given["grammar"]
        given["grammar"] = _grammar(kind, text, args.marker)
    elif args.marker is not None:
        raise RequestError(problem("--marker", args.marker, "--grammar beside it"))
    return given


def _shown(answers: list[Answer]) -> dict[str, Any]:
    """The JSON of one answer, or of several in "answers"."""
    shown = [asdict(answer) for answer in answers]
    return shown[0] if len(shown) == 1 else {"answers": shown}


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.replace(",", " ").split()]
        return {int(token): float(value) for token, value in pairs}
    except ValueError:
        raise RequestError(problem("--logit-bias", text, "pairs like 7:1.5 separated by commas")) from None


def _grammar(kind: str, text: str, marker: str | None) -> dict[str, str]:
    kinds = ("json_schema", "regex", "ebnf")
    if kind not in kinds:
        raise RequestError(problem("--grammar", kind, f"one of {', '.join(kinds)}"))
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(problem("--grammar", text, "a readable file behind @", str(error))) from error
    return {kind: text, "marker": marker or ""}


def _ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(problem(option, text, "integers separated by commas")) from None
