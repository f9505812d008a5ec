"""What a person sees of a run: a bar on a terminal, one plain line per log entry elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Reporter"]


class Reporter:
    """Prints notices and the state of the training loop.

    Args:
      console: where to; the standard output when None. A bar is drawn only if it is a terminal.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._total: int | None = None

    def say(self, text: str) -> None:
        """A notice, on a line of its own."""
        self._console.print(text, markup=False)

    def start(self, step: int, total: int | None) -> None:
        """The loop begins at `step` of `total`."""
        self._total = total
        if self._console.is_terminal:
            columns = [
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            ]
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
            self._progress.add_task("training", total=total, completed=step, note="")

    def advance(self, step: int) -> None:
        """A step was done."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Numbers of a log window."""
        shown = {
            name: numbers[name]
            for name in (
                "loss",
                "accuracy",
                "learning_rate",
                "grad_norm",
                "supervised_anchors",
                "tokens_per_second",
            )
            if name in numbers
        }
        note = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], note=note)
        else:
            self.say(f"step {step}{f'/{self._total}' if self._total else ''}  {note}")

    def stop(self) -> None:
        """The loop is over."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
