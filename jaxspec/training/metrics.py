"""From device terms to numbers in a log: pooled over a window of steps, written as JSON lines and TensorBoard events.

A ratio is the sum of the window's sums over the sum of its weights, never a mean of ratios. Names: `loss`,
`loss/TERM` for the terms of the objective, the metric's own name for the rest, with `/1`, `/2`, ... behind it where a
term has one entry per position of the block.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.training.directory import write_atomically
from jaxspec.training.step import METRIC_PREFIX
from jaxspec.training.tracking import Tracker

__all__ = ["MetricsWriter", "NoWriter", "Window"]


class Window:
    """What happened since the last log line. Device values are fetched once, when the window is read."""

    def __init__(self) -> None:
        self._metrics: list[dict[str, Any]] = []
        self._start = time.perf_counter()
        self._tokens = 0
        self._wait = 0.0

    def add(self, metrics: dict[str, Any], tokens: int, wait: float) -> None:
        """One step: its device metrics, the tokens of its batch and the seconds it waited for the batch."""
        self._metrics.append(metrics)
        self._tokens += tokens
        self._wait += wait

    def pause(self, seconds: float) -> None:
        """Take time that was not training (an evaluation) out of the window."""
        self._start += seconds

    def __len__(self) -> int:
        return len(self._metrics)

    def read(self) -> dict[str, float]:
        """Numbers of the window; empties it. Waits for the last step."""
        fetched = jax.device_get(self._metrics)
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        count, last = len(fetched), fetched[-1]
        numbers = {
            "loss": float(np.mean([step["loss"] for step in fetched])),
            "learning_rate": float(last["learning_rate"]),
            "grad_norm": float(np.mean([step["grad_norm"] for step in fetched])),
            "tokens_per_second": self._tokens / elapsed,
            "step_seconds": elapsed / count,
            "data_wait_seconds": self._wait / count,
            "anchors": int(sum(step["anchors"] for step in fetched)),
            "supervised_anchors": int(sum(step["supervised_anchors"] for step in fetched)),
            "supervised_tokens": int(sum(step["supervised_tokens"] for step in fetched)),
            "skipped_steps": int(last["skipped"]),
            "nonfinite_steps": int(last["nonfinite"]),
        }
        numbers.update(_pooled([step["terms"] for step in fetched]))
        self.__init__()  # type: ignore[misc]
        return numbers


def _pooled(steps: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> Iterator[tuple[str, float]]:
    for name in steps[0]:
        total = np.sum([np.asarray(step[name][0], np.float64) for step in steps], axis=0)
        weight = np.sum([np.asarray(step[name][1], np.float64) for step in steps], axis=0)
        total, weight = np.broadcast_arrays(total, weight)
        label = name.removeprefix(METRIC_PREFIX) if name.startswith(METRIC_PREFIX) else f"loss/{name}"
        for place in np.ndindex(total.shape):
            if weight[place] > 0:
                yield "/".join([label, *(str(index + 1) for index in place)]), float(total[place] / weight[place])


class MetricsWriter:
    """metrics.jsonl and, if asked, TensorBoard events under `directory`.

    Args:
      resume_step: 0 or the step a run goes on from; lines of later steps, written by a process that died, are removed.
      tracker: gets every line too.
    """

    def __init__(self, directory: Path, tensorboard: bool, resume_step: int = 0, tracker: Tracker | None = None):
        self._tracker = tracker
        self.path = directory / "metrics.jsonl"
        if self.path.exists():
            kept = [
                line for line in self.path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= resume_step
            ]
            write_atomically(self.path, "".join(line + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One line, flushed."""
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._tracker is not None:
            self._tracker.write(step, numbers)

    def close(self) -> None:
        """Flush to the disk and close."""
        with contextlib.ExitStack() as ends:  # each is closed even where another one cannot be
            if self._events is not None:
                ends.callback(self._events.close)
            if self._tracker is not None:
                ends.callback(self._tracker.close)
            ends.callback(self._file.close)
            os.fsync(self._file.fileno())


def _step_of(line: str) -> float:
    """Step of a line; a line that was cut short belongs to no step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class NoWriter:
    """Where another process writes."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
