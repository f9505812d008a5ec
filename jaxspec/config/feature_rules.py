"""What a training config may say of where its features come from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jaxspec.config.schema import contradiction

if TYPE_CHECKING:
    from jaxspec.config.train import TrainConfig


def check_features(config: TrainConfig) -> None:
    """Keys of `features`, and of the run that a spool needs. Raises ConfigError naming both."""
    features = config.features
    if features.mode == "online" and features.path is not None:
        raise contradiction(
            "features.mode",
            "features.path",
            "online features are stored nowhere",
            "set features.mode=offline or spool, or leave features.path out",
        )
    if features.mode != "online" and features.path is None:
        raise contradiction(
            "features.mode", "features.path", f"{features.mode} features need a folder", "set features.path"
        )
    if features.path is not None and os.path.abspath(features.path) == os.path.abspath(config.run.directory):
        raise contradiction(
            "features.path", "run.directory", "both are one folder", "give the features a folder of their own"
        )
    if features.mode == "spool":
        _check_spool(config)


def _check_spool(config: TrainConfig) -> None:
    """Files leave a spool once a checkpoint covers their steps: it must hold what lies between two checkpoints."""
    features, every = config.features, config.run.checkpoint_every
    if not every:
        raise contradiction(
            "features.mode",
            "run.checkpoint_every",
            "files leave a spool once a checkpoint covers their steps, and there is none before the end",
            "set run.checkpoint_every to at least 1",
        )
    batches = every * config.optimizer.accumulation
    least = -(-(batches - 1) // features.shard_batches) + 1
    if features.spool_shards < least:
        raise contradiction(
            "features.spool_shards",
            "run.checkpoint_every",
            f"{features.spool_shards} files of {features.shard_batches} micro-batches are fewer than the {batches} "
            "micro-batches between two checkpoints, so the trainer would wait for ever",
            f"set features.spool_shards to at least {least}, or save more often",
        )
