"""Help text from the types: what a key expects, its default and its meaning."""

from __future__ import annotations

import argparse
import types
import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from jaxspec.config.schema import Section, default_of, section_of

_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}
_SHORT: dict[Any, str] = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null"}
_LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _type_text(annotation: Any, names: dict[Any, str], joiner: str) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return joiner.join(_type_text(arg, names, joiner) for arg in args)
    if origin is Literal:
        return joiner.join(str(arg) for arg in args)
    if origin is tuple:
        inner = _type_text(args[0], _SHORT, "|")
        return f"[{inner}, ...]" if names is _SHORT else f"a list of {inner}"
    return names.get(annotation, str(annotation))


def _limits(field: FieldInfo) -> str:
    parts = [
        f"{sign} {value}" if isinstance(value := getattr(rule, name), int) else f"{sign} {value:g}"
        for rule in field.metadata
        for name, sign in _LIMITS.items()
        if getattr(rule, name, None) is not None
    ]
    return " and ".join(parts)


def expected_of(field: FieldInfo) -> str:
    """What a key expects, in words: `a whole number >= 1 or null`."""
    text, limits = _type_text(field.annotation, _NAMES, " or "), _limits(field)
    if any(getattr(rule, "min_length", None) for rule in field.metadata):
        text = text.replace("a string", "a non-empty string").replace("a list", "a non-empty list")
    if not limits:
        return text
    return text.removesuffix(" or null") + f" {limits}" + (" or null" if text.endswith(" or null") else "")


def _default_text(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "shown" in extra:
        return str(extra["shown"])
    value = default_of(field)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(model: type[Section], prefix: str = "") -> str:
    """Every key of a config with type, default and meaning, one a line, for --help."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            lines += ["", f"{prefix}{name}: {(inner.__doc__ or '').strip()}", describe(inner, f"{prefix}{name}.")]
            continue
        kind, limits = _type_text(field.annotation, _SHORT, "|"), _limits(field)
        lines.append(f"  {prefix}{name}  {kind}{f' {limits}' if limits else ''}  [{_default_text(field)}]")
        lines.append(f"      {field.description}")
    return "\n".join(lines)


def add_help(parser: argparse.ArgumentParser, model: type[Section]) -> None:
    """Puts the keys of `model` under the parser's --help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"configuration keys (type, [default], meaning):\n\n{describe(model)}"
