"""Counts backend compilations: after warm-up there must be none."""

from __future__ import annotations

import threading
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_lock = threading.Lock()
_total = 0
_hits = 0
_listening = False


def _count(event: str, duration: float, **_: Any) -> None:
    global _total
    if event == _EVENT:
        with _lock:
            _total += 1


def _count_hit(event: str, **_: Any) -> None:
    global _hits
    if event == _HIT:
        with _lock:
            _hits += 1


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_count)
            jax.monitoring.register_event_listener(_count_hit)
            _listening = True


class CacheHits:
    """Executables that came out of the persistent compilation cache since this was made."""

    def __init__(self) -> None:
        _listen()
        self._start = _hits

    @property
    def count(self) -> int:
        """Hits of this process, on any thread."""
        return _hits - self._start


class CompilationCounter:
    """Compilations of this process since the last `reset`."""

    def __init__(self) -> None:
        _listen()
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self._start = _total

    @property
    def count(self) -> int:
        """Backend compilations since the reset."""
        return _total - self._start
