"""The trainer's account of a spool: what was produced, consumed, acknowledged. One JSON object a line, only added to.

    {"event": "produced", "shard": 3, "batches": [6, 7], "sha256": ..., "producer": ...}    the trainer found it whole
    {"event": "consumed", "step": 7}          the optimizer step that used its samples is done
    {"event": "acknowledged", "step": 8, "checkpoint": 8}   a durable checkpoint covers the steps up to 8
    {"event": "resumed", "step": 8}           the trainer began again behind step 8: what was consumed later is replayed

Steps count from 1 and take their samples in order: step n has rows (n-1)*Q to n*Q of the run's sequence, Q = sequences
of an optimizer step. So a state is one number, the last step that reached it; acknowledged <= consumed always.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec.errors import DataError, InvariantError, problem

__all__ = ["Ledger", "audit", "read_ledger"]


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Its events; a last line that a kill tore is left out. Raises DataError for a broken line before it."""
    events: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else [], 1):
        if not line.endswith(b"\n"):
            break
        try:
            event = json.loads(line)
            if not isinstance(event["event"], str) or type(event.get("step", 0)) is not int:
                raise ValueError("no event with a whole step")
            events.append(dict(event))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            where = f"features.path ({path.name}, line {number})"
            raise DataError(problem(where, "a broken line", "an event", "begin with an empty spool")) from error
    return events


class Ledger:
    """The account, open for adding to it; one process at a time (the caller holds the spool's lock)."""

    def __init__(self, path: Path):
        self.consumed = self.acknowledged = 0
        self.produced: set[int] = set()
        events = read_ledger(path)
        for event in events:
            self._fold(event)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")
        self._file.truncate(_whole(path))

    def add(self, event: str, *, durable: bool = False, **about: Any) -> None:
        """Adds an event; with `durable` it is on the disk when this returns.

        Raises:
          InvariantError: a step out of order, or an acknowledgement of what was not consumed.
        """
        entry = {"event": event, **about}
        self._fold(entry)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _fold(self, entry: dict[str, Any]) -> None:
        event, step = entry["event"], entry.get("step", 0)
        if event == "produced":
            self.produced.add(entry["shard"])
        elif event == "consumed":
            if step != self.consumed + 1:
                raise InvariantError(f"spool ledger: step {step} consumed after step {self.consumed}")
            self.consumed = step
        elif event == "acknowledged":
            if not self.acknowledged < step <= self.consumed:
                raise InvariantError(
                    f"spool ledger: step {step} acknowledged, expected one from {self.acknowledged + 1} to the last "
                    f"that was consumed, {self.consumed}"
                )
            self.acknowledged = step
        elif event == "resumed":
            self.consumed = min(self.consumed, step)
            self.acknowledged = min(self.acknowledged, step)
        else:
            raise InvariantError(f"spool ledger: unknown event {event!r}")


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def audit(events: list[dict[str, Any]]) -> dict[str, int]:
    """What became of the steps: how many were consumed at all, are acknowledged at the end, were acknowledged more than
    once, were replayed (consumed more than once), and were given back after an acknowledgement (`reopened`: their
    checkpoint was deleted)."""
    acknowledged, consumed, reopened = Counter[int](), Counter[int](), 0
    last_consumed = last = 0
    for event in events:
        step = event.get("step", 0)
        if event["event"] == "consumed":
            consumed[step] += 1
            last_consumed = step
        elif event["event"] == "acknowledged":
            acknowledged.update(range(last + 1, step + 1))
            last = step
        elif event["event"] == "resumed":
            reopened += max(last - step, 0)
            last, last_consumed = min(last, step), min(last_consumed, step)
    return {
        "steps": len(consumed),
        "acknowledged": last,
        "acknowledged_twice": sum(count > 1 for count in acknowledged.values()),
        "replayed": sum(count > 1 for count in consumed.values()),
        "waiting": last_consumed - last,
        "reopened": reopened,
    }
