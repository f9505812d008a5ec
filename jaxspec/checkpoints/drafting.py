"""What a user calls a drafter -> a drafter that can be served.

Three kinds: the name of a method without a checkpoint (`ngram`), a drafter's checkpoint, and a whole language model (a
folder, a GGUF file, `smollm2`), which drafts by being decoded itself.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.hub import locate
from jaxspec.checkpoints.store import TensorFolder, read_config, read_json
from jaxspec.checkpoints.target import EMBEDDING, Target, load_target
from jaxspec.drafters.options import DraftOptions, configured
from jaxspec.drafters.registry import drafter_by_name, methods
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError

__all__ = ["DraftOptions", "check_source", "open_drafter"]

_log = logging.getLogger(__name__)


def check_source(source: str | os.PathLike[str]) -> None:
    """Raises what `open_drafter` would raise for a name or path that leads nowhere; loads nothing."""
    if not _is_method(os.fspath(source)):
        locate(source, field="drafter")


def open_drafter(
    source: str | os.PathLike[str],
    target: Target,
    options: DraftOptions | None = None,
    dtype: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Draft, int | None]:
    """The draft for `target`, with `options` applied, and the `num_proposals` that is left for the engine.

    Args:
      source: a method's name that needs no checkpoint (write `./ngram` for a folder of that name), or a model as in
        `jaxspec.checkpoints.hub.locate`.
      dtype: of the weights on the device; the target's when left out.

    Raises:
      CheckpointError, HubError: see `load_drafter` and `load_target`.
      ConfigError: the drafter does not fit this target, or an option does not fit the drafter.
    """
    draft = _open(os.fspath(source), target, dtype, cache_dir)
    drafter, rest = configured(draft.drafter, options or DraftOptions())
    return dataclasses.replace(draft, drafter=drafter), rest


def _is_method(name: str) -> bool:
    return hasattr(methods().get(name), "without_checkpoint")


def _open(source: str, target: Target, dtype: Any, cache_dir: Any) -> Draft:
    if _is_method(source):
        drafter = drafter_by_name(source, target.config)
        return Draft(drafter, {}, source=source)
    path = locate(source, cache_dir, "drafter").path
    if path.is_file() or EMBEDDING in TensorFolder(path).names():
        return _small_model(source, target, dtype, cache_dir)
    return load_drafter(source, target, dtype, cache_dir)


def _small_model(source: str, target: Target, dtype: Any, cache_dir: Any) -> Draft:
    """A language model's folder: its embedding is called `model.embed_tokens`, which no drafter's is."""
    small = load_target(source, target.dtype if dtype is None else dtype, cache_dir)
    assert small.directory is not None
    raw = read_config(small.directory)
    try:
        drafter = SmallModel.from_hf(raw, target.config)
    except ConfigError as error:
        raise ConfigError(f"{small.directory / 'config.json'}: {error}") from error
    _check_tokenizers(small, target)
    if small.config.max_position < target.config.max_position:
        _log.warning(
            "drafter %s: its context ends at %d, the target's at %d; beyond it the guesses get worse, not the answers",
            small.name, small.config.max_position, target.config.max_position,
        )  # fmt: skip
    return Draft(drafter, small.params, source=small.name, config_raw=raw)


def _check_tokenizers(small: Target, target: Target) -> None:
    """Equal sizes are not equal vocabularies: where both tokenizers are at hand, every id must mean the same."""
    if small.directory is None or target.directory is None:
        return
    paths = [Path(model.directory) / "tokenizer.json" for model in (small, target) if model.directory is not None]
    if not all(path.is_file() for path in paths) or paths[0].samefile(paths[1]):
        return
    ours, theirs = (_ids(path) for path in paths)
    for token, index in theirs.items():
        if ours.get(token) != index:
            found = f"no token {token!r}" if token not in ours else f"token {token!r} with id {ours[token]}"
            raise ConfigError(
                f"{paths[0]}: found {found}, expected id {index} as in the target's tokenizer: a small model must "
                "share the target's vocabulary"
            )


def _ids(path: Path) -> Mapping[str, int]:
    raw = read_json(path, what="a tokenizer")
    vocab = (raw.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, list):  # unigram: [[token, score], …]
        vocab = {pair[0]: index for index, pair in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in raw.get("added_tokens") or []}
    return {**vocab, **added}
