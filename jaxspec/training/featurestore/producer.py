"""`jaxspec capture --spool DIR`: makes the shards that a trainer will want, and waits while enough are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxspec.training.featurestore.capture import Encoder
from jaxspec.training.featurestore.shards import write_shard
from jaxspec.training.featurestore.spool import Spool
from jaxspec.training.pipeline import Batches

__all__ = ["batch_examples", "produce"]

_POLL_SECONDS = 0.1


def produce(
    spool: Spool,
    batches: Batches,
    make: Callable[[], Encoder],
    *,
    total: int | None,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Makes shards until all of a run's are made, the trainer says that its run has ended, or `stop`; how many.

    Several producers share the work: each takes the first shard that is wanted, not there and not claimed.

    Args:
      batches: the run's own sequence, without features.
      make: gives the encoder; called once, before the first shard is claimed.
      total: shards of the run; None where only time limits it.
      pause: sleeps.
    """
    made, encoder, told = 0, None, False
    spool.sweep()
    while not stop():
        wanted, over = spool.missing(total)
        if over:
            say("the run has ended" if spool.cursor()[1] else "nothing more is wanted: every shard of the run was made")
            break
        encoder = encoder or make()
        claimed = next((number for number in wanted if spool.claim(number)), None)
        if claimed is None:
            if not wanted and not told:
                say(f"the spool is full ({spool.limit} shards); waiting for the trainer")
            told = not wanted
            pause(_POLL_SECONDS)
            continue
        told = False
        if spool.has(claimed):  # made between the look and the claim
            spool.release(claimed)
            continue
        if not _make(spool, claimed, batches, encoder, stop):
            break
        made += 1
    return made


def _make(spool: Spool, number: int, batches: Batches, encoder: Encoder, stop: Callable[[], bool]) -> bool:
    """One shard; False where `stop` said so, and then nothing of it is left."""
    first, count = number * spool.about["shard_batches"], spool.about["shard_batches"]

    def records() -> Iterator[bytes]:
        for batch in range(first, first + count):
            if stop():
                raise _Stopped
            spool.keep(number)
            yield from (content for content, *_ in encoder.records(batch_examples(batches, batch)))

    try:
        spool.commit(number, lambda name: write_shard(spool.storage, name, records()))
    except _Stopped:
        spool.release(number)
        return False
    return True


def batch_examples(batches: Batches, index: int) -> list[dict[str, Any]]:
    """The examples of micro-batch `index` of the run. `batches` gives one micro-batch at a time (accumulation 1)."""
    batches.set_state({**batches.get_state(), "next_index": index})
    host: dict[str, np.ndarray] = next(batches)
    found = []
    for row, length in enumerate(host["lengths"][0]):
        example = {name: host[name][0, row, :length] for name in ("input_ids", "loss_mask")}
        found.append({**example, "example_id": int(host["example_ids"][0, row])})
    return found


class _Stopped(Exception):
    """A signal arrived in the middle of a shard."""
