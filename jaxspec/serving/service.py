"""The Generation service: one coroutine a call, between the wire and the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
import uuid
from typing import Any

import grpc

from jaxspec.decoding.runner import TokenLogprob
from jaxspec.errors import problem
from jaxspec.serving.admission import Admitted, admit
from jaxspec.serving.facts import FORMAT_VERSION, Facts
from jaxspec.serving.failure import Failure, Status
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2_grpc as pb_grpc
from jaxspec.serving.text import Detokenizer
from jaxspec.serving.worker import Delta, Ticket, Worker

__all__ = ["SERVICE_NAME", "GenerationService"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
Inbox = asyncio.Queue[tuple[int, Delta | Failure]]  # of one call: which of its answers, and what happened to it
_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class GenerationService(pb_grpc.GenerationServicer):
    """Runs on the server's event loop; the worker's events reach it through one inbox a call."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Returns when no Generate call is open."""
        await self._idle.wait()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._calls += 1
        self._idle.clear()
        try:
            await self._generate(request, context)
        except Failure as failure:
            await context.abort(grpc.StatusCode[failure.status.name], failure.message)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        if request.format_version not in (0, FORMAT_VERSION):
            line = problem("format_version", request.format_version, str(FORMAT_VERSION), "use a matching client")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, line)
        try:
            return self._facts().to_proto()
        except Failure as failure:
            await context.abort(grpc.StatusCode[failure.status.name], failure.message)
            raise

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.ServerStatus:
        if request.format_version not in (0, FORMAT_VERSION):
            line = problem("format_version", request.format_version, str(FORMAT_VERSION), "use a matching client")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, line)
        load, metrics = self._worker.load(), self._worker.metrics
        return pb.ServerStatus(
            format_version=FORMAT_VERSION,
            state=self._worker.state.value,
            waiting=load.waiting,
            running=load.running,
            **({} if metrics is None else dataclasses.asdict(metrics)),
        )

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        loop = asyncio.get_running_loop()
        inbox: Inbox = asyncio.Queue()

        def sink(index: int, item: Delta | Failure) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, (index, item))

        # Encoding a long prompt takes milliseconds that the other streams should not wait for, a grammar even more.
        admitted = await loop.run_in_executor(None, self._admit, request)
        remaining = context.time_remaining()
        about: dict[str, Any] = {
            "grammar": admitted.grammar,
            "priority": admitted.priority,
            "deadline": math.inf if remaining is None else time.monotonic() + remaining,
        }
        tickets = [
            Ticket(admitted.prompt_ids, params, functools.partial(sink, index), sample=index, **about)
            for index, params in enumerate(admitted.samples())
        ]
        self._worker.submit_all(tickets)
        try:
            await self._stream(request.request_id or uuid.uuid4().hex, admitted, inbox, context)
        finally:
            # A disconnect and a deadline arrive here as CancelledError; after a normal end this does nothing.
            for ticket in tickets:
                self._worker.cancel(ticket)

    def _admit(self, request: pb.GenerateRequest) -> Admitted:
        return admit(request, self._facts(), self._worker.codec, self._worker.grammars)

    def _facts(self) -> Facts:
        facts = self._worker.facts
        if facts is None:
            raise Failure(Status.UNAVAILABLE, f"the server is {self._worker.state.value}; try again later or elsewhere")
        return facts

    async def _stream(
        self,
        request_id: str,
        admitted: Admitted,
        inbox: Inbox,
        context: grpc.aio.ServicerContext,
    ) -> None:
        codec, params = self._worker.codec, admitted.params
        # The engine has searched the text of an answer with stop strings, and sends what is left of it.
        streams = [None if codec is None or params.stop else Detokenizer(codec) for _ in range(admitted.n)]
        open_answers = admitted.n
        while open_answers:
            index, item = await inbox.get()
            if isinstance(item, Failure):
                raise item
            response = pb.GenerateResponse(request_id=request_id, token_ids=item.tokens, index=index, text=item.text)
            stream = streams[index]
            if stream is not None:
                # The token that stops an answer is an id of it, but no text.
                response.text = stream.push(item.tokens[:-1] if item.by_id else item.tokens)
            if item.reason is not None:
                open_answers -= 1
                response.text += "" if stream is None else stream.flush()
                response.finish_reason = _REASONS[item.reason]
            if item.usage is not None:
                response.usage.CopyFrom(pb.Usage(**dataclasses.asdict(item.usage)))
                short = item.usage.completion_tokens < params.max_new_tokens
                response.context_limit = item.reason == "length" and short
            if admitted.logprobs is not None:
                response.logprobs.extend(_logprob(one, admitted.logprobs) for one in item.logprobs)
            if admitted.prompt_logprobs is not None:
                response.prompt_logprobs.extend(_logprob(one, admitted.prompt_logprobs) for one in item.prompt_logprobs)
            await context.write(response)


def _logprob(one: TokenLogprob, top: int) -> pb.TokenLogprob:
    best = [pb.TopLogprob(token_id=token, logprob=value) for token, value in one.top[:top]]
    return pb.TokenLogprob(token_id=one.token, logprob=one.logprob, rank=one.rank, top=best)
