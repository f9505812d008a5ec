"""The trainer's side of a spool: whole optimizer steps out of shards, and the account of what may be deleted.

A step's samples are *consumed* once the step is done. They are *acknowledged*, and their shard may go, only once a
durable checkpoint covers the step: a trainer that dies goes on from that checkpoint and takes what it had consumed
since then once more, in the same order.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training import pod
from jaxspec.training.featurestore.ledger import Ledger
from jaxspec.training.featurestore.shards import Reader
from jaxspec.training.featurestore.spool import LEDGER, Spool, first_shard, last_shard
from jaxspec.training.pipeline import Batches

__all__ = ["SpoolBatches"]

_POLL_SECONDS = 0.02


class SpoolBatches(Batches):
    """Batches whose features come out of a spool; see `Batches` for the rest.

    Args:
      spool: its `about` says how micro-batches lie in shards.
      wait_seconds: longest wait for a shard.
      options: what Batches takes, without `layout`.

    Every process of a pod reads; process 0 keeps the account, moves the cursor and deletes.
    """

    def __init__(self, spool: Spool, wait_seconds: float, **options: Any):
        super().__init__(**options)
        self._spool, self._wait, self._layout = spool, wait_seconds, spool.layout
        self._seq_len, self._rows = options["seq_len"], options["batch_size"]
        self._steps, self._each = spool.about["accumulation"], spool.about["shard_batches"]
        self.fields = (*self.fields, *self._layout.fields(self._seq_len))
        self._readers: dict[int, Reader] = {}
        self._ledger: Ledger | None = None
        self._lock = contextlib.ExitStack()
        self._since: float | None = None

    def ready(self) -> bool:
        """Whether every shard of the next step is there, for all processes; False after a short wait.

        Raises:
          DataError: a shard did not come in time, or is broken.
        """
        missing = [number for number in self._shards(self._next()) if not self._open(number)]
        if pod.any_of(bool(missing)):
            now = time.monotonic()
            self._since = self._since or now
            if now - self._since > self._wait:
                raise DataError(
                    problem(
                        f"features.path {self._spool.storage}",
                        f"no shard {missing} within {self._wait:g} s",
                        "producers at work",
                        "start `jaxspec capture --spool` with this config; the same command goes on from the last "
                        "checkpoint",
                    )
                )
            time.sleep(_POLL_SECONDS)
            return False
        self._since = None
        return True

    def __next__(self) -> dict[str, np.ndarray]:
        step = self._next()
        while not self.ready():
            continue
        host = super().__next__()
        records = []
        for part in range(self._steps):
            batch = step * self._steps + part
            start = batch % self._each * self._rows
            contents = self._readers[batch // self._each].read(range(start, start + self._rows))
            records += [self._layout.decode(content) for content in contents]
        self._check(host, records)
        stored = self._layout.stack(records, self._seq_len, len(records))
        host |= {name: array.reshape(self._steps, self._rows, *array.shape[1:]) for name, array in stored.items()}
        used = first_shard(step + 1, self._steps, self._each)
        for number in [number for number in self._readers if number < used]:
            self._readers.pop(number).close()
        return host

    def begin(self, step: int) -> None:
        """Takes the spool for this run and goes on after `step`: what is older is acknowledged, what is younger is
        replayed."""
        if not pod.chief():
            return
        self._lock.enter_context(self._spool.storage.locked("trainer", "trainer"))
        with self._spool.storage.writing():
            self._ledger = Ledger(self._spool.storage.local(LEDGER))
            for done in range(self._ledger.consumed + 1, step + 1):  # died between the step's checkpoint and its line
                self._ledger.add("consumed", step=done)
            if step < self._ledger.consumed:
                self._ledger.add("resumed", step=step)
        self._spool.sweep()
        self._acknowledge(step)
        self._move(step)

    def trained(self, step: int) -> None:
        """Consumes the samples of the steps up to `step`."""
        if self._ledger is not None:
            with self._spool.storage.writing():
                for done in range(self._ledger.consumed + 1, step + 1):
                    self._ledger.add("consumed", step=done)

    def saved(self, step: int | None) -> None:
        """Acknowledges up to `step`, and deletes what nobody can ask for again."""
        if self._ledger is not None and step is not None and step > self._ledger.acknowledged:
            self.trained(step)  # a checkpoint of it is there, so it is done
            self._acknowledge(step)
            self._move(step)

    def finish(self) -> None:
        """Tells the producers that the run has ended and deletes what they made beyond it."""
        if self._ledger is not None:
            self._spool.move_cursor(first_shard(self._ledger.acknowledged, self._steps, self._each), done=True)
            self._spool.delete_before(1 << 60)

    def close(self) -> None:
        """Gives the spool back."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        self._lock.close()

    def _next(self) -> int:
        return int(self.get_state()["next_index"])

    def _shards(self, step: int) -> range:
        """Shards of the step after `step` steps."""
        first = first_shard(step, self._steps, self._each)
        return range(first, last_shard(step + 1, self._steps, self._each) + 1)

    def _open(self, number: int) -> bool:
        if number in self._readers:
            return True
        account = self._spool.account(number)
        if account is None:
            return False
        reader = Reader(self._spool.storage.local(account["file"]))
        if len(reader) != self._each * self._rows:
            raise DataError(problem(f"features.path ({account['file']})", f"{len(reader)} records"))
        if self._ledger is not None and number not in self._ledger.produced:
            about = {name: account[name] for name in ("shard", "batches", "sha256", "bytes", "producer")}
            with self._spool.storage.writing():
                self._ledger.add("produced", **about)
        self._readers[number] = reader
        return True

    @staticmethod
    def _check(host: dict[str, np.ndarray], records: list[dict[str, Any]]) -> None:
        """The records are those of the batch. Raises DataError."""
        rows = zip(host["example_ids"].ravel(), host["lengths"].ravel(), records, strict=True)
        ids = host["input_ids"].reshape(len(records), -1)
        for place, (example, length, record) in enumerate(rows):
            if record["example_id"] != example or not np.array_equal(record["input_ids"], ids[place, :length]):
                found = f"features of example {record['example_id']} in the place of {example}"
                raise DataError(problem("features.path", found, "the run's order", "begin with an empty spool"))

    def _acknowledge(self, step: int) -> None:
        assert self._ledger is not None
        if step > self._ledger.acknowledged:
            with self._spool.storage.writing():
                self._ledger.add("acknowledged", durable=True, step=step, checkpoint=step)

    def _move(self, step: int) -> None:
        """The cursor first: whoever makes a shard looks at it after, so none is left behind."""
        shard = first_shard(step, self._steps, self._each)
        self._spool.move_cursor(shard)
        self._spool.delete_before(shard)
