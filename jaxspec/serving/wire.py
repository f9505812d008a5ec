"""Requests whose bytes are no message: refused with INVALID_ARGUMENT. gRPC's own answer is UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

__all__ = ["RefuseBrokenBytes"]


class RefuseBrokenBytes(grpc.aio.ServerInterceptor):
    """For every method of every service, whatever its kind: a request that cannot be parsed reaches no method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The method's handler with a parser that hands an error on instead of raising it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        kind = ("stream" if handler.request_streaming else "unary") + "_" + (
            "stream" if handler.response_streaming else "unary"
        )  # fmt: skip
        guard = _guard_stream if handler.request_streaming else _guard_one
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            guard(getattr(handler, kind)),
            request_deserializer=_parser(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_error(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_error


async def _check(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {request}; is the client's proto another one?")


def _guard_one(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of one request that returns, writes or yields its answers."""
    if inspect.isasyncgenfunction(method):

        async def answers(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await _check(request, context)
            async for answer in method(request, context):
                yield answer

        return answers

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _check(request, context)
        return await method(request, context)

    return answer


def _guard_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of many requests."""

    async def checked(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for request in requests:
            await _check(request, context)
            yield request

    if inspect.isasyncgenfunction(method):

        async def answers(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for answer in method(checked(requests, context), context):
                yield answer

        return answers

    async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        return await method(checked(requests, context), context)

    return answer
