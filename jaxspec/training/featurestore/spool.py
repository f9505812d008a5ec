"""The folder between producers and a trainer: shards by number, leases, and how far the trainer is.

What a shard holds is fixed before anyone makes it: shard k has the micro-batches k*M to (k+1)*M - 1 of the run's own
sequence (a function of data and seed). Hence a shard that two producers made is one shard, whichever came last, and a
run's result does not depend on who produced what, when, or who died. Leases only keep producers from doing the same
work.

    spool.json                 what the shards hold; producers and trainer must agree on it
    unit-00000007.arrayrecord  a shard; it counts once unit-00000007.json, written after it, is there
    unit-00000007.lease        a producer works on it
    cursor.json                the first shard that the trainer may still need, and whether the run has ended
    ledger.jsonl               the trainer's account; see `ledger`
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from typing import Any

from jaxspec.errors import DataError, problem
from jaxspec.training.featurestore.manifest import check, layout_of, read_json
from jaxspec.training.featurestore.shards import SUFFIX, file_bytes
from jaxspec.training.featurestore.storage import Storage

__all__ = ["LEDGER", "Spool", "first_shard", "last_shard"]

_ABOUT, _CURSOR, LEDGER = "spool.json", "cursor.json", "ledger.jsonl"


def first_shard(step: int, accumulation: int, shard_batches: int) -> int:
    """The shard with the first micro-batch of the step after `step` steps."""
    return step * accumulation // shard_batches


def last_shard(steps: int, accumulation: int, shard_batches: int) -> int:
    """The shard with the last micro-batch of the first `steps` steps."""
    return (steps * accumulation - 1) // shard_batches


class Spool:
    """A spool, as a producer or the trainer sees it.

    Args:
      about: `manifest.describe` with the order of the samples: seed, shuffle, batch_size, accumulation, shard_batches.
      limit: shards that may be there from the cursor on.
      lease_seconds: a lease that was not touched for so long is free.

    Raises:
      DataError: the spool is another run's; the message names what differs.
    """

    def __init__(self, storage: Storage, about: dict[str, Any], limit: int, lease_seconds: float):
        self.storage, self.about, self.limit, self._lease_seconds = storage, about, limit, lease_seconds
        self.layout = layout_of(about)
        storage.check_ours((_ABOUT,), "a spool")
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        if not storage.create(_ABOUT, (json.dumps(about, indent=1) + "\n").encode()):
            check(read_json(storage.read(_ABOUT), f"{storage}/{_ABOUT}"), about, f"{storage}/{_ABOUT}")

    def shard_bytes(self) -> int:
        """Upper bound of a shard: every sequence as long as the longest."""
        rows = self.about["shard_batches"] * self.about["batch_size"]
        return file_bytes([self.layout.record_bytes(self.about["sequence_length"])] * rows)

    # the trainer's side

    def move_cursor(self, shard: int, done: bool = False) -> None:
        """Shards before `shard` are not needed any more; with `done` none is."""
        self.storage.write(_CURSOR, json.dumps({"shard": shard, "done": done}).encode())

    def cursor(self) -> tuple[int, bool]:
        """What `move_cursor` said last; (0, False) before."""
        content = self.storage.read(_CURSOR)
        if content is None:
            return 0, False
        value = read_json(content, _CURSOR, shard=int, done=bool)
        return value["shard"], value["done"]

    def delete_before(self, shard: int) -> int:
        """Removes shards with a smaller number (the account first, so that half a shard never counts); how many."""
        numbers = {self._number(name) for name in self.storage.names("unit-")}
        gone = sorted(number for number in numbers if number < shard)
        for number in gone:
            for suffix in (".json", SUFFIX, ".lease"):
                self.storage.delete(_unit(number) + suffix)
        return len(gone)

    def account(self, number: int) -> dict[str, Any] | None:
        """The account of a whole shard, None where there is none yet. Raises DataError where its file is not what the
        account says."""
        content = self.storage.read(_unit(number) + ".json")
        if content is None:
            return None
        account = read_json(
            content, f"{_unit(number)}.json", file=str, bytes=int, shard=int, batches=list, sha256=str, producer=str
        )
        name = _unit(number) + SUFFIX
        size = self.storage.size(name) if self.storage.exists(name) else None
        if size != account["bytes"]:
            action = f"delete {_unit(number)}.json: a producer makes it again"
            raise DataError(problem(f"features.path ({name})", f"{size} bytes", f"{account['bytes']}", action))
        return account

    # the producers' side

    def missing(self, total: int | None) -> tuple[list[int], bool]:
        """Shards that are wanted now and not there, in order; and whether nothing will be wanted any more.

        Args:
          total: shards of the whole run, None where only time limits it.
        """
        start, done = self.cursor()
        end = start + self.limit if total is None else min(start + self.limit, total)
        wanted = [] if done else [number for number in range(start, end) if not self.has(number)]
        return wanted, done or (total is not None and end >= total and not wanted)

    def has(self, number: int) -> bool:
        """Whether the shard is there, whole."""
        return self.storage.exists(_unit(number) + ".json")

    def claim(self, number: int) -> bool:
        """Takes the lease of a shard; False where another producer holds it. The lease of a process that is gone is
        free."""
        name = _unit(number) + ".lease"
        mine = json.dumps({"producer": self.name, "host": socket.gethostname(), "pid": os.getpid()}).encode()
        if self.storage.create(name, mine):
            return True
        seen = self.storage.read(name)
        if seen is None or not self._is_free(name, seen):
            return False
        taken = self.storage.take(name)
        if taken is not None and taken != seen:  # somebody was faster, and this is the new owner's lease
            self.storage.create(name, taken)
            return False
        return self.storage.create(name, mine)

    def keep(self, number: int) -> None:
        """Makes the lease young."""
        self.storage.touch(_unit(number) + ".lease")

    def release(self, number: int) -> None:
        """Gives the lease back."""
        self.storage.delete(_unit(number) + ".lease")

    def commit(self, number: int, write: Any) -> None:
        """Makes shard `number` there: `write(name)` writes its file, whole, and gives its account; the account makes it
        count. One that the trainer has moved past in the meantime is removed."""
        account = write(_unit(number) + SUFFIX)
        each = self.about["shard_batches"]
        account |= {"shard": number, "batches": [number * each, (number + 1) * each - 1], "producer": self.name}
        self.storage.write(_unit(number) + ".json", (json.dumps(account) + "\n").encode())
        self.release(number)
        start, done = self.cursor()
        if done or number < start:
            self.delete_before(start)

    def sweep(self) -> None:
        """Deletes what dead writers left unfinished."""
        self.storage.sweep(10 * self._lease_seconds)

    def _is_free(self, name: str, content: bytes) -> bool:
        age = self.storage.age(name)
        if age is None or age > self._lease_seconds:
            return True
        try:
            holder = json.loads(content)
            return holder["host"] == socket.gethostname() and not _alive(int(holder["pid"]))
        except (ValueError, KeyError, TypeError):
            return False

    @staticmethod
    def _number(name: str) -> int:
        return int(name.removeprefix("unit-").partition(".")[0])


def _unit(number: int) -> str:
    return f"unit-{number:08d}"


def _alive(pid: int) -> bool:
    """Whether a process of this machine is there; where that cannot be asked without harm it counts as there."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
