"""DeepSpec's cache as the features of a run: an example finds its sample by its tokens, since the order is another."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.data import Examples
from jaxspec.training.deepspec_cache import MANIFEST, Samples
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.featurestore.manifest import identity_hash
from jaxspec.training.featurestore.storage import Storage

__all__ = ["Cache"]


class Cache:
    """The features of a run's examples in a cache; see `offline.Records`.

    Raises:
      DataError: target, layers or hidden size are not the run's, an example is not there, or the cache is broken.
    """

    def __init__(self, storage: Storage, manifest: dict[str, Any], wanted: dict[str, Any], examples: Examples):
        self._samples = Samples(storage.root, manifest)
        _check(manifest, wanted)
        self.layout = Layout(self._samples.width, self._samples.hidden, "bfloat16")
        self.mark = identity_hash(manifest)
        places = {_key(ids): place for place, (ids, _) in enumerate(self._samples.rows())}
        self._places = []
        for index in range(len(examples)):
            place = places.get(_key(examples[index]["input_ids"]))
            if place is None:
                raise DataError(
                    problem(
                        f"features.path (example {index})",
                        "no sample with its tokens",
                        "features of every example",
                        "set data.path to the cache's folder, or data.max_length to the cache's",
                    )
                )
            self._places.append(place)

    def record(self, example: int) -> dict[str, Any]:
        """See `offline.Records`."""
        ids, mask = self._samples.tokens(self._places[example])
        features, teacher = self._samples.hidden_states(self._places[example], len(ids))
        return {"input_ids": ids, "loss_mask": mask, "features": features, "teacher": teacher}


def _check(manifest: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The three things that a cache says of its target, and the storage that it is. Raises DataError naming one."""
    pairs = {
        "target_layer_ids": (manifest["target_layer_ids"], wanted["taps"]),
        "hidden_size": (manifest["hidden_size"], wanted["hidden_size"]),
        "target_model_name_or_path": (
            _last(manifest["target_model_name_or_path"]),
            _last(wanted["target"]),
        ),
        "hidden_dtype (features.storage)": (manifest["hidden_dtype"], wanted["storage"]),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise DataError(
                problem(f"features.path ({MANIFEST}) {name}", f"{found}", f"{expected}, the run's", "use another cache")
            )


def _last(name: Any) -> str:
    return Path(str(name).partition("@")[0]).name.lower()


def _key(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=16).digest()
