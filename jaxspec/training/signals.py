"""SIGTERM and Ctrl-C ask the loop to stop at the next step, with a checkpoint; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_requests"]


class StopRequest:
    """`name` is the signal that arrived, None before."""

    name: str | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Watch for the two signals inside the block. Outside the main thread, where none can be caught, nothing is
    watched."""
    request, before = StopRequest(), {}

    def arrived(number: int, frame: FrameType | None) -> None:
        if request.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, arrived) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
