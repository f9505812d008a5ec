"""From one public layout of a drafter to another: names, config keys, and whether embedding and head lie inside.

Weights are copied byte for byte. What a layout cannot express is refused with the reason, and what was written is
looked at again before it counts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints import speculators
from jaxspec.checkpoints.drafter import EMBEDDING, HEAD, check_export_folder, weights_dtype
from jaxspec.checkpoints.inspection import Inspection, inspect, target_config
from jaxspec.checkpoints.store import TensorFolder, read_config, write_folder
from jaxspec.checkpoints.target import EMBEDDING as MODEL_EMBEDDING
from jaxspec.checkpoints.target import HEAD as MODEL_HEAD
from jaxspec.drafters import dflash, dspark
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig

__all__ = ["LAYOUTS", "convert"]

TABLES = (EMBEDDING, HEAD)


@dataclasses.dataclass(frozen=True)
class Written:
    """config.json, tensors that are renamed (ours -> theirs), and what becomes of the tables beside the drafter's own
    parameters: "drop" (the layout shares the target's), "write" (it carries copies) or "keep"."""

    config: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: str = "drop"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str],
) -> Inspection:
    """Writes the drafter of `source`, made for `target`, to the folder `out` in layout `to`; returns a look at it.

    Raises ConfigError for what the layout cannot express and for drafters that do not fit the target, CheckpointError
    where tensors are missing or left over in the source.
    """
    if to not in LAYOUTS:
        raise ConfigError(f"--to: found {to!r}, expected one of {', '.join(LAYOUTS)}")
    check_export_folder(out)
    model, directory = target_config(target)
    found = inspect(source, model)
    _check_whole(found)
    if found.directory.resolve() == Path(out).resolve():
        raise ConfigError(f"--out: found {out}, the drafter that is converted, expected another folder")
    try:
        written = LAYOUTS[to](found, model, os.fspath(target), directory)
    except ConfigError as error:
        raise ConfigError(
            f"{found.directory}: layout {to} cannot express this {found.drafter.method} drafter: {error}"
        ) from error
    tensors = _tensors(found, written, _Tables(directory, model), to)
    config = dict(written.config)
    config["dtype"] = weights_dtype(tensors)
    path = write_folder(out, tensors, config)
    again = inspect(path, model)
    _check_whole(again)
    return again


def _check_whole(found: Inspection) -> None:
    if not found.whole:
        parts = [
            f"{what}: {', '.join(names)}"
            for what, names in (
                ("missing", found.missing),
                ("left over", found.left_over),
                ("of the wrong shape", found.wrong_shape),
            )
            if names
        ]
        raise CheckpointError(f"{found.directory}: tensors do not match the config: {'; '.join(parts)}")


@dataclasses.dataclass(frozen=True)
class _Tables:
    """The target's embedding and head, read when they are needed."""

    directory: Path
    model: ModelConfig

    def read(self, name: str) -> np.ndarray:
        tied = self.model.tie_word_embeddings or name == EMBEDDING
        return TensorFolder(self.directory).read(MODEL_EMBEDDING if tied else MODEL_HEAD)


def _tensors(found: Inspection, written: Written, tables: _Tables, to: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, stored in found.names.items():
        value = found.folder.read(stored)
        if name in found.own_tables and written.tables == "drop":
            if not np.array_equal(value, tables.read(name).astype(value.dtype, copy=False)):
                raise ConfigError(
                    f"{found.directory}: tensor {stored!r} differs from the target's: layout {to} shares the target's "
                    "and has no place for another one"
                )
            continue
        tensors[written.names.get(name, name)] = value
    if written.tables == "write":
        dtype = next(value.dtype for value in tensors.values() if value.dtype.kind not in "biu")
        for name in TABLES:
            if name not in tensors:
                tensors[name] = tables.read(name).astype(dtype, copy=False)
    return tensors


# -- the layouts ------------------------------------------------------------------------------------------------------


def _fresh(found: Inspection, **changes: Any) -> dict[str, Any]:
    """config.json as the method writes it: the imported text is forgotten."""
    drafter = found.drafter
    config = dataclasses.replace(drafter.config, source_config=None)
    return dataclasses.replace(drafter, config=config, **changes).to_hf()


def _as_dflash(drafter: Any) -> bool:
    """A DSpark without heads whose anchor row predicts nothing is a DFlash."""
    return not (drafter.sample_from_anchor or drafter.heads.rank or drafter.heads.confidence)


def _zlab(found: Inspection, model: ModelConfig, name: str, directory: Path) -> Written:
    drafter = found.drafter
    if drafter.method == "dspark":
        if not _as_dflash(drafter):
            why = "its anchor row predicts" if drafter.sample_from_anchor else "it has a Markov or confidence head"
            raise ConfigError(f"{why}; z-lab's models are DFlash and DFlash 2")
        config = dataclasses.replace(drafter.config, source_config=None).to_hf(dflash.ARCHITECTURES[0], {})
    elif drafter.method in ("dflash", "dflash2"):
        config = _fresh(found)
    else:
        raise ConfigError("z-lab's models are DFlash and DFlash 2")
    config = {key: value for key, value in config.items() if key != "rope_parameters"}  # transformers 4 keys
    if drafter.method == "dflash2":
        config["dflash_config"] = {"block_size": config.pop("block_size"), **config["dflash_config"]}
    return Written(config)


def _specforge(found: Inspection, model: ModelConfig, name: str, directory: Path) -> Written:
    method = found.drafter.method
    if method in ("dflash", "dflash2"):
        return Written(_fresh(found))
    if method == "dspark":
        return Written(_fresh(found, layout=dspark.SPECFORGE))
    if method == "eagle3":
        return Written(_eagle3_config(found, "LlamaForCausalLMEagle3"), tables="keep")
    raise ConfigError("SpecForge trains DFlash, DFlash 2, DSpark and EAGLE-3")


def _deepspec(found: Inspection, model: ModelConfig, name: str, directory: Path) -> Written:
    drafter = found.drafter
    if drafter.method == "dspark":
        if not drafter.sample_from_anchor:
            raise ConfigError("its anchor row predicts nothing, but DeepSpec's model always predicts from it")
        return Written(_fresh(found, layout=dspark.DEEPSPEC), tables="write")
    if drafter.method == "eagle3":
        if found.layout != "deepspec":
            raise ConfigError(
                "DeepSpec's EAGLE-3 has q/k norms, five taps and the whole vocabulary; these weights have not"
            )
        return Written(found.config, tables="write")
    if drafter.method in ("dflash", "dflash2"):
        raise ConfigError("its anchor row predicts nothing, but DeepSpec's models always predict from it")
    raise ConfigError("DeepSpec's models are DSpark (its DFlash is one without heads) and EAGLE-3")


def _eagle3(found: Inspection, model: ModelConfig, name: str, directory: Path) -> Written:
    if found.drafter.method != "eagle3":
        raise ConfigError("the official layout is EAGLE-3's")
    return Written(_eagle3_config(found, "LlamaForCausalLM"), tables="keep")


def _eagle3_config(found: Inspection, architecture: str) -> dict[str, Any]:
    if found.layout == "deepspec":
        raise ConfigError("the official layout has no q/k norms; these weights have them")
    return {**_fresh(found), "architectures": [architecture]}


def _speculators(found: Inspection, model: ModelConfig, name: str, directory: Path) -> Written:
    drafter = found.drafter
    if drafter.method == "eagle3":
        own = _eagle3_config(found, "LlamaForCausalLMEagle3")
    else:
        own = _fresh(found) if hasattr(drafter.config, "source_config") else {}
    verifier = {"name_or_path": name, "architectures": list(read_config(directory).get("architectures") or [])}
    config, names = speculators.write(drafter, own, verifier)
    tables = "drop"
    if drafter.method == "eagle3":
        tables = "write" if drafter.config.draft_vocab == model.vocab_size else "keep"
    return Written(config, names, tables)


LAYOUTS: dict[str, Callable[[Inspection, ModelConfig, str, Path], Written]] = {
    "zlab": _zlab,
    "specforge": _specforge,
    "deepspec": _deepspec,
    "eagle3": _eagle3,
    "speculators": _speculators,
}
