"""Methods from other packages: entry points of the group `jaxspec.drafters`, name = method, value = the drafter's
class.

The class offers the drafter protocol and, as class attributes, `ARCHITECTURES` (names in a config.json's
`architectures` that it reads with its classmethod `from_hf(config, target)`) or a classmethod
`without_checkpoint(target)`, or both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from jaxspec.errors import ConfigError

GROUP = "jaxspec.drafters"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A method, its class and the package that it came with."""

    method: str
    package: str
    drafter: Any

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names that it reads."""
        return tuple(getattr(self.drafter, "ARCHITECTURES", ()))


@functools.cache
def installed() -> tuple[Plugin, ...]:
    """The plug-ins of this environment, imported once. Raises ConfigError naming the package of one that is broken."""
    return tuple(_load(entry) for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name))


def extended(
    methods: Mapping[str, Any], architectures: Mapping[str, Any], plugins: Iterable[Plugin] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both tables with the plug-ins' entries added. Raises ConfigError where a name is taken already."""
    methods, architectures = dict(methods), dict(architectures)
    owners: dict[tuple[str, str], str] = {}
    for plugin in installed() if plugins is None else plugins:
        for what, table, names in (
            ("method", methods, (plugin.method,)),
            ("architecture", architectures, plugin.architectures),
        ):
            for name in names:
                if name in table:
                    owner = owners.get((what, name))
                    raise ConfigError(
                        f"{GROUP}: package {plugin.package} adds {what} {name!r}, which "
                        f"{'jaxspec itself has' if owner is None else f'package {owner} adds too'}; expected another "
                        f"name: rename it there, or uninstall {plugin.package}"
                    )
                table[name] = plugin.drafter
                owners[what, name] = plugin.package
    return methods, architectures


def _load(entry: metadata.EntryPoint) -> Plugin:
    package = entry.dist.name if entry.dist is not None else entry.value.partition(":")[0]
    where = f"{GROUP}: package {package}, method {entry.name!r}"
    try:
        drafter = entry.load()
    except Exception as error:  # whatever a stranger's module raises while it is imported
        raise ConfigError(
            f"{where}: {entry.value} cannot be imported ({type(error).__name__}: {error}); mend or uninstall {package}"
        ) from error
    plugin = Plugin(entry.name, package, drafter)
    if not plugin.architectures and not callable(getattr(drafter, "without_checkpoint", None)):
        raise ConfigError(
            f"{where}: {entry.value} has neither ARCHITECTURES nor without_checkpoint, expected one of them; mend or "
            f"uninstall {package}"
        )
    if plugin.architectures and not callable(getattr(drafter, "from_hf", None)):
        raise ConfigError(
            f"{where}: {entry.value} has no from_hf, expected the classmethod that reads {plugin.architectures[0]}; "
            f"mend or uninstall {package}"
        )
    name = getattr(drafter, "method", entry.name)
    if isinstance(name, str) and name != entry.name:
        raise ConfigError(f"{where}: its class calls itself {name!r}, expected the name of the entry point")
    return plugin
