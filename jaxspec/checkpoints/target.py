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
from jaxspec.checkpoints.lora import Adapter
from jaxspec.checkpoints.placing import Shardings, layer_groups, place, same_values, stack
from jaxspec.checkpoints.store import TensorFolder, check_floats, match, read_config, read_json
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
    """A loaded target. `params` is the unrolled tree of `model` (layers as a list), or the stacked one where that was
    asked for.

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
    lora: str | os.PathLike[str] | None = None,
    shardings: Shardings | None = None,
    stacked: bool = False,
) -> Target:
    """Load a Llama, Qwen2 or Qwen3 model, one shard of one tensor after the other: the host never holds more than two
    tensors' worth (a quantised one is made on its device).

    Args:
      source: see `jaxspec.checkpoints.hub.locate`; a GGUF file is converted once into the cache.
      dtype: of the weights on the device: float32, bfloat16 or float16.
      cache_dir: where converted models are kept; None for ~/.cache/jaxspec.
      quantization: int8 quantises the layers' matrices as they arrive, so that `dtype` ones never exist together.
      placement: the mesh that they go to, by the rules of serving; the default device when None.
      lora: a PEFT adapter's folder, merged into the matrices; it is part of the revision.
      shardings: (tensor's name, shape) -> where it lies, in place of `placement`.
      stacked: the layers as one dict of arrays with a leading L axis (training's form), stacked on their devices.

    Raises:
      CheckpointError: files are missing, broken, or their tensors are not exactly those of the config, or of the
      adapter.
      ConfigError: the architecture, one of its settings or the adapter is not supported, or the mesh does not divide
      it.
      HubError: a hub name cannot be fetched.
    """
    dtype = float_dtype(dtype, "target.dtype")
    located = locate(source, cache_dir, "target")
    directory = converted_gguf(located.path, cache_dir) if located.path.is_file() else located.path
    config = _config(directory)
    folder = TensorFolder(directory)
    if placement is not None:
        rules, mesh = ServingRules.of(config, placement.tensor), placement
        shardings = lambda tensor, shape: mesh.sharding(rules.parameter(tensor, shape))  # noqa: E731
    model = Decoder(config)
    adapter = None if lora is None else Adapter(lora, _shapes(model))
    params = _params(folder, model, dtype, check_quantization(quantization), shardings, adapter, stacked)
    name, revision = _identity(located, directory, folder)
    revision += "" if adapter is None else f" lora:{adapter.fingerprint()}"
    revision += f" {quantization}" if quantization else ""
    _log.info(
        "target %s: %d layers, hidden %d, %s, revision %s",
        name,
        config.num_layers,
        config.hidden_size,
        dtype.name,
        revision,
    )
    return Target(name, model, params, revision, directory)


def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in flatten(model.abstract_params(jnp.float32)).items()}


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
    folder: TensorFolder, model: Decoder, dtype: jnp.dtype, quantised: bool, shardings: Shardings | None,
    adapter: Adapter | None, stacked: bool,
) -> Any:  # fmt: skip
    expected = _shapes(model)
    found = folder.shapes()
    tied = model.config.tie_word_embeddings
    if tied and HEAD in found:
        # Some exporters write the tied head as well: fine when it is the embedding, a contradiction when it is not.
        match({**expected, HEAD: expected[EMBEDDING]}, found, where=str(folder.directory))
        if not same_values(folder, HEAD, EMBEDDING):
            raise CheckpointError(
                f"{folder.directory}: found {HEAD} that differs from {EMBEDDING}, expected the same values since "
                "tie_word_embeddings is true; "
                "set tie_word_embeddings to false in config.json if the head is meant"
            )
    else:
        match(expected, found, where=str(folder.directory))

    def one(name: str) -> Any:
        check_floats(folder, name)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            part = folder.read_part(name, index)
            if adapter is not None and name in adapter.matrices:
                return adapter.merge(name, part, index[0], index[1], dtype)
            return part.astype(dtype, copy=False)

        shape = expected[name]
        leaf = place(read, shape, None if shardings is None else shardings(name, shape))
        return quantise_weight(leaf) if quantised and is_quantised(name) else leaf

    if not stacked:
        return unflatten({name: one(name) for name in expected})
    groups = layer_groups(expected)
    inside = {name for names in groups.values() for name in names}
    layers = {f"model.layers.{rest}": stack([one(name) for name in names]) for rest, names in groups.items()}
    return unflatten({name: one(name) for name in expected if name not in inside} | layers)


def _identity(located: Located, directory: Path, folder: TensorFolder) -> tuple[str, str]:
    path = directory / "jaxspec_source.json"
    source = read_json(path, what="where the weights came from") if path.is_file() else {}
    revision = located.revision or source.get("revision") or f"content:{folder.fingerprint()}"
    return located.name, str(revision)
