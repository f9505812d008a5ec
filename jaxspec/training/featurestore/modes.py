"""`features.mode`: where a run's batches get their features, checked before the run writes anything."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.checkpoints.target import Target
from jaxspec.config import TrainConfig
from jaxspec.training.data import Examples
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.featurestore.consumer import SpoolBatches
from jaxspec.training.featurestore.manifest import describe
from jaxspec.training.featurestore.offline import Joined, Records, open_records
from jaxspec.training.featurestore.shards import require
from jaxspec.training.featurestore.spool import Spool
from jaxspec.training.featurestore.storage import Storage
from jaxspec.training.pipeline import Batches

__all__ = ["Features", "open_features", "open_spool"]


@dataclasses.dataclass
class Features:
    """layout: of what is stored, None online; marks: what a run's fingerprint says of it."""

    config: TrainConfig
    layout: Layout | None = None
    marks: dict[str, Any] = dataclasses.field(default_factory=dict)
    records: Records | None = None
    spool: Spool | None = None
    made: Batches | None = None

    def close(self) -> None:
        """Releases what the batches hold."""
        if self.made is not None:
            self.made.close()

    def batches(self, examples: Examples, seq_len: int) -> Batches:
        """The run's batches with what its steps take."""
        self.made = self._batches(examples, seq_len)
        return self.made

    def _batches(self, examples: Examples, seq_len: int) -> Batches:
        config = self.config
        options: dict[str, Any] = {
            "seq_len": seq_len,
            "batch_size": config.optimizer.batch_size,
            "accumulation": config.optimizer.accumulation,
            "seed": config.run.seed,
            "shuffle": config.data.shuffle,
        }
        if self.spool is not None:
            return SpoolBatches(self.spool, config.features.wait_seconds, examples=examples, **options)
        if self.records is not None:
            threads = config.features.read_threads
            return Batches(Joined(examples, self.records), layout=self.layout, threads=threads, **options)
        return Batches(examples, **options)


def open_features(config: TrainConfig, target: Target, drafter: Any, examples: Examples, seq_len: int) -> Features:
    """What `config.features` names.

    Raises:
      ConfigError: a storage that the drafter's width does not allow.
      DataError: the features are not there or not this run's; the message names every field that differs.
    """
    mode = config.features.mode
    if mode == "online":
        return Features(config)
    marks = {"features.mode": mode, "features.storage": config.features.storage}
    if mode == "spool":
        spool = open_spool(config, target, drafter, examples, seq_len)
        return Features(config, spool.layout, marks, None, spool)
    wanted = describe(config, target, drafter, examples, seq_len)
    records = open_records(Storage(_path(config)), wanted, examples, config.features.verify_files)
    layout = records.layout if drafter.needs_teacher else dataclasses.replace(records.layout, teacher=0)
    return Features(config, layout, marks | {"features.content": records.mark}, records)


def open_spool(config: TrainConfig, target: Target, drafter: Any, examples: Examples, seq_len: int) -> Spool:
    """The spool of a run, made if it is not there. Raises DataError where it is another run's."""
    require()
    about = describe(config, target, drafter, examples, seq_len) | {
        "seed": config.run.seed,
        "shuffle": config.data.shuffle,
        "batch_size": config.optimizer.batch_size,
        "accumulation": config.optimizer.accumulation,
        "shard_batches": config.features.shard_batches,
    }
    features = config.features
    return Spool(Storage(_path(config)), about, features.spool_shards, features.lease_seconds)


def _path(config: TrainConfig) -> str:
    assert config.features.path is not None  # the config's own check
    return config.features.path
