"""What a drafter's folder holds, told from config.json and the headers alone: nothing is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints import speculators
from jaxspec.checkpoints.drafter import EMBEDDING, HEAD, own_names
from jaxspec.checkpoints.hub import locate
from jaxspec.checkpoints.store import TensorFolder, read_config
from jaxspec.checkpoints.target import EMBEDDING as MODEL_EMBEDDING
from jaxspec.drafters.dspark import DEEPSPEC, SPECFORGE
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import flatten

__all__ = ["Inspection", "inspect", "target_config"]

_BY_ARCHITECTURE = {
    "MuseGlimmerAssistantModel": "muse",
    SPECFORGE: "specforge",
    DEEPSPEC: "deepspec",
    "Qwen3Eagle3Model": "deepspec",
    "LlamaForCausalLMEagle3": "specforge",
    "Eagle3LlamaForCausalLM": "angelslim",
    "QwenDFlareDraftModel": "angelslim",
}


@dataclasses.dataclass(frozen=True)
class Inspection:
    """`names` maps the drafter's own tensor names to the file's. `assumed_target` says that the target's config was
    guessed from the drafter's."""

    directory: Path
    config: Mapping[str, Any]
    layout: str
    drafter: Any
    folder: TensorFolder
    names: Mapping[str, str]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    not_finite: tuple[str, ...]
    own_tables: tuple[str, ...]
    assumed_target: bool

    @property
    def whole(self) -> bool:
        """Whether the tensors are exactly the drafter's, every value a number."""
        return not (self.missing or self.left_over or self.wrong_shape or self.not_finite)

    @property
    def taps(self) -> list[Any] | None:
        """None where they follow from the target's depth, which nobody told."""
        from jaxspec.drafters.eagle_config import explicit_layer_ids

        guessed = self.assumed_target and self.drafter.method == "eagle3" and explicit_layer_ids(self.config) is None
        return None if guessed else list(self.drafter.taps)

    def parameters(self) -> dict[str, int]:
        """Numbers of values by the first part of the tensors' names, and their total."""
        groups: dict[str, int] = {}
        for name, stored in self.names.items():
            group = name.split(".")[0]
            groups[group] = groups.get(group, 0) + int(np.prod(self.folder.shape(stored)))
        return {**groups, "total": sum(groups.values())}

    def report(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "directory": str(self.directory),
            "method": self.drafter.method,
            "layout": self.layout,
            "architectures": list(self.config.get("architectures") or []),
            "taps": self.taps,
            "num_proposals": self.drafter.num_proposals,
            "tree_nodes": self.drafter.tree_nodes,
            "target_assumed_from_config": self.assumed_target,
            "own_tables": list(self.own_tables),
            "dtypes": sorted({str(self.folder.dtype(stored)) for stored in self.names.values()}),
            "parameters": self.parameters(),
            "missing": list(self.missing),
            "left_over": list(self.left_over),
            "wrong_shape": list(self.wrong_shape),
            "not_finite": list(self.not_finite),
        }


def inspect(source: str | os.PathLike[str], target: ModelConfig | None = None) -> Inspection:
    """Looks at a drafter's folder (or a whole language model's).

    Args:
      target: the target's config; guessed from the drafter's where it is left out.

    Raises CheckpointError for an unreadable folder and ConfigError for a config that no method reads. Tensors that do
    not fit are no error here: they are listed.
    """
    directory = locate(source, field="drafter").path
    if directory.is_file():
        raise CheckpointError(f"{directory}: found a file, expected a drafter's folder (config.json and *.safetensors)")
    config, folder = read_config(directory), TensorFolder(directory)
    assumed = target is None
    try:
        if speculators.recognises(config):
            config, names = speculators.read(config, own_names(folder), target)
            layout = "speculators"
        else:
            names = own_names(folder)
            layout = layout_of(config, names)
        seen = assumed_target(config) if target is None else target
        make = SmallModel.from_hf if layout == "huggingface" else drafter_from_hf
        drafter: Any = make(config, seen)
    except ConfigError as error:
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
    if hasattr(drafter, "with_tensors"):
        drafter = drafter.with_tensors(names)
    expected = {name: tuple(leaf.shape) for name, leaf in flatten(drafter.abstract_params(jnp.float32)).items()}
    table = (seen.vocab_size, seen.hidden_size)
    own = {name: table for name in (EMBEDDING, HEAD) if name in names and name not in expected}
    wanted = expected | own
    shapes = {name: folder.shape(stored) for name, stored in names.items()}
    return Inspection(
        directory=directory,
        config=config,
        layout=layout,
        drafter=drafter,
        folder=folder,
        names=names,
        missing=tuple(name for name in wanted if name not in names),
        left_over=tuple(name for name in names if name not in wanted),
        wrong_shape=tuple(
            f"{name}: found {list(shapes[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != shape
        ),
        not_finite=tuple(name for name, stored in names.items() if not _finite(folder, stored)),
        own_tables=tuple(own),
        assumed_target=assumed,
    )


def _finite(folder: TensorFolder, name: str) -> bool:
    """Whether every value of a tensor is a number; those of integers are."""
    values = folder.read(name)
    return not jnp.issubdtype(values.dtype, jnp.floating) or bool(np.isfinite(values).all())


def layout_of(config: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Whose layout it is. z-lab's and SpecForge's DFlash share names; SpecForge writes transformers 5's rope key
    too."""
    architecture = (config.get("architectures") or [""])[0]
    if MODEL_EMBEDDING in names:
        return "huggingface"
    if architecture in ("DFlashDraftModel", "DFlash2DraftModel"):
        return "specforge" if "rope_parameters" in config else "zlab"
    if architecture == "LlamaForCausalLM":
        return "eagle3" if config.get("draft_vocab_size") is not None else "eagle"
    return _BY_ARCHITECTURE.get(architecture, architecture or "unknown")


def assumed_target(config: Mapping[str, Any]) -> ModelConfig:
    """A target that the drafter says it was made for, as far as it says so."""
    model = ModelConfig.from_hf(config)
    nested = config.get("dflash_config") or {}
    layers = config.get("num_target_layers") or nested.get("num_target_layers")
    ids = nested.get("target_layer_ids") or config.get("target_layer_ids") or ()
    depth = layers or max([8, *(tap + 4 for tap in ids if isinstance(tap, int))])
    width = config.get("target_hidden_size") or model.hidden_size
    return dataclasses.replace(model, num_layers=depth, hidden_size=width, layer_windows=(None,) * depth)


def target_config(source: str | os.PathLike[str]) -> tuple[ModelConfig, Path]:
    """A target's config and folder, without its weights. A GGUF file is converted once into the cache."""
    from jaxspec.checkpoints.cache import converted_gguf

    path = locate(source, field="target").path
    directory = converted_gguf(path, None) if path.is_file() else path
    try:
        return ModelConfig.from_hf(read_config(directory)), directory
    except ConfigError as error:
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
