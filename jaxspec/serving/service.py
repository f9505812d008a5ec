"""The Generation service: one coroutine a call, between the wire and the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid

import grpc

from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import problem
from jaxspec.serving.admission import Admitted, admit
from jaxspec.serving.facts import FORMAT_VERSION, Facts
from jaxspec.serving.failure import Failure, Status
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2_grpc as pb_grpc
from jaxspec.serving.text import Detokenizer
from jaxspec.serving.worker import Delta, Worker

__all__ = ["SERVICE_NAME", "GenerationService"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Generation"].full_name
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

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta | Failure] = asyncio.Queue()

        def sink(item: Delta | Failure) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        # Encoding a long prompt takes milliseconds that the other streams should not wait for.
        admitted = await loop.run_in_executor(None, self._admit, request)
        ticket = self._worker.submit(admitted.prompt_ids, admitted.params, sink)
        try:
            await self._stream(request.request_id or uuid.uuid4().hex, admitted.params, inbox, context)
        finally:
            # A disconnect and a deadline arrive here as CancelledError; after a normal end this does nothing.
            self._worker.cancel(ticket)

    def _admit(self, request: pb.GenerateRequest) -> Admitted:
        return admit(request, self._facts(), self._worker.codec)

    def _facts(self) -> Facts:
        facts = self._worker.facts
        if facts is None:
            raise Failure(Status.UNAVAILABLE, f"the server is {self._worker.state.value}; try again later or elsewhere")
        return facts

    async def _stream(
        self,
        request_id: str,
        params: SamplingParams,
        inbox: asyncio.Queue[Delta | Failure],
        context: grpc.aio.ServicerContext,
    ) -> None:
        codec = self._worker.codec
        detokenizer = None if codec is None else Detokenizer(codec)
        reason = None
        while reason is None:
            item = await inbox.get()
            if isinstance(item, Failure):
                raise item
            reason = item.reason
            response = pb.GenerateResponse(request_id=request_id, token_ids=item.tokens)
            if detokenizer is not None:
                # The token that stops an answer is an id of it, but no text.
                response.text = detokenizer.push(item.tokens[:-1] if reason == "stop" else item.tokens)
            if reason is not None:
                response.text += "" if detokenizer is None else detokenizer.flush()
                response.finish_reason = _REASONS[reason]
            if item.usage is not None:
                response.usage.CopyFrom(pb.Usage(**dataclasses.asdict(item.usage)))
                response.context_limit = reason == "length" and item.usage.completion_tokens < params.max_new_tokens
            await context.write(response)
