"""Bytes that are no request: of a message, and of a connection."""

from __future__ import annotations

import socket
import struct

import grpc
import pytest

from tests.helpers.scripted_runner import PATIENCE, expected_answer
from tests.serving.harness import Served

JUNK = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x00\xff" * 400,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    b"",
)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x12\x05ab"], ids=["wire", "short", "shorter"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("jaxspec.v1.Generation/Generate", "unary_stream"),
        ("jaxspec.v1.Generation/GetModelInfo", "unary_unary"),
        ("grpc.health.v1.Health/Check", "unary_unary"),
        ("grpc.health.v1.Health/Watch", "unary_stream"),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
def test_a_request_that_cannot_be_parsed_is_invalid(served: Served, method, kind, data, capfd):
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        call = getattr(channel, kind)(f"/{method}")
        answer = call(iter([data]) if kind.startswith("stream") else data, timeout=PATIENCE)
        list(answer if kind.endswith("stream") else [answer])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("request: ")
    assert "Traceback" not in capfd.readouterr().err


def test_connections_that_speak_something_else_leave_the_server_as_it_was(served: Served, client, capfd):
    host, _, port = served.address.rpartition(":")
    for junk in JUNK:
        for reset in (False, True):
            with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
                if reset:  # closing then throws away what was not read, as a port scanner does
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(junk)
    assert client.complete("hello", max_new_tokens=4).token_ids == expected_answer(b"hello", 4)
    assert "Traceback" not in capfd.readouterr().err and served.runner.violations == []
