"""A capture from its config: load, describe, estimate, write. `jaxspec capture` calls `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.target import Target
from jaxspec.config import TrainConfig
from jaxspec.errors import ConfigError, problem
from jaxspec.training.featurestore.capture import Encoder, capture_shards, check_room
from jaxspec.training.featurestore.ledger import audit, read_ledger
from jaxspec.training.featurestore.manifest import describe, layout_of
from jaxspec.training.featurestore.modes import open_spool
from jaxspec.training.featurestore.producer import produce
from jaxspec.training.featurestore.spool import LEDGER, last_shard
from jaxspec.training.featurestore.storage import Storage
from jaxspec.training.inputs import load_data, load_draft, load_stacked, needed_target, stacked
from jaxspec.training.pipeline import Batches, padded_length, steps_per_epochs
from jaxspec.training.signals import stop_requests
from jaxspec.training.state import choose

__all__ = ["run", "status"]


def run(
    config: TrainConfig,
    *,
    target: Target | None = None,
    say: Callable[[str], None] = print,
    watch: Callable[[int, int], None] = lambda done, total: None,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Any]:
    """Captures the features of a run's data into `features.path`; the same call again goes on.

    Args:
      config: as the trainer gets it; `features.mode` says whether a folder for many epochs (offline) or a spool.
      target: loaded already; loaded from `target.source` when None.
      watch: offline, called with (examples done, examples).
      devices: what `config.mesh` is made of; all that jax sees when None.

    Returns:
      {"status": "finished" or "stopped", "shards", ...}; offline also the manifest's "examples", "bytes" and, of int8,
      "relative_error"; "shards" of a spool are those that this process made.

    Raises:
      ConfigError: the mode is online, several processes, or the disk is too small; nothing was written.
      DataError, ResumeError, CheckpointError, HubError: see jaxspec.errors.
    """
    if config.features.mode == "online":
        raise ConfigError(
            problem("features.mode", "online", "offline or spool", "give --out DIR or --spool DIR, or set it")
        )
    if jax.process_count() > 1:
        raise ConfigError(problem("mesh.coordinator", "several processes", "none: start a capture for each"))
    with stop_requests() as stop:
        placement = choose(config.mesh, config.optimizer.batch_size, devices or jax.devices())
        target = target or load_stacked(config, placement)
        drafter = load_draft(config, target, say).drafter
        examples = load_data(config, target)
        say(examples.statistics.line())
        seq_len = padded_length(examples, config.data.max_length)
        about = describe(config, target, drafter, examples, seq_len)

        def make() -> Encoder:
            nonlocal target
            assert target is not None
            model, params = needed_target(stacked(target), drafter)
            placed = placement.put(params)
            target = params = None  # one copy of the weights
            rows, dtype = config.optimizer.batch_size, jnp.dtype(config.drafter.dtype)
            return Encoder(model, drafter, placed, layout_of(about), placement, rows, seq_len, dtype)

        stopped = lambda: stop.name is not None  # noqa: E731
        if config.features.mode == "spool":
            spool = open_spool(config, target, drafter, examples, seq_len)
            size = spool.limit * spool.shard_bytes()
            say(f"spool {spool.storage}: at most {spool.limit} shards, {size / 2**30:.3g} GiB")
            check_room(
                spool.storage,
                size - sum(spool.storage.size(name) for name in spool.storage.names("unit-", ".arrayrecord")),
                f"{spool.limit} shards",
                "lower features.spool_shards or features.shard_batches, or set features.storage=int8",
            )
            rows = config.optimizer.batch_size
            batches = Batches(
                examples, seq_len=seq_len, batch_size=rows, seed=config.run.seed, shuffle=config.data.shuffle
            )
            made = produce(spool, batches, make, total=_total(config, len(examples)), say=say, stop=stopped)
            return {"status": "stopped" if stopped() else "finished", "shards": made}
        storage = Storage(str(config.features.path))
        each = config.features.shard_examples
        manifest = capture_shards(
            storage, about, examples, make, shard_examples=each, say=say, stop=stopped, watch=watch
        )
        if manifest is None:
            return {"status": "stopped", "shards": 0}
        return {
            "status": "finished",
            "shards": len(manifest["shards"]),
            "examples": manifest["examples"],
            "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
            "relative_error": max((shard.get("relative_error", 0.0) for shard in manifest["shards"]), default=0.0),
        }


def _total(config: TrainConfig, examples: int) -> int | None:
    """Shards of the run; None where only time limits it."""
    rows = config.optimizer.batch_size * config.optimizer.accumulation
    limits = [config.run.steps, config.run.epochs and steps_per_epochs(examples, config.run.epochs, rows)]
    steps = min((limit for limit in limits if limit), default=None)
    if steps is None:
        return None
    return last_shard(steps, config.optimizer.accumulation, config.features.shard_batches) + 1


def status(path: str) -> dict[str, Any]:
    """What became of a spool's steps; see `ledger.audit`. Raises DataError for a broken ledger."""
    storage = Storage(path)
    return {**audit(read_ledger(storage.local(LEDGER))), "shards": len(storage.names("unit-", ".json"))}
