"""Typed reads from a config.json: the value, or one ConfigError that names the key, what was found and what fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError


def wrong(key: str, found: Any, expected: str) -> ConfigError:
    """The error."""
    return ConfigError(f"{key}: found {found!r}, expected {expected} in config.json")


def integer(key: str, value: Any, least: int = 1) -> int:
    """A whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(key, value, "a positive integer" if least == 1 else f"an integer of at least {least}")
    return value


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; absent or null takes the default."""
    value = config.get(key)
    return integer(key, default if value is None else value)


def positive(key: str, value: Any) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise wrong(key, value, "a positive number")
    return float(value)


def optional_positive(key: str, value: Any) -> float | None:
    """The same, or null."""
    return None if value is None else positive(key, value)


def token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Null, one id, or a list of them."""
    listed = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(integer(key, one, least=0) for one in listed)


def mapping(key: str, value: Any) -> dict[str, Any]:
    """An object; null is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise wrong(key, value, "an object")
    return dict(value or {})


def listing(key: str, value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, (list, tuple)):
        raise wrong(key, value, "a list")
    return list(value)


def flag(key: str, value: Any) -> bool | None:
    """true, false or null."""
    if value is not None and not isinstance(value, bool):
        raise wrong(key, value, "true, false or null")
    return value
