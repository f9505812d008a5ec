"""Which method a checkpoint's config.json belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters import dflash, dspark
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

METHODS: dict[str, Any] = {"dflash": DFlash, "dspark": DSpark}
ARCHITECTURES: dict[str, Any] = {
    **{name: DFlash for name in dflash.ARCHITECTURES},
    dspark.SPECFORGE: DSpark,
    dspark.DEEPSPEC: DSpark,
}


def drafter_from_hf(config: Mapping[str, Any], target: ModelConfig) -> Drafter:
    """The drafter that a config.json describes. Raises ConfigError for an architecture that no method here reads."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name].from_hf(config, target)
    raise ConfigError(f"architectures: found {names}, expected one of {', '.join(ARCHITECTURES)}")
