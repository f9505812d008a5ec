"""What every section of a config has in common, and the walk over its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from jaxspec.errors import ConfigError

MAX_LAYERS = 1000  # of a drafter
MAX_BLOCK = 1024  # rows of a draft block
MAX_CONTEXT = 2**24  # tokens of a request
MAX_CHUNK = 2**20  # prompt rows of a round
MAX_SLOTS = 2**16
FORMAT_VERSION = 1
LARGEST = 2**31 - 1  # of a whole number


class Section(BaseModel):
    """Frozen; no unknown keys; types as written (a string is never taken for a number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def key(default: Any, doc: str, *, shown: str | None = None, **limits: Any) -> Any:
    """A config key: its default, its one-line help and its limits (`ge`, `le`, ...).

    `shown` replaces the default in the help where the real default depends on another key.
    """
    extra: JsonDict | None = {"shown": shown} if shown is not None else None
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def required(doc: str, **limits: Any) -> Any:
    """A config key without a default."""
    return Field(description=doc, **limits)


def section_of(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def walk(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf key of a config as (dotted key, field), in the order of the schema."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from walk(inner, f"{prefix}{name}.")


def default_of(field: FieldInfo) -> Any:
    """The default value, or PydanticUndefined for a required key."""
    return PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)


def contradiction(first: str, second: str, why: str, action: str) -> ConfigError:
    """The error for two keys that cannot both hold; it names both."""
    return ConfigError(f"{first} and {second} contradict each other: {why}; {action}")
