"""`jaxspec capture`: the target's forward over the data, written as shards and a manifest.

Shard j holds the examples [j*n, (j+1)*n) of the data in its order. A shard appears whole with a small JSON beside it;
the manifest comes last and takes these up. A kill at any moment costs the shard that was being made, and the same
command goes on with it; the bytes are those of a capture that nothing disturbed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError, DataError, ResumeError, problem
from jaxspec.models.decoder import Decoder
from jaxspec.parallel.training import BATCH
from jaxspec.training.data import Examples
from jaxspec.training.features import capture
from jaxspec.training.featurestore.codec import Layout, encode_rows
from jaxspec.training.featurestore.manifest import CAPTURE, MANIFEST, layout_of, read_json, typed
from jaxspec.training.featurestore.shards import SUFFIX, file_bytes, require, whole, write_shard
from jaxspec.training.featurestore.storage import Storage
from jaxspec.training.fingerprint import changes
from jaxspec.training.state import Placement

__all__ = ["Encoder", "capture_shards", "check_room", "estimate", "shard_name"]

GIB = 1 << 30
_ENTRY: dict[str, type] = {"file": str, "bytes": int, "sha256": str, "first": int, "count": int}
_MARGIN = 64 << 20  # bytes that a disk must keep


class Encoder:
    """The compiled forward: padded sequences in, the arrays of records out.

    Args:
      params: of the part of the target that is needed, layers stacked, placed.
      rows: B, sequences of a call.
      dtype: the drafter's compute dtype, to which features are cast before they are stored, as the trainer does.
    """

    def __init__(
        self, model: Decoder, drafter: Any, params: Any, layout: Layout, placement: Placement, rows: int, seq_len: int,
        dtype: Any,
    ):  # fmt: skip
        self.layout, self.rows, self.seq_len = layout, rows, seq_len
        self._params = params
        self._place = NamedSharding(placement.mesh, PartitionSpec(BATCH))

        def forward(params: Any, ids: jax.Array) -> dict[str, jax.Array]:
            features, teacher = capture(model, drafter, params, ids, dtype)
            return encode_rows(features, teacher, layout.storage)

        ids = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32, sharding=self._place)
        with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
            self._forward = jax.jit(forward, out_shardings=placement.replicated).lower(params, ids).compile()

    def records(self, examples: list[dict[str, Any]]) -> Iterator[tuple[bytes, float, float]]:
        """(record, squared error, squared value) of at most B examples, each a dict of input_ids, loss_mask and
        example_id; the last two numbers are 0 unless the storage is int8."""
        ids = np.zeros((self.rows, self.seq_len), np.int32)
        for place, example in enumerate(examples):
            length = min(len(example["input_ids"]), self.seq_len)
            ids[place, :length] = example["input_ids"][:length]
        made = jax.device_get(self._forward(self._params, jax.device_put(ids, self._place)))
        for place, example in enumerate(examples):
            length = min(len(example["input_ids"]), self.seq_len)
            arrays = {name: array[place] if name == "first" else array[place, :length] for name, array in made.items()}
            arrays |= {name: example[name][:length] for name in ("input_ids", "loss_mask")}
            error, energy = (float(arrays[name][1:].sum()) if name in arrays else 0.0 for name in ("error", "energy"))
            yield self.layout.encode(example["example_id"], arrays), error, energy


def shard_name(number: int) -> str:
    """File of shard `number`."""
    return f"shard-{number:06d}{SUFFIX}"


def estimate(layout: Layout, examples: Examples, shard_examples: int) -> list[int]:
    """Upper bound of each shard's bytes."""
    lengths = np.diff(examples.offsets)
    return [
        file_bytes(layout.record_bytes(int(length)) for length in lengths[start : start + shard_examples])
        for start in range(0, len(lengths), shard_examples)
    ]


def check_room(storage: Storage, needed: int, what: str, action: str) -> None:
    """Raises ConfigError where the disk has less room than `needed` bytes."""
    free = storage.free()
    if needed + _MARGIN > free:
        raise ConfigError(
            problem(
                f"features.path {storage}",
                f"{free / GIB:.3g} GiB free",
                f"{needed / GIB:.3g} GiB for {what}",
                action,
            )
        )


def capture_shards(
    storage: Storage,
    about: dict[str, Any],
    examples: Examples,
    make: Callable[[], Encoder],
    *,
    shard_examples: int,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any] | None:
    """Writes the shards that are missing and then the manifest, which is returned; None where `stop` said so before.

    Args:
      about: see `manifest.describe`.
      make: gives the encoder; called when there is something to do.
      say: prints the size before anything is written.
      watch: called with (examples done, examples).

    Raises:
      ConfigError: the disk has not enough room; nothing was written.
      ResumeError: the folder holds features of something else.
      DataError: it cannot be written, another capture writes there, or a feature is no number.
    """
    require()
    storage.check_ours((MANIFEST, CAPTURE), "a folder of jaxspec capture")
    record = about | {"shard_examples": shard_examples}
    finished = storage.read(MANIFEST)
    if finished is not None:
        manifest = read_json(finished, MANIFEST, shards=list, examples=int)
        _same({name: value for name, value in manifest.items() if name != "shards"}, record, storage)
        if _reopened(storage, manifest, say) is None:
            say(f"{storage} is complete: {len(manifest['shards'])} shards, {manifest['examples']} examples")
            return manifest
    sizes = estimate(layout_of(about), examples, shard_examples)
    if (earlier := storage.read(CAPTURE)) is not None:
        _same(read_json(earlier, CAPTURE), record, storage)
    there = [_there(storage, number) for number in range(len(sizes))]
    missing = sum(size for size, entry in zip(sizes, there, strict=True) if entry is None)
    share = f", {storage.free() / GIB:.3g} GiB free"
    say(
        f"features: {len(examples)} examples, {about['tokens']} tokens, {about['width']} channels"
        f"{' and the teacher' if about['teacher'] else ''} in {about['storage']}: {sum(sizes) / GIB:.3g} GiB in "
        f"{len(sizes)} shards, {missing / GIB:.3g} GiB of it missing{share}"
    )
    action = "set features.storage=int8, use less data or another disk, or train with features.mode=online"
    check_room(storage, missing, f"{about['tokens']} tokens", action)
    with storage.locked("capture", "capture"):
        storage.sweep()
        storage.write(CAPTURE, _text(record))
        encoder = make() if None in there else None
        for number, entry in enumerate(there):
            if entry is None:
                assert encoder is not None
                part = range(number * shard_examples, min((number + 1) * shard_examples, len(examples)))
                entry = _shard(storage, number, part, examples, encoder, stop)
                if entry is None:
                    say(f"stopped after {number} of {len(there)} shards; the same command goes on")
                    return None
                there[number] = entry
            watch(entry["first"] + entry["count"], len(examples))
        manifest = record | {"shards": there}
        storage.write(MANIFEST, _text(manifest))
        for number in range(len(there)):
            storage.delete(_side(number))
        storage.delete(CAPTURE)
    return manifest


def _shard(
    storage: Storage, number: int, part: range, examples: Examples, encoder: Encoder, stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """One shard with its account; None where `stop` said so, and then nothing of it is left."""
    error = energy = 0.0

    def records() -> Iterator[bytes]:
        nonlocal error, energy
        for start in range(part.start, part.stop, encoder.rows):
            if stop():
                raise _Stopped
            rows = [examples[index] for index in range(start, min(start + encoder.rows, part.stop))]
            for content, lost, squared in encoder.records(rows):
                error, energy = error + lost, energy + squared
                yield content

    try:
        entry = write_shard(storage, shard_name(number), records())
    except _Stopped:
        return None
    entry |= {"first": part.start, "count": len(part)}
    if energy:
        entry["relative_error"] = round(math.sqrt(error / energy), 6)
    storage.write(_side(number), _text(entry))
    return entry


class _Stopped(Exception):
    """A signal arrived in the middle of a shard."""


def _side(number: int) -> str:
    return f"shard-{number:06d}.json"


def _there(storage: Storage, number: int) -> dict[str, Any] | None:
    """The account of a complete shard; one whose file is gone or has another size counts as missing."""
    content = storage.read(_side(number))
    if content is None:
        return None
    try:
        entry = read_json(content, _side(number), **_ENTRY)
    except DataError:
        return None
    return entry if whole(storage, entry, hashed=False) else None


def _reopened(storage: Storage, manifest: dict[str, Any], say: Callable[[str], None]) -> int | None:
    """Where files of a finished capture are missing or damaged, it is one that is not finished: how many; else None."""
    entries = [typed(entry, MANIFEST, **_ENTRY) for entry in manifest["shards"]]
    lost = {number for number, entry in enumerate(entries) if not whole(storage, entry)}
    if not lost:
        return None
    say(f"{storage}: {len(lost)} of {len(entries)} shards are missing or damaged and are made again")
    with storage.locked("capture", "capture"):
        for number, entry in enumerate(entries):
            if number not in lost:
                storage.write(_side(number), _text(entry))
        storage.write(CAPTURE, _text({name: value for name, value in manifest.items() if name != "shards"}))
        storage.delete(MANIFEST)
    return len(lost)


def _same(stored: dict[str, Any], record: dict[str, Any], storage: Storage) -> None:
    if differing := changes(stored, json.loads(json.dumps(record))):
        raise ResumeError(
            f"features.path {storage}: cannot go on, since this changed: {differing}; restore it, or choose another "
            "features.path"
        )


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
