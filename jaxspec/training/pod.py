"""Several processes that train as one: who writes, and how all of them agree to stop.

Every process runs the same command and reads the same data; each keeps its devices' share. Process 0 writes the run
directory, which all of them see (checkpoints are written by all, through orbax).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.config import TrainMeshSection
from jaxspec.errors import ConfigError, problem

__all__ = ["agreed", "any_of", "chief", "gathered", "join", "together"]


def join(mesh: TrainMeshSection) -> None:
    """Connects this process with the others of `mesh.num_processes`; before anything else touches a device.

    On Cloud TPU, Slurm and Kubernetes `mesh.coordinator=auto` finds them. Raises ConfigError where it does not.
    """
    if mesh.coordinator is None:
        return
    if jax.distributed.is_initialized():
        return
    named: dict[str, Any] = {}
    if mesh.coordinator != "auto":
        named = {
            "coordinator_address": mesh.coordinator,
            "num_processes": mesh.num_processes,
            "process_id": mesh.process_id,
        }
    try:
        jax.distributed.initialize(**named)
    except (ValueError, RuntimeError) as error:
        found = f"{mesh.coordinator} ({' '.join(str(error).split())[:200]})"
        expected = "host:port of process 0 with mesh.num_processes and mesh.process_id, or a cluster that auto knows"
        raise ConfigError(problem("mesh.coordinator", found, expected)) from error


def chief() -> bool:
    """Whether this process writes what one process writes."""
    return jax.process_index() == 0


def together(what: str) -> None:
    """Returns once every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def agreed(stop: bool, seconds: float) -> tuple[bool, float]:
    """Whether any process was asked to stop, and the longest of their times: all of them decide alike."""
    if jax.process_count() == 1:
        return stop, seconds
    said = multihost_utils.process_allgather(np.array([float(stop), seconds], np.float32))
    return bool(said[:, 0].any()), float(said[:, 1].max())


def any_of(flag: bool) -> bool:
    """Whether it is true of any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array([flag])).any())


def gathered(tree: Any) -> Any:
    """The whole tree on the host, whichever devices hold it."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(
        lambda leaf: np.asarray(
            leaf if leaf.is_fully_replicated else multihost_utils.process_allgather(leaf, tiled=True)
        ),
        tree,
    )
