"""Counters and guards for loops that must neither compile nor copy behind the reader's back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiled = 0
_listening = False


def _listen() -> None:
    # One listener for the whole process: jax has no public way to take a single listener off again.
    global _listening
    if _listening:
        return

    def note(event: str, duration: float, **_: object) -> None:
        global _compiled
        _compiled += event == _COMPILE_EVENT

    jax.monitoring.register_event_duration_secs_listener(note)
    _listening = True


@dataclass
class CompileCount:
    """Backend compilations since the block began."""

    start: int

    @property
    def count(self) -> int:
        return _compiled - self.start


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """`with count_compiles() as compiled: ...; assert compiled.count == 0`."""
    _listen()
    yield CompileCount(_compiled)


@contextlib.contextmanager
def no_compiles() -> Iterator[None]:
    """Fails when the block compiles anything."""
    with count_compiles() as compiled:
        yield
    assert compiled.count == 0, f"{compiled.count} compilations where none may happen"


@contextlib.contextmanager
def no_implicit_transfers() -> Iterator[None]:
    """Implicit copies between host and device raise; explicit jax.device_put and jax.device_get stay allowed."""
    with jax.transfer_guard("disallow"):
        yield
