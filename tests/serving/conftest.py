"""Fixtures of the serving tests: a running server and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxspec.serving.client import Client
from tests.serving.harness import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.address) as connected:
        yield connected
