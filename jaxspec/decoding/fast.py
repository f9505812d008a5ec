"""What makes a round fast on the device at hand, chosen once, at start-up: kernels, packed weights, bare rounds."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from jaxspec.errors import ConfigError, problem

ATTENTIONS = ("auto", "reference", "gpu", "tpu")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Fast:
    """`attention` reads the pages: the gathering reference, or a kernel of `pallas_kernels.verify_attention`. `packed`
    joins a target layer's projections at load. `bare` compiles every shape once more without what waits behind a
    condition. `recycle` writes reports over those that were read: CUDA graphs want their buffers where they were."""

    attention: str = "reference"
    packed: bool = False
    bare: bool = False
    recycle: bool = False

    @classmethod
    def on(cls, device: Any, attention: str = "auto", packed: bool | None = None, bare: bool | None = None) -> Fast:
        """The choice for a device; None is what pays there. Logs what `auto` chose.

        Raises ConfigError for an attention that does not exist, or cannot run on the device.
        """
        gpu = device.platform == "gpu"
        return cls(
            _attention(attention, device),
            gpu if packed is None else packed,
            gpu if bare is None else bare,
            recycle=gpu,
        )


def _attention(asked: str, device: Any) -> str:
    if asked not in ATTENTIONS:
        raise ConfigError(problem("engine.attention", asked, f"one of {', '.join(ATTENTIONS)}"))
    if asked == "auto":
        chosen = "gpu" if _why_not("gpu", device) is None else "reference"
        log.info("engine.attention: auto chose %s on %s", chosen, device.device_kind)
        return chosen
    reason = _why_not(asked, device)
    if reason is not None:
        raise ConfigError(problem("engine.attention", asked, f"auto or reference: {reason}"))
    return asked


def _why_not(name: str, device: Any) -> str | None:
    """What a device lacks for a kernel, or None."""
    if name == "reference":
        return None
    if device.platform != name:
        return f"this is a {device.platform.upper()} ({device.device_kind})"
    capability = getattr(device, "compute_capability", None)
    if name == "gpu" and (capability is None or float(capability) < 8.0):
        return f"the kernel needs compute capability 8.0, {device.device_kind} has {capability}"
    return None


def with_attention(drafter: Any, name: str) -> Any:
    """The drafter, its own block reading its context by the same kernel where it knows how to."""
    if dataclasses.is_dataclass(getattr(drafter, "inner", None)):
        return dataclasses.replace(drafter, inner=with_attention(drafter.inner, name))
    return dataclasses.replace(drafter, attention=name) if hasattr(drafter, "attention") else drafter
