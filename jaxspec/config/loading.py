"""From YAML text and command-line overrides to a validated config, and back to YAML."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from jaxspec.config.schema import FORMAT_VERSION, LARGEST, Section, section_of, walk
from jaxspec.config.text import expected_of
from jaxspec.errors import ConfigError

Config = TypeVar("Config", bound=Section)


class _Loader(yaml.SafeLoader):
    """Safe YAML with numbers as YAML 1.2 reads them (`6e-4` is a number) and with repeated keys refused."""


_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("float", "bool", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in _REPLACED]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        name = loader.construct_object(key_node, deep=True)
        try:
            repeated = name in result
        except TypeError:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: found a key that is no plain name") from None
        if repeated:
            raise ConfigError(f"{name}: given twice (line {key_node.start_mark.line + 1}); keep one of the two")
        result[name] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply, expected sections of keys; correct the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML{place}: {reason}; correct the file's syntax") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "nothing"
        raise ConfigError(
            f"config file {path}: found {what} there, expected a YAML file; check the path after --config"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not UTF-8 text at byte {error.start}; expected YAML") from error
    data = _parse(text, f"config file {path}")
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path}: found {_name(data)}, expected a mapping of sections")
    if "version" not in data:
        raise ConfigError(
            f"version: missing in {path}, expected {FORMAT_VERSION}; add the line `version: {FORMAT_VERSION}`"
        )
    return data


def load_config(model: type[Config], path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads `path` (None: an empty config), applies `section.key=value` overrides in order and validates.

    Raises:
        ConfigError: missing file, bad YAML, unknown key (names the nearest), wrong type or value, contradictory keys.
    """
    data = {} if path is None else _read(Path(path))
    for override in overrides:
        _apply(model, data, override)
    return build(model, data)


def build(model: type[Config], data: Mapping[str, Any]) -> Config:
    """Validates a mapping; the same errors as `load_config`."""
    version = data.get("version", FORMAT_VERSION)
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"version: found {version!r}, expected {FORMAT_VERSION}; this release reads no other config format"
        )
    # A section header with nothing under it is null in YAML; it means "all defaults".
    empty: dict[str, Any] = {
        name: {} for name, field in model.model_fields.items() if section_of(field) and data.get(name, 0) is None
    }
    try:
        config = model.model_validate({**data, **empty})
    except ValidationError as error:
        raise ConfigError("; also ".join(dict.fromkeys(_explain(model, item) for item in error.errors()))) from error
    _check_sizes(config)
    return config


def _check_sizes(section: Section, prefix: str = "") -> None:
    """Whole numbers become int32 somewhere: counters of steps, shapes, positions. A key's own limits come first."""
    for name, value in section:
        if isinstance(value, Section):
            _check_sizes(value, f"{prefix}{name}.")
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int) and not isinstance(one, bool) and one > LARGEST and name != "seed":
                raise ConfigError(f"{prefix}{name}: found {one}, expected at most {LARGEST}")


def render(config: Section) -> str:
    """The resolved config as YAML; `load_config` of it gives an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _apply(model: type[Section], data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted:
        raise ConfigError(f"override {override!r}: found no `=`, expected section.key=value, for example run.seed=7")
    *sections, leaf = dotted.split(".")
    node: Any = data
    current: type[Section] | None = model
    for name in sections:
        field = current.model_fields.get(name) if current else None
        current = section_of(field) if field else None
        if current is None:
            raise ConfigError(_unknown(model, dotted))
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(f"{name}: found {_name(node)}, expected a section (a mapping of keys)")
    field = current.model_fields.get(leaf) if current else None
    if field is None:
        raise ConfigError(_unknown(model, dotted))
    inner = section_of(field)
    if inner is not None:
        some = f"{dotted}.{next(iter(inner.model_fields))}"
        raise ConfigError(f"override {override!r}: {dotted} is a section, expected a key of it, for example {some}=...")
    value = _parse(text, f"override {override!r}")
    if value is not None and not isinstance(value, str) and str in _kinds(field.annotation):
        value = text.strip()  # a path or name that looks like a number, for example run.directory=2026
    node[leaf] = value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) or (annotation,)


def _name(value: Any) -> str:
    """The value as a reader of YAML knows it: its text and kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list | tuple):
        return f"the list {list(value)!r}"
    return repr(value)


def _unknown(model: type[Section], dotted: str) -> str:
    return f"{dotted}: unknown key; the nearest valid key is {nearest_key(model, dotted)} (--help lists all)"


def nearest_key(model: type[Section], dotted: str) -> str:
    """The valid dotted key that a wrong one most likely meant."""
    keys = [name for name, _ in walk(model)]
    section, _, leaf = dotted.rpartition(".")
    same_name = [name for name in keys if name.rpartition(".")[2] == leaf]
    if same_name:
        return difflib.get_close_matches(dotted, same_name, n=1, cutoff=0)[0]
    beside = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == section}
    for candidates, wanted in ((beside, leaf), ({name: name for name in keys}, dotted)):
        match = difflib.get_close_matches(wanted, list(candidates), n=1, cutoff=0.6)
        if match:
            return candidates[match[0]]
    leaves = {name.rpartition(".")[2]: name for name in keys}
    return leaves[difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0)[0]]


def _explain(model: type[Section], item: Any) -> str:
    """One pydantic error as: field, found, expected."""
    path = [str(part) for part in item["loc"]]
    dotted = ".".join(path)
    if item["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown(model, dotted)
    fields = dict(walk(model))
    field = next((fields[name] for end in range(len(path), 0, -1) if (name := ".".join(path[:end])) in fields), None)
    if item["type"] == "missing":
        if field is None:
            return f"{dotted}: this section is missing; add it ({_members(model, path)})"
        return f"{dotted}: missing, expected {expected_of(field)}; it has no default, so set it"
    if field is None:
        return f"{dotted or 'config'}: found {_name(item['input'])}, expected a section ({_members(model, path)})"
    name = next(".".join(path[:end]) for end in range(len(path), 0, -1) if ".".join(path[:end]) in fields)
    return f"{name}: found {_name(item['input'])}, expected {expected_of(field)}"


def _members(model: type[Section], path: list[str]) -> str:
    current: type[Section] | None = model
    for name in path:
        field = current.model_fields.get(name) if current else None
        current = section_of(field) if field else None
    if current is None:
        return "see --help"
    needed = [name for name, field in current.model_fields.items() if field.is_required()]
    return "it needs " + ", ".join(needed) if needed else "keys: " + ", ".join(current.model_fields)
