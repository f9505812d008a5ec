"""A real server on a loopback port over the scripted runner, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from jaxspec.serving.client import Client
from jaxspec.serving.facts import Facts, Loaded
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2_grpc as pb_grpc
from jaxspec.serving.server import Server
from jaxspec.serving.text import Codec
from jaxspec.serving.worker import Worker
from tests.helpers.scripted_runner import PATIENCE, VOCAB, ByteCodec, ScriptedRunner

BYTES = ByteCodec()


@dataclass
class Served:
    """A running server: the test's end of it."""

    server: Server
    runner: ScriptedRunner
    lines: list[str] = field(default_factory=list)
    code: int | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return self.server.address

    def stop(self) -> int | None:
        self.server.stop()
        return self.wait()

    def wait(self) -> int | None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server did not stop"
        return self.code


def facts_of(runner: ScriptedRunner) -> Facts:
    return Facts("table", "scripted", "script", VOCAB, runner.max_context, runner.num_slots, runner.num_proposals)


@contextlib.contextmanager
def serving(
    runner: ScriptedRunner | None = None,
    *,
    start: Callable | None = None,
    codec: Codec | None = BYTES,
    ready: bool = True,
    **options,
) -> Iterator[Served]:
    """Starts a server, waits until it is SERVING (unless `ready` is false), and stops it at the end."""
    runner = runner or ScriptedRunner()
    lines: list[str] = []
    said = threading.Condition()

    def load(check: Callable[[], None]) -> Loaded:
        if start is not None:
            start(check)
        runner.warm_up()
        return Loaded(runner, codec, facts_of(runner))

    def say(line: str) -> None:
        with said:
            lines.append(line)
            said.notify_all()

    served = Served(Server(load, say=say, **{"drain_seconds": 5.0, **options}), runner, lines)

    def run() -> None:
        try:
            served.code = asyncio.run(served.server.run())
        except Exception as error:  # the test looks at it
            served.error = error
        with said:
            said.notify_all()

    served.thread = threading.Thread(target=run, name="test-server")
    served.thread.start()
    try:
        with said:
            assert said.wait_for(lambda: lines or not served.thread.is_alive(), PATIENCE)
        if ready:
            with Client(served.address) as client:
                client.wait_ready(PATIENCE)
        yield served
    finally:
        runner.rounds.allow()
        runner.prefills.allow()
        served.stop()
        assert runner.violations == []


@contextlib.contextmanager
def stub(address: str) -> Iterator[pb_grpc.GenerationStub]:
    """The raw stub, for requests that the Client would not make."""
    with grpc.insecure_channel(address) as channel:
        yield pb_grpc.GenerationStub(channel)


def until(served: Served, condition: Callable[[Worker], bool]) -> None:
    """Waits for a condition on the worker's load or state."""
    assert served.server.worker.wait_for(lambda: condition(served.server.worker), PATIENCE), served.server.worker.load()


def settle(worker: Worker, runner: ScriptedRunner) -> None:
    """Waits until nothing waits or runs, and checks that the runner holds nothing either."""
    assert worker.wait_for(lambda: worker.load() == (0, 0, 0), PATIENCE), worker.load()
    assert runner.live == 0 and runner.free_slots == runner.num_slots
