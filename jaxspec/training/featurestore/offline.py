"""Captured features as a source of examples for Grain: random access, any number of epochs, nothing held."""

from __future__ import annotations

from typing import Any, Protocol

import grain
import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.data import Examples
from jaxspec.training.deepspec_cache import is_cache
from jaxspec.training.featurestore.cache import Cache
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.featurestore.manifest import CAPTURE, MANIFEST, check, identity_hash, layout_of, read_json, typed
from jaxspec.training.featurestore.shards import damaged, require, whole
from jaxspec.training.featurestore.storage import Storage

__all__ = ["Joined", "Records", "Shards", "open_records"]


class Records(Protocol):
    """Features by example. `mark` names their content, for the fingerprint of a run."""

    layout: Layout
    mark: str

    def record(self, example: int) -> dict[str, Any]:
        """input_ids, loss_mask and the features of an example; see `Layout`."""
        ...


class Shards:
    """A finished capture.

    Args:
      hashed: compare every file's SHA-256, not its size alone.

    Raises:
      DataError: the manifest does not fit the run, or a file is missing or not what it says.
    """

    def __init__(self, storage: Storage, manifest: dict[str, Any], wanted: dict[str, Any], hashed: bool = True):
        require()
        check(manifest, wanted, MANIFEST)
        typed(manifest, MANIFEST, shards=list, shard_examples=int, examples=int)
        self.layout = layout_of(manifest)
        self.mark = identity_hash(manifest)
        next_example = 0
        for shard in manifest["shards"]:
            typed(shard, MANIFEST, file=str, bytes=int, sha256=str, first=int, count=int)
            if shard["first"] != next_example:
                found = f"{shard['file']} from example {shard['first']} on"
                raise DataError(
                    problem(f"features.path ({MANIFEST})", found, f"example {next_example}", "capture again")
                )
            if not whole(storage, shard, hashed):
                found = "another file, or none"
                expected = f"the one of {shard['bytes']} bytes that the manifest names"
                action = "copy it again, or capture again: the same command makes it anew"
                raise DataError(problem(f"features.path ({shard['file']})", found, expected, action))
            next_example += shard["count"]
        if next_example != manifest["examples"]:
            raise DataError(problem(f"features.path ({MANIFEST})", next_example, f"{manifest['examples']} examples"))
        self._paths = [storage.local(shard["file"]) for shard in manifest["shards"]]
        self._each = manifest["shard_examples"]
        try:
            self._source = grain.sources.ArrayRecordDataSource([str(path) for path in self._paths])
            count = len(self._source)
        except (RuntimeError, ValueError) as error:
            raise damaged(storage.root, error) from error
        if count != next_example:
            raise DataError(problem("features.path", f"{count} records", f"{next_example}", "capture them again"))

    def record(self, example: int) -> dict[str, Any]:
        """See `Records`. Raises DataError for a damaged file."""
        try:
            content = self._source[example]
        except (RuntimeError, ValueError, IndexError) as error:
            raise damaged(self._paths[example // self._each], error) from error
        found = self.layout.decode(content)
        if found["example_id"] != example:
            raise DataError(problem("features.path", f"example {found['example_id']}", f"{example}", "capture again"))
        return found


class Joined:
    """Examples with their features under `record`: a random-access source for Grain.

    Reading an example raises DataError where the features are those of other tokens.
    """

    def __init__(self, examples: Examples, records: Records):
        self._examples, self._records = examples, records

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._examples[index]
        record = self._records.record(int(index))
        same_tokens(example, record)
        return {**example, "record": record}


def same_tokens(example: dict[str, Any], record: dict[str, Any]) -> None:
    """Raises DataError where a record's tokens are not the example's."""
    if not np.array_equal(example["input_ids"], record["input_ids"]):
        raise DataError(
            problem(
                f"features.path (example {example['example_id']})",
                "features of other tokens",
                "those of data.path",
                "capture them for this data",
            )
        )


def open_records(storage: Storage, wanted: dict[str, Any], examples: Examples, hashed: bool = True) -> Records:
    """The features of `features.path`: our own, or DeepSpec's cache.

    Args:
      wanted: `manifest.describe` of the run.
      hashed: see `Shards`.

    Raises:
      DataError: there are none, the capture is not finished, or they do not fit the run.
    """
    content = storage.read(MANIFEST)
    if content is None and storage.exists(CAPTURE):
        raise DataError(
            problem(
                f"features.path {storage}",
                "a capture that is not finished",
                f"{MANIFEST}",
                "give the same `jaxspec capture` command again: it goes on",
            )
        )
    manifest = read_json(content, f"{storage}/{MANIFEST}")
    if is_cache(manifest):
        return Cache(storage, manifest, wanted, examples)
    return Shards(storage, manifest, wanted, hashed)
