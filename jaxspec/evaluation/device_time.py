"""How much of a stretch of work the device was busy, by jax's own profiler."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxspec.errors import InvariantError, problem

__all__ = ["DeviceTime", "DeviceTrace", "device_time", "union_seconds"]


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Seconds in which at least one of the device's streams ran something, from the first event's start to the last
    one's end, and the number of events (kernels and copies)."""

    busy: float
    span: float
    events: int

    @property
    def idle_share(self) -> float:
        """Of the span."""
        return 1 - self.busy / self.span


class DeviceTrace:
    """`with DeviceTrace() as trace: work()`; then `trace.time`. The work must wait for what it started. InvariantError
    where the backend reports no device events (a CPU)."""

    time: DeviceTime

    def __enter__(self) -> DeviceTrace:
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._folder as folder:
            jax.profiler.stop_trace()
            if kind is not None:
                return
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            if not files:
                raise InvariantError(problem("profiler", "no trace", "one .xplane.pb file"))
            self.time = device_time(jax.profiler.ProfileData.from_file(str(files[-1])))


def device_time(profile: Any) -> DeviceTime:
    """Of a trace in memory: the events on the streams of all devices, or on a TPU's line of operations."""
    events = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith(("/device:GPU", "/device:TPU"))
        for line in plane.lines
        if line.name.startswith("Stream") or line.name == "XLA Ops"
        for event in line.events
    ]
    if not events:
        planes = [plane.name for plane in profile.planes]
        raise InvariantError(problem("profiler", f"no device events (planes {planes})", "a GPU's or a TPU's"))
    begin, end = min(start for start, _ in events), max(stop for _, stop in events)
    return DeviceTime(1e-9 * union_seconds(events), 1e-9 * (end - begin), len(events))


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total
