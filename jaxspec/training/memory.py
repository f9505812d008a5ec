"""Out of memory, at load, at compile or in a step: what lies where, and the one setting to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxspec.config import TrainConfig
from jaxspec.errors import JaxspecError, problem
from jaxspec.training import plan
from jaxspec.training.state import Placement

__all__ = ["OutOfMemory", "answered", "while_loading"]

_MARK = "RESOURCE_EXHAUSTED"


class OutOfMemory(JaxspecError):
    """A device has not the memory that the run needs."""


@contextlib.contextmanager
def answered(
    config: TrainConfig,
    state: Any,
    frozen: Any,
    placement: Placement,
    say: Callable[[str], None],
    compiled: Any = None,
) -> Iterator[None]:
    """Around compiling or running the step: where the device runs out of memory, `say` gets the plan's table of this
    very program and OutOfMemory names the setting. Every other error passes as it is.

    Args:
      state, frozen: abstract or not; only shapes and dtypes are read.
      compiled: the executable, None while there is none.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _MARK not in str(error):
            raise
        device = placement.mesh.devices.flat[0]
        found = plan.account(compiled, state, frozen, placement, _limit(device))
        setting = plan.advice(config, None if compiled is None else found, len(jax.devices()))
        say(f"out of memory on {placement}; what the step needs of each device:")
        shown = [line for line in plan.lines(found, config) if line.startswith(("parameters", "moments", "arguments"))]
        for line in shown[: 2 if compiled is None else None]:
            say(f"  {line}")
        say(f"  total {_gib(found.total)}{_of(found.hbm)}; to change first: {setting}")
        where = "compiling the step" if compiled is None else "running the step"
        raise OutOfMemory(
            problem(
                f"memory of {device.device_kind}",
                f"too little while {where} ({_words(error)})",
                f"{_gib(found.total)} a device{'' if compiled is not None else ' besides the temporaries'}",
                f"set {setting}; the run goes on from its last checkpoint where the key may change",
            )
        ) from error


@contextlib.contextmanager
def while_loading(config: TrainConfig) -> Iterator[None]:
    """Around placing the target: OutOfMemory with the key that splits it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _MARK not in str(error):
            raise
        setting = f"mesh.fsdp={2 * config.mesh.fsdp}"
        if 2 * config.mesh.fsdp * config.mesh.tensor > len(jax.devices()) and config.target.quantization is None:
            setting = "target.quantization=int8"
        field, action = f"target.source {config.target.source}", f"set {setting}"
        found = f"more than a device holds ({_words(error)})"
        raise OutOfMemory(problem(field, found, "the target's weights on their devices", action)) from error


def _limit(device: jax.Device) -> int:
    """Bytes that a device has for arrays, 0 where it does not say."""
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _gib(size: int) -> str:
    return f"{size / plan.GIB:.2f} GiB"


def _of(limit: int) -> str:
    return f" of {_gib(limit)}" if limit else ""


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
