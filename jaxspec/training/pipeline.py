"""Grain input: shuffled by seed, repeated, batched and padded to one shape, with a position that can be saved.

The position is one number, the index of the next micro-batch of the endless sequence; shuffling is a function of (seed,
epoch), so a saved position brings back exactly what would have followed, in the middle of an epoch too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.training.data import Examples
from jaxspec.training.featurestore.codec import Layout

if TYPE_CHECKING:
    from jaxspec.training.featurestore.offline import Joined

__all__ = ["BATCH_FIELDS", "Batches", "batch_shapes", "padded_length", "steps_per_epochs"]

BATCH_FIELDS = ("input_ids", "loss_mask", "example_ids", "epochs")
_PAD_TO = 8
_FOREVER = 1 << 50  # examples; exact as a float, which Grain's arithmetic needs


def padded_length(examples: Examples, max_length: int) -> int:
    """The one length S that every example is padded to: the longest example rounded up to 8, at most `max_length`."""
    return min(max_length, -(-examples.longest // _PAD_TO) * _PAD_TO)


def steps_per_epochs(num_examples: int, epochs: int, rows_per_step: int) -> int:
    """Optimizer steps that pass `epochs` times through the data; the last one may hold padding rows."""
    return math.ceil(num_examples * epochs / rows_per_step)


def batch_shapes(
    accumulation: int, batch_size: int, seq_len: int, layout: Layout | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what a step takes: BATCH_FIELDS, and the stored features of `layout`."""
    rows = (accumulation, batch_size)
    shapes = {"input_ids": (*rows, seq_len), "loss_mask": (*rows, seq_len), "example_ids": rows, "epochs": rows}
    kinds = {name: jnp.bool_ if name == "loss_mask" else jnp.int32 for name in BATCH_FIELDS}
    stored = {} if layout is None else layout.fields(seq_len)
    return {
        **{name: jax.ShapeDtypeStruct(shapes[name], kinds[name]) for name in BATCH_FIELDS},
        **{name: jax.ShapeDtypeStruct((*rows, *shape), dtype) for name, (shape, dtype) in stored.items()},
    }


class Batches:
    """Iterator over the batches of optimizer steps.

    Each is a dict of arrays: input_ids int32 [A, B, S], loss_mask bool [A, B, S], example_ids int32 [A, B], epochs
    int32 [A, B] (these are BATCH_FIELDS, what the step takes) and lengths int32 [A, B], which counts the tokens that
    are no padding. A is the number of micro-batches of a step. Padding rows (only the last batch of a finite run has
    any) repeat id 0 with an all-false mask.

    Args:
      examples: source.
      seq_len: S.
      batch_size: B, sequences of a micro-batch.
      accumulation: A.
      seed: of the shuffling.
      shuffle: False keeps the order of the file.
      epochs: None repeats for ever.
      layout: of the records that the examples bring under `record`; their arrays [A, B, ...] come with the batch.
      threads: that read ahead; 0 where rows are in memory, since they would cost more than they save.

    A batch is ready at once and nothing is kept of it: `ready`, `begin`, `trained`, `saved` and `finish` are for a
    source that is fed while it is read (`featurestore.consumer`).
    """

    def __init__(
        self,
        examples: Examples | Joined,
        *,
        seq_len: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        layout: Layout | None = None,
        threads: int = 0,
    ):
        self.fields = (*BATCH_FIELDS, *(() if layout is None else layout.fields(seq_len)))
        count = len(examples)
        source = grain.MapDataset.source(examples)
        if shuffle:
            source = source.shuffle(seed=seed)  # `repeat` gives every epoch an order of its own
        # Grain's own endless repetition overflows its length when a batch is one row
        source = source.repeat(epochs if epochs is not None else _FOREVER // count).map_with_index(
            lambda index, example: {**example, "epoch": index // count}
        )

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
            batch = _collate(rows, seq_len, batch_size, accumulation)
            if layout is not None:
                stored = layout.stack([row["record"] for row in rows], seq_len, batch_size * accumulation)
                batch |= {
                    name: array.reshape(accumulation, batch_size, *array.shape[1:]) for name, array in stored.items()
                }
            return batch

        dataset = source.batch(batch_size * accumulation, drop_remainder=False, batch_fn=collate)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        self._iterator = iter(dataset.to_iter_dataset(options))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """JSON-able position: what has been handed out so far is not handed out again."""
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that get_state gave."""
        self._iterator.set_state(state)

    def ready(self) -> bool:
        """Whether the next batch can be had now; False after a short wait."""
        return True

    def begin(self, step: int) -> None:
        """Training goes on after `step`, which a durable checkpoint holds (0: from the start)."""

    def trained(self, step: int) -> None:
        """The optimizer's steps up to `step` are done."""

    def saved(self, step: int | None) -> None:
        """A durable checkpoint covers the steps up to `step`."""

    def finish(self) -> None:
        """The run has ended; nothing more will be asked for."""

    def close(self) -> None:
        """Releases what is held."""


def _collate(rows: Sequence[dict[str, Any]], seq_len: int, batch_size: int, accumulation: int) -> dict[str, np.ndarray]:
    total = batch_size * accumulation
    ids, mask = np.zeros((total, seq_len), np.int32), np.zeros((total, seq_len), bool)
    example_ids, epochs, lengths = (np.zeros(total, np.int32) for _ in range(3))
    for place, row in enumerate(rows):
        length = min(len(row["input_ids"]), seq_len)
        ids[place, :length], mask[place, :length] = row["input_ids"][:length], row["loss_mask"][:length]
        example_ids[place], epochs[place], lengths[place] = row["example_id"], row["epoch"], length
    flat = dict(zip((*BATCH_FIELDS, "lengths"), (ids, mask, example_ids, epochs, lengths), strict=True))
    return {name: array.reshape(accumulation, batch_size, *array.shape[1:]) for name, array in flat.items()}
