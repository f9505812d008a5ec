"""Targets and drafters without weights: what a config.json says of their tensors, for plans of what is not here yet.

A source that ends in `.json` is such a file itself; any other is looked up as for loading, and only its config is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.cache import converted_gguf
from jaxspec.checkpoints.drafter import EMBEDDING, HEAD, Draft, own_names
from jaxspec.checkpoints.drafting import DraftOptions
from jaxspec.checkpoints.hub import locate
from jaxspec.checkpoints.store import TensorFolder, read_config, read_json
from jaxspec.checkpoints.target import EMBEDDING as TARGET_EMBEDDING
from jaxspec.checkpoints.target import Target, check_quantization, float_dtype
from jaxspec.drafters.options import configured
from jaxspec.drafters.registry import drafter_by_name, drafter_from_hf
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten, unflatten
from jaxspec.models.quantization import is_quantised, quantise_weight

__all__ = ["drafter_shape", "target_shape"]


def target_shape(source: str | os.PathLike[str], dtype: Any, quantization: str | None = None) -> Target:
    """A target whose parameters are ShapeDtypeStructs. Raises what `load_target` raises of its config."""
    dtype = float_dtype(dtype, "target.dtype")
    check_quantization(quantization)
    name, raw, _ = _config(source, "target")
    try:
        model = Decoder(ModelConfig.from_hf(raw))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    leaves = flatten(model.abstract_params(dtype))
    if quantization is not None:
        leaves = {key: quantise_weight(leaf) if is_quantised(key) else leaf for key, leaf in leaves.items()}
    return Target(name, model, unflatten(leaves), quantization or "")


def drafter_shape(source: str, target: Target, options: DraftOptions) -> tuple[Draft, int | None]:
    """As `open_drafter`, with ShapeDtypeStructs. A JSON file says nothing of optional tensors: there are none."""
    drafter: Any = drafter_by_name(source, target.config)
    if drafter is not None:
        drafter, rest = configured(drafter, options)
        return Draft(drafter, {}, source=source), rest
    name, raw, folder = _config(source, "drafter")
    try:
        if folder is not None and TARGET_EMBEDDING in folder.names():
            drafter = SmallModel.from_hf(raw, target.config)
        else:
            drafter = drafter_from_hf(raw, target.config)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    dtype, names = (
        jnp.dtype(target.dtype),
        {} if folder is None or drafter.method == "small_model" else own_names(folder),
    )
    if hasattr(drafter, "with_tensors") and folder is not None:
        drafter = drafter.with_tensors(names)
    params = drafter.abstract_params(dtype)
    table = jax.ShapeDtypeStruct((target.config.vocab_size, target.config.hidden_size), dtype)
    own = set(names) - set(flatten(params))
    drafter, rest = configured(drafter, options)
    embedding, head = (table if key in own else None for key in (EMBEDDING, HEAD))
    return Draft(drafter, params, embedding, head, name), rest


def _config(source: str | os.PathLike[str], field: str) -> tuple[str, Mapping[str, Any], TensorFolder | None]:
    """A name, the config, and the folder of tensors where there is one."""
    path = Path(source)
    if path.suffix == ".json":
        if not path.is_file():
            raise CheckpointError(f"{field}: {path}: found nothing there, expected a model's config.json")
        return str(path), read_json(path, what="a model's config"), None
    located = locate(source, field=field)
    folder = converted_gguf(located.path) if located.path.is_file() else located.path
    return str(folder / "config.json"), read_config(folder), TensorFolder(folder)
