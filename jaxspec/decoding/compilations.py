"""Counts backend compilations: after warm-up there must be none."""

from __future__ import annotations

import threading
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_total = 0
_listening = False


def _count(event: str, duration: float, **_: Any) -> None:
    global _total
    if event == _EVENT:
        with _lock:
            _total += 1


class CompilationCounter:
    """Compilations of this process since the last `reset`."""

    def __init__(self) -> None:
        global _listening
        with _lock:
            if not _listening:
                jax.monitoring.register_event_duration_secs_listener(_count)
                _listening = True
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self._start = _total

    @property
    def count(self) -> int:
        """Backend compilations since the reset."""
        return _total - self._start
