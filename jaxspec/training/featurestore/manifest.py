"""What feature files say of themselves, and whether a run may read them.

A manifest names target, taps, norm, dtype, tokenizer, template and data. A run makes the same description of what it
would capture itself; every field that differs is an error at its start.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.target import Target
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.config import TrainConfig
from jaxspec.errors import DataError, problem
from jaxspec.training.data import Examples
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.packed import packed_about, vocabulary_hash
from jaxspec.training.prepare import template_hash
from jaxspec.training.templates import choose

__all__ = ["CAPTURE", "MANIFEST", "check", "describe", "identity_hash", "layout_of", "read_json", "typed"]

KIND, VERSION = "jaxspec features", 1
MANIFEST, CAPTURE = "manifest.json", "capture.json"
_ORDER = "taps in this order, concatenated"
_NORM = "raw residual stream; the tap final and the teacher after the final norm"
_INFORMATIVE = ("target", "version", "kind")


def describe(config: TrainConfig, target: Target, drafter: Any, examples: Examples, seq_len: int) -> dict[str, Any]:
    """The fields that a store's manifest and a run must agree on.

    Args:
      drafter: whose taps and teacher they are.
      seq_len: S, what sequences are padded to.
    """
    width = len(drafter.taps) * target.config.hidden_size
    teacher = target.config.hidden_size if drafter.needs_teacher else 0
    Layout(width, teacher, config.features.storage)  # an impossible one is an error before the target runs
    vocabulary, template = _tokenizer(config, target, examples)
    return {
        "kind": KIND,
        "version": VERSION,
        "target": target.name,
        "revision": target.revision or target.name,
        "target_dtype": config.target.dtype,
        "taps": list(drafter.taps),
        "order": _ORDER,
        "norm": _NORM,
        "teacher": bool(teacher),
        "hidden_size": target.config.hidden_size,
        "width": width,
        "compute_dtype": config.drafter.dtype,  # the drafter's: features are rounded to it before they are stored
        "storage": config.features.storage,
        "dtype": str(Layout(width, teacher, config.features.storage).dtype),
        "vocabulary": vocabulary,
        "template": examples.template,
        "template_sha256": template,
        "data": examples.content_hash(),
        "examples": len(examples),
        "tokens": int(examples.offsets[-1]),
        "sequence_length": seq_len,
    }


def _tokenizer(config: TrainConfig, target: Target, examples: Examples) -> tuple[str | None, str | None]:
    """Hashes of vocabulary and chat template: what a token file says of itself, else the target's."""
    source = Path(config.data.path)
    if source.suffix == ".npz":
        about = packed_about(source)
        if about.get("vocabulary") is not None:
            return about["vocabulary"], about.get("template_sha256")
    if target.directory is None or not any(target.directory.glob("tokenizer*")):
        return None, None
    tokenizer = load_tokenizer(target.directory)
    spoken = None if examples.template == "none" else template_hash(tokenizer, choose(config.data.template, tokenizer))
    return vocabulary_hash(tokenizer), spoken


def layout_of(manifest: dict[str, Any]) -> Layout:
    """The records of a store with this manifest."""
    return Layout(manifest["width"], manifest["hidden_size"] if manifest["teacher"] else 0, manifest["storage"])


def check(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Whether a run that wants `wanted` may read what says `found`. A teacher that is not needed may be there.

    Raises:
      DataError: another format, or every field that differs with both values.
    """
    if found.get("kind") != KIND or found.get("version") != VERSION:
        kind = f"{found.get('kind')!r} of version {found.get('version')!r}"
        raise DataError(problem(f"features.path ({where})", kind, f"{KIND!r} of version {VERSION}", "capture again"))
    differing = [
        f"{name}: the files have {_short(found.get(name))}, the run wants {_short(value)}"
        for name, value in wanted.items()
        if name not in _INFORMATIVE and found.get(name) != value and not (name == "teacher" and not value)
    ]
    if differing:
        action = "capture them for this config, or restore what changed"
        raise DataError(problem(f"features.path ({where})", "; ".join(differing), "features of this run", action))


def read_json(content: bytes | None, where: str, **fields: type) -> dict[str, Any]:
    """A JSON object with at least these fields, of these types. Raises DataError where there is none."""
    if content is None:
        expected = "a folder that `jaxspec capture` finished, or a DeepSpec cache"
        raise DataError(problem("features.path", f"nothing at {where}", expected))
    try:
        value = json.loads(content)
    except ValueError as error:
        found, action = f"no JSON ({error})", "restore the file, or delete it"
        raise DataError(problem(f"features.path ({where})", found, "what was written", action)) from error
    if not isinstance(value, dict):
        raise DataError(problem(f"features.path ({where})", repr(value)[:60], "a JSON object"))
    return typed(value, where, **fields)


_KINDS = {int: "a whole number from 0 on", str: "text", list: "a list", bool: "true or false"}


def typed(value: Any, where: str, **fields: type) -> dict[str, Any]:
    """`value`, which is an object that has these fields, of these types, no number below zero. Raises DataError."""
    for name, kind in fields.items():
        found = value.get(name) if isinstance(value, dict) else None
        if type(found) is not kind or (isinstance(found, int) and found < 0):
            field, action = f"features.path ({where}) {name}", "restore the file, or delete it"
            raise DataError(problem(field, repr(found)[:60], _KINDS[kind], action))
    return value


def identity_hash(value: Any) -> str:
    """SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-8:]}"
