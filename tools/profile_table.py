"""A profiler trace as a table: what the device ran, how long it was busy, and what the host did meanwhile."""

from __future__ import annotations

import collections
import functools
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

TOP = 24
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|_dot|dot_", re.I)
_ATTENTION = re.compile(r"mosaic|forward_kernel|dq_kernel|dkv_kernel", re.I)
_COPY = re.compile(r"memcpy|memset|copy|transpose", re.I)


def profile(step: Callable[[], Any], steps: int, label: Callable[[Any], str] | None = None) -> dict[str, Any]:
    """Of `steps` calls of `step`, per call: milliseconds that the device was busy, its kernels, the host's regions.
    `label` names a kernel's event; None takes the event's own name.

    While it is profiled every launch takes longer, so the gaps between kernels say nothing; the kernels' own times do.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                step()
        planes = [
            plane
            for file in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        ]
        lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        host = [line for plane in planes if plane.name == "/host:CPU" for line in plane.lines]
        kernels = [event for line in lines for event in line.events]
        report = {
            "kernels": _table(kernels, steps, label),
            "host": _table((e for line in host for e in line.events), steps),
        }
        spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in kernels)
    return {"busy_ms": _union(spans) / steps / 1e6, "launches": len(spans) / steps, **report}


def _table(events: Iterable[Any], steps: int, label: Callable[[Any], str] | None = None) -> list[dict[str, Any]]:
    """The names with most time: calls and microseconds a step."""
    count: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        name = event.name.split("#")[0][:80] if label is None else label(event)
        count[name] += 1
        total[name] += int(event.duration_ns)
    return [
        {"name": name, "calls": round(count[name] / steps, 1), "us": round(ns / steps / 1e3, 1)}
        for name, ns in total.most_common(TOP)
    ]


def _union(spans: list[tuple[float, float]]) -> float:
    """Nanoseconds that at least one span covers; spans sorted by start."""
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


def operations(program: Any) -> Callable[[Any], str]:
    """Of a kernel's event: its name, and what the compiled program says of the operation behind it."""
    known = {}
    for line in program.as_text().splitlines():
        if found := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\S+)", line):
            path = re.search(r'op_name="([^"]*)"', line)
            known[found[1]] = f"{found[2].split('{')[0][:40]} {path[1][-70:] if path else ''}"

    @functools.cache
    def label(name: str, operation: str) -> str:
        name = name.split("#")[0][:60]
        return f"{name} | {operation} {known[operation]}" if operation in known else name

    return lambda event: label(event.name, str(dict(event.stats).get("hlo_op", "")))


def kinds(kernels: Sequence[dict[str, Any]], vocab: int) -> dict[str, float]:
    """Milliseconds of the listed kernels by kind."""
    total: dict[str, float] = {}
    for kernel in kernels:
        name, _, operation = kernel["name"].partition(" | ")
        kind = "attention" if _ATTENTION.search(name) else "products" if _GEMM.search(name) else "elementwise"
        kind = "copies" if kind == "elementwise" and _COPY.search(name) else kind
        kind += " over the vocabulary" if re.search(rf"\b{vocab}\b", operation) else ""
        total[kind] = total.get(kind, 0.0) + kernel["us"] / 1e3
    return total
