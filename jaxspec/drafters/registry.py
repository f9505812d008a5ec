"""Which method a checkpoint's config.json belongs to, and which methods need none. Other packages may add to both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters import dflare, dflash, dflash2, dspark, eagle, eagle3, plugins
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflare import DFlare
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

METHODS: dict[str, Any] = {
    "dflash": DFlash,
    "dflash2": DFlash2,
    "dflare": DFlare,
    "dspark": DSpark,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "ddtree": DDTree,
    "ngram": NGram,
    "small_model": SmallModel,
}
ARCHITECTURES: dict[str, Any] = {
    **{name: DFlash for name in dflash.ARCHITECTURES},
    dflash2.ARCHITECTURE: DFlash2,
    dflare.ARCHITECTURE: DFlare,
    dspark.SPECFORGE: DSpark,
    dspark.DEEPSPEC: DSpark,
    eagle.ARCHITECTURE: Eagle,
    **{name: Eagle3 for name in eagle3.ARCHITECTURES},
}


def methods() -> dict[str, Any]:
    """Name -> class of every method, those of installed packages included."""
    return plugins.extended(METHODS, ARCHITECTURES)[0]


def drafter_from_hf(config: Mapping[str, Any], target: ModelConfig) -> Drafter:
    """The drafter that a config.json describes. Raises ConfigError for an architecture that no method reads."""
    _, known = plugins.extended(METHODS, ARCHITECTURES)
    names = config.get("architectures") or []
    for name in names:
        if name in known:
            return known[name].from_hf(config, target)
    raise ConfigError(f"architectures: found {names}, expected one of {', '.join(known)}")


def drafter_by_name(name: str, target: ModelConfig) -> Drafter | None:
    """The drafter of a method that needs no checkpoint (`ngram`), or None where the name is not one of them."""
    make = getattr(methods().get(name), "without_checkpoint", None)
    return None if make is None else make(target)
