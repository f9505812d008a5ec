"""The model being sped up, from a folder, a GGUF file or a hub name to parameters on the device."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.cache import converted_gguf
from jaxspec.checkpoints.hub import Located, locate
from jaxspec.checkpoints.store import TensorFolder, match, read_config, read_json
from jaxspec.errors import CheckpointError, ConfigError, problem
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten, unflatten
from jaxspec.models.quantization import is_quantised, quantise_weight
from jaxspec.parallel.mesh import Placement
from jaxspec.parallel.rules import ServingRules

__all__ = ["Target", "check_quantization", "float_dtype", "load_target"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("float32", "bfloat16", "float16")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target. `params` is the unrolled tree of `model` (layers as a list), on the default device.

    `revision` names the weights: the hub's commit, the GGUF file's hash, or a fingerprint of the folder. `directory`
    holds the tokenizer; it is None for models made in memory.
    """

    name: str
    model: Decoder
    params: Any
    revision: str = ""
    directory: Path | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config, with the stop tokens of generation_config.json merged in."""
        return self.model.config

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights."""
        return self.embedding.dtype

    @property
    def embedding(self) -> jax.Array:
        """Input embedding [V, H], by reference."""
        return self.model.embedding(self.params)

    @property
    def head(self) -> jax.Array:
        """Output head [V, H], by reference; the embedding itself where they are tied."""
        return self.model.head(self.params)


def load_target(
    source: str | os.PathLike[str],
    dtype: Any = "bfloat16",
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    quantization: str | None = None,
    placement: Placement | None = None,
) -> Target:
    """Load a Llama, Qwen2 or Qwen3 model, one tensor after the other.

    Args:
      source: see `jaxspec.checkpoints.hub.locate`; a GGUF file is converted once into the cache.
      dtype: of the weights on the device: float32, bfloat16 or float16.
      cache_dir: where converted models are kept; None for ~/.cache/jaxspec.
      quantization: int8 quantises the layers' matrices as they arrive, so that `dtype` ones never exist together.
      placement: the mesh that they go to; the default device when None.

    Raises:
      CheckpointError: files are missing, broken, or their tensors are not exactly those of the config.
      ConfigError: the architecture or one of its settings is not supported, or the mesh does not divide it.
      HubError: a hub name cannot be fetched.
    """
    dtype = float_dtype(dtype, "target.dtype")
    located = locate(source, cache_dir, "target")
    directory = converted_gguf(located.path, cache_dir) if located.path.is_file() else located.path
    config = _config(directory)
    folder = TensorFolder(directory)
    params = _params(folder, Decoder(config), dtype, check_quantization(quantization), placement)
    name, revision = _identity(located, directory, folder)
    revision += f" {quantization}" if quantization else ""
    _log.info(
        "target %s: %d layers, hidden %d, %s, revision %s",
        name,
        config.num_layers,
        config.hidden_size,
        dtype.name,
        revision,
    )
    return Target(name, Decoder(config), params, revision, directory)


def float_dtype(dtype: Any, field: str) -> jnp.dtype:
    """A weights' dtype from its name or type. Raises ConfigError naming `field`."""
    try:
        value = jnp.dtype(dtype)
    except TypeError:
        value = None
    if value is None or value.name not in _DTYPES:
        raise ConfigError(f"{field}: found {dtype!r}, expected one of {', '.join(_DTYPES)}")
    return value


def _config(directory: Path) -> ModelConfig:
    raw = read_config(directory)
    try:
        config = ModelConfig.from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"{directory / 'config.json'}: {error}") from error
    path = directory / "generation_config.json"
    generation = read_json(path, what="generation settings") if path.is_file() else {}
    stops = tuple(dict.fromkeys((*config.eos_token_ids, *_ids(generation, path))))
    wrong = [token for token in stops if not 0 <= token < config.vocab_size]
    if wrong:
        raise ConfigError(
            f"{directory}: eos_token_id: found {wrong}, expected ids below vocab_size = {config.vocab_size}"
        )
    return dataclasses.replace(config, eos_token_ids=stops)


def _ids(generation: Mapping[str, Any], path: Path) -> list[int]:
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{path}: eos_token_id: found {value!r}, expected an id or a list of ids")
    return ids


def check_quantization(quantization: str | None) -> bool:
    """Whether weights are quantised. Raises ConfigError for a kind that is unknown."""
    if quantization not in (None, "int8"):
        raise ConfigError(problem("target.quantization", quantization, "int8 or null"))
    return quantization is not None


def _params(
    folder: TensorFolder, model: Decoder, dtype: jnp.dtype, quantised: bool, placement: Placement | None
) -> Any:
    expected = {name: leaf.shape for name, leaf in flatten(model.abstract_params(dtype)).items()}
    found = folder.shapes()
    tied = model.config.tie_word_embeddings
    if tied and HEAD in found:
        # Some exporters write the tied head as well: fine when it is the embedding, a contradiction when it is not.
        match({**expected, HEAD: expected[EMBEDDING]}, found, where=str(folder.directory))
        if not np.array_equal(folder.read(HEAD), folder.read(EMBEDDING)):
            raise CheckpointError(
                f"{folder.directory}: found {HEAD} that differs from {EMBEDDING}, expected the same values since "
                "tie_word_embeddings is true; "
                "set tie_word_embeddings to false in config.json if the head is meant"
            )
    else:
        match(expected, found, where=str(folder.directory))
    rules = None if placement is None else ServingRules.of(model.config, placement.tensor)

    def one(name: str, shape: tuple[int, ...]) -> Any:
        sharding = None if placement is None or rules is None else placement.sharding(rules.parameter(name, shape))
        leaf = jax.device_put(folder.read(name).astype(dtype, copy=False), sharding)
        return quantise_weight(leaf) if quantised and is_quantised(name) else leaf

    return unflatten({name: one(name, shape) for name, shape in expected.items()})


def _identity(located: Located, directory: Path, folder: TensorFolder) -> tuple[str, str]:
    path = directory / "jaxspec_source.json"
    source = read_json(path, what="where the weights came from") if path.is_file() else {}
    revision = located.revision or source.get("revision") or f"content:{folder.fingerprint()}"
    return located.name, str(revision)
