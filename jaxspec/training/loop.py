"""The training loop: takes batches, runs the compiled step, logs, saves, evaluates, stops.

The device is never more than one step behind: the loop waits for step n - 1 after it has launched step n, so the
host's work hides behind the device's and a time budget is kept to within a step. Nothing moves between host and
device unless the code says so (transfer guard), and nothing compiles (the step was compiled before).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.config import RunSection
from jaxspec.errors import JaxspecError, problem
from jaxspec.training import pod
from jaxspec.training.best import Best
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.metrics import MetricsWriter, NoWriter, Window
from jaxspec.training.pipeline import Batches
from jaxspec.training.progress import Reporter
from jaxspec.training.signals import StopRequest
from jaxspec.training.state import Placement, TrainState
from jaxspec.training.step import Frozen

__all__ = ["Loop", "Outcome", "TrainingError"]

_HOPELESS = 20  # steps in a row, from the first on, without one anchor to learn from

Step = Callable[[TrainState, Frozen, dict[str, jax.Array]], tuple[TrainState, dict[str, Any]]]


class TrainingError(JaxspecError):
    """Training cannot sensibly go on."""


@dataclasses.dataclass
class Outcome:
    """reason: "steps", "seconds" or the name of a signal; seconds and tokens of the whole run, earlier processes
    included."""

    state: TrainState
    step: int
    reason: str
    seconds: float
    tokens: int
    last: dict[str, float]


@dataclasses.dataclass
class Loop:
    """Everything the loop needs besides its state.

    step: compiled; total_steps: None when only time limits the run; meta: the constant JSON part of every checkpoint;
    evaluate: parameters -> numbers, or None; best: keeps the weights of the highest tau, or None.
    """

    config: RunSection
    step: Step
    frozen: Frozen
    placement: Placement
    batches: Batches
    checkpoints: Checkpoints
    writer: MetricsWriter | NoWriter
    reporter: Reporter
    stop: StopRequest
    total_steps: int | None
    meta: dict[str, Any]
    evaluate: Callable[[Any], dict[str, float]] | None = None
    best: Best | None = None

    def run(self, state: TrainState, step: int, seconds: float, tokens: int) -> Outcome:
        """Train from `step` (so many steps, seconds and tokens were done before) to a limit or a signal, then save."""
        window, previous, last = Window(), None, {}
        measured: dict[str, float] = {}
        self._begin, self._before, self._nonfinite = time.perf_counter(), seconds, int(jax.device_get(state.nonfinite))
        self._now = self._saved_at = seconds
        self.reporter.start(step, self.total_steps)
        try:
            asked: float | None = None
            while (reason := self._ends(step)) is None:
                self.batches.saved(self.checkpoints.durable())
                asked = asked or time.perf_counter()
                if not self.batches.ready():
                    continue  # the wait is in small pieces, so that a signal is heard and the time is kept
                host = next(self.batches)
                waited, asked = time.perf_counter() - asked, None
                count = int(host["lengths"].sum())
                with jax.transfer_guard("disallow"):
                    batch = self.placement.put_batch({name: host[name] for name in self.batches.fields})
                    state, metrics = self.step(state, self.frozen, batch)
                if previous is not None:
                    jax.block_until_ready(previous)
                    self.batches.trained(step)
                previous = metrics["loss"]
                step, tokens = step + 1, tokens + count
                window.add(metrics, count, waited)
                self.reporter.advance(step)
                if step % self.config.log_every == 0:
                    last = self._log(window, step)
                if self.config.eval_every and step % self.config.eval_every == 0:
                    paused, measured = self._evaluate(state, step)
                    window.pause(paused)
                if self._due(step):
                    self._save(state, step, tokens)
            jax.block_until_ready(state)
            self.batches.trained(step)
            if len(window):
                last = self._log(window, step)
            if self.config.eval_every and step % self.config.eval_every and reason in ("steps", "seconds"):
                _, measured = self._evaluate(state, step)  # the weights that are exported are measured too
            last = last | measured
            self._check_taught(int(jax.device_get(state.skipped)), step, final=reason in ("steps", "seconds"))
            self._save(state, step, tokens)
            self.checkpoints.wait()
            self.batches.saved(self.checkpoints.durable())
        finally:
            self.reporter.stop()
        return Outcome(state, step, reason, self.seconds(), tokens, last)

    def seconds(self) -> float:
        """Wall-clock time of the loop, earlier processes included."""
        return self._before + time.perf_counter() - self._begin

    def _ends(self, step: int) -> str | None:
        stop, seconds = pod.agreed(self.stop.name is not None, self.seconds())
        self._now = seconds
        if stop:
            return self.stop.name or "a signal to another process"
        if self.total_steps is not None and step >= self.total_steps:
            return "steps"
        return "seconds" if self.config.seconds is not None and seconds >= self.config.seconds else None

    def _log(self, window: Window, step: int) -> dict[str, float]:
        count = len(window)
        numbers = window.read()
        self.writer.write(step, numbers)
        self.reporter.log(step, numbers)
        bad, self._nonfinite = int(numbers["nonfinite_steps"]) - self._nonfinite, int(numbers["nonfinite_steps"])
        if bad >= max(count, 2):
            raise TrainingError(
                problem(
                    "optimizer.learning_rate",
                    f"gradients that are no numbers in all {bad} steps up to step {step}",
                    "finite gradients",
                    "lower the rate; the parameters were left as they were before these steps",
                )
            )
        self._check_taught(int(numbers["skipped_steps"]), step)
        return numbers

    @staticmethod
    def _check_taught(skipped: int, step: int, final: bool = False) -> None:
        """A run in which no step had anything to learn must not end as if it had trained."""
        if step and skipped == step and (final or step >= _HOPELESS):
            raise TrainingError(
                problem(
                    "data",
                    f"no supervised anchor in all {step} steps",
                    "sequences with supervised tokens behind their anchors",
                    "check data.anchor_rule, data.max_length and drafter.block_size; nothing was trained",
                )
            )

    def _due(self, step: int) -> bool:
        """Whether a checkpoint is due: by steps, or by the time that all processes agreed on before this step."""
        if self.config.checkpoint_every and step % self.config.checkpoint_every == 0:
            return True
        limit = self.config.checkpoint_seconds
        return limit is not None and self._now - self._saved_at >= limit

    def _save(self, state: TrainState, step: int, tokens: int) -> None:
        moving = {"step": step, "seconds": self.seconds(), "tokens": tokens, "input": self.batches.get_state()}
        self._saved_at = self._now
        self.checkpoints.save(step, state, self.meta | moving)

    def _evaluate(self, state: TrainState, step: int) -> tuple[float, dict[str, float]]:
        """Seconds that it took, and its numbers."""
        if self.evaluate is None:
            return 0.0, {}
        started, params = time.perf_counter(), state.served
        found = {name: float(value) for name, value in self.evaluate(params).items()}
        numbers = {f"eval/{name}": value for name, value in found.items()}
        self.writer.write(step, numbers)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        kept = self.best is not None and "tau" in found and self.best.offer(step, found["tau"], params)
        self.reporter.say(f"step {step}  {shown}{'  (the best so far, kept)' if kept else ''}")
        return time.perf_counter() - started, numbers
