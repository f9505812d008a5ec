"""The stages of a start-up: a progress bar on a terminal, one plain line a stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Stages"]


class Stages:
    """`with Stages(5) as stages, stages.stage("loading the target"): ...`; `done` counts a stage that timed itself.

    `total` is how many stages there will be, as far as is known. Output goes to stderr, so that stdout holds the
    server's own lines.
    """

    def __init__(self, total: int, console: Console | None = None, say: Callable[[str], None] | None = None):
        self._console = console or Console(stderr=True)
        self._say = say or (lambda line: self._console.print(line, highlight=False, markup=False, soft_wrap=True))
        self._total = total
        self._finished = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        if self._console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, stages: int) -> None:
        """There are so many more stages than was known."""
        self._total += stages
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._total)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows `name` while the block runs, and its seconds afterwards."""
        self.show(name)
        began = time.perf_counter()
        yield
        self.done(name, time.perf_counter() - began)

    def show(self, name: str) -> None:
        """What is going on now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)

    def done(self, name: str, seconds: float) -> None:
        """One stage is over."""
        self._finished += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._finished)
        self._say(f"[{self._finished}/{self._total}] {name}: {seconds:.1f} s")
