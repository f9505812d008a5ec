"""The gRPC server around a worker: bind, health, reflection, ready line, drain.

asyncio instead of a thread pool: an open stream costs no thread, so a hundred waiting calls cannot starve health
checks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxspec.errors import JaxspecError, ServerError, problem
from jaxspec.serving.facts import Loaded
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2_grpc as pb_grpc
from jaxspec.serving.service import SERVICE_NAME, GenerationService
from jaxspec.serving.wire import RefuseBrokenBytes
from jaxspec.serving.worker import State, Worker

__all__ = ["OPTIONS", "Server"]

_log = logging.getLogger(__name__)

OPTIONS = (
    # Two servers must not share a port unnoticed, which gRPC allows by default.
    ("grpc.so_reuseport", 0),
    # Clients may ping every few seconds, also while a long prefill is silent; gRPC's default cuts them off as abusive.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A peer that vanished without closing its connection is noticed, and its slots freed, within a minute and a half.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
# After the last answer, time for its bytes to leave and for health watchers to hear of the end.
_GOODBYE_SECONDS = 0.5
# A compilation or a round under way cannot be interrupted; this is how much longer than the drain we wait for it.
_STUCK_SECONDS = 5.0


class Server:
    """One server. `run` is its whole life; `ready`, `address` and `stop` may be used from other threads.

    `start` is the worker's start-up (see Worker). `say` gets the lines for the operator.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], None]], Loaded],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_queue: int = 64,
        drain_seconds: float = 30.0,
        say: Callable[[str], None] = functools.partial(print, flush=True),
    ):
        self._host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._port = port
        self._drain_seconds = drain_seconds
        self._say = say
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._states: asyncio.Queue[State] = asyncio.Queue()
        self.worker = Worker(start, max_queue=max_queue, on_state=self._on_state)
        self._health = health.aio.HealthServicer()

    @property
    def address(self) -> str:
        """host:port, known once `run` has bound it."""
        return f"{self._host}:{self._port}"

    async def run(self) -> int:
        """Serves until `stop`. 0 after a clean stop, 1 after a failed runner; an error of start-up is raised."""
        self._loop = asyncio.get_running_loop()
        service = GenerationService(self.worker)
        server = grpc.aio.server(interceptors=[RefuseBrokenBytes()], options=OPTIONS)
        pb_grpc.add_GenerationServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health(serving=False)  # the health service starts out as SERVING
        self._bind(server)
        await server.start()
        self._say(f"listening on {self.address}, NOT_SERVING until warm-up is done")
        self.worker.start()
        try:
            code = await self._live()
            await self._health.enter_graceful_shutdown()
            code = max(code, await self._drain())
            await self._finish(service.idle())
        finally:
            await server.stop(_GOODBYE_SECONDS)
        if self._error is not None and self.worker.facts is None:
            raise self._error
        return code

    def stop(self) -> None:
        """Asks for a graceful end, from any thread or signal handler; `run` then returns."""
        if self._loop is None:
            self._stop.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def _bind(self, server: grpc.aio.Server) -> None:
        wanted = self.address
        try:
            self._port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            action = "another program may be using it; choose another server.port, or 0 for any free one"
            raise ServerError(
                problem("server.host and server.port", wanted, "an address that can be listened on", action)
            ) from error

    async def _live(self) -> int:
        """From warm-up to the request to stop (or the failure of start-up)."""
        stop = asyncio.create_task(self._stop.wait())
        code = 0
        while True:
            change = asyncio.create_task(self._states.get())
            await asyncio.wait({stop, change}, return_when=asyncio.FIRST_COMPLETED)
            if change.done():
                state = change.result()
                await self._set_health(serving=state is State.SERVING)
                facts = self.worker.facts
                if state is State.SERVING and facts is not None:
                    self._say(f"SERVING on {self.address} target={facts.target} drafter={facts.drafter}")
                elif state is State.FAILED:
                    code = 1
                    if facts is None:
                        stop.cancel()
                        return code
                    self._say("NOT_SERVING: the runner failed; every request is refused until the server is restarted")
            else:
                change.cancel()
            if stop.done():
                return code

    async def _drain(self) -> int:
        self.worker.drain(self._drain_seconds)
        running = self.worker.load().running
        if running:
            self._say(f"shutting down: {running} running requests may finish within {self._drain_seconds:g} s")
        limit = self._drain_seconds + _STUCK_SECONDS
        if await asyncio.get_running_loop().run_in_executor(None, self.worker.join, limit):
            return 0
        self._say(f"the runner did not end within {limit:g} s; leaving it")
        return 0 if self.worker.facts is None else 1

    async def _finish(self, idle: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(idle, _STUCK_SECONDS)
        except TimeoutError:
            self._say("some clients do not read their answers; their calls are cut")

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _on_state(self, state: State, error: BaseException | None) -> None:
        """On the worker's thread."""
        if error is not None:
            self._error = error
            if not isinstance(error, JaxspecError):
                _log.error("the runner failed", exc_info=error)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._states.put_nowait, state)
