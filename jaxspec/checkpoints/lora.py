"""A PEFT LoRA adapter, merged into the target's matrices while they are loaded: W + s x B A in float32, rounded once.

s is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora. What would change the target in any other way (DoRA,
biases, whole modules saved beside, ranks by layer, initialisations that change the base weights, ...) is refused, and
so is a tensor that belongs to no matrix of the target, or a matrix that target_modules names and the file lacks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.safetensors_file import read_header, read_tensor
from jaxspec.checkpoints.store import read_json
from jaxspec.errors import CheckpointError, ConfigError, problem

__all__ = ["Adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FIELD = "target.lora"
_PREFIX = "base_model.model."
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights"}
# say how it was trained or where it belongs; they change nothing of what it computes
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision",
    "task_type", "runtime_config", "ephemeral_gpu_offload", "layers_pattern", "qalora_group_size", "megatron_core",
}  # fmt: skip
# these leave the base weights alone; pissa, olora and others do not
_NEUTRAL_START = (True, False, "gaussian", "orthogonal")
_ROWS = 1 << 22  # elements that are merged at a time, so that float32 copies stay small


class Adapter:
    """The adapter in `directory`, read from headers; its factors are read when a matrix is merged.

    Raises:
      CheckpointError: files are absent or broken, or its tensors are not exactly those of `target_modules`.
      ConfigError: it needs something that is not supported.
    """

    def __init__(self, directory: str | os.PathLike[str], shapes: Mapping[str, tuple[int, ...]]):
        """`shapes`: the target's tensors by name."""
        self.directory = Path(directory)
        if not self.directory.is_dir():
            expected = f"a folder with {CONFIG} and {WEIGHTS}"
            raise CheckpointError(problem(_FIELD, f"no folder {self.directory}", expected))
        config = read_json(self.directory / CONFIG, what="a PEFT adapter's config")
        self._where = str(self.directory / CONFIG)
        self.rank = self._number(config, "r", int)
        alpha = self._number(config, "lora_alpha", (int, float))
        self.scale = alpha / (math.sqrt(self.rank) if config.get("use_rslora") else self.rank)
        self._refuse_unsupported(config)
        self._header = read_header(self.directory / WEIGHTS)
        self.matrices = self._cover(config.get("target_modules"), shapes)
        logging.getLogger(__name__).info(
            "%s %s: rank %d, scale %g, %d matrices", _FIELD, self.directory, self.rank, self.scale, len(self.matrices)
        )

    def fingerprint(self) -> str:
        """16 hex digits that change with its config or any of its values."""
        digest = hashlib.sha256((self.directory / CONFIG).read_bytes())
        with (self.directory / WEIGHTS).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return digest.hexdigest()[:16]

    def merge(self, name: str, weight: np.ndarray, rows: slice, columns: slice, dtype: Any) -> np.ndarray:
        """The part [rows, columns] of the merged matrix `name` in `dtype`; `weight` is that part of the base's."""
        left, right = (self._factor(stored) for stored in self.matrices[name])
        left, right = left[rows], right[:, columns]
        merged = np.empty(weight.shape, dtype)
        each = max(1, _ROWS // weight.shape[1])
        for start in range(0, weight.shape[0], each):
            part = slice(start, start + each)
            merged[part] = (weight[part].astype(np.float32) + self.scale * (left[part] @ right)).astype(dtype)
        return merged

    def _factor(self, stored: str) -> np.ndarray:
        """lora_A or lora_B in float32. Raises CheckpointError where it holds anything but numbers."""
        values = read_tensor(self._header, stored)
        floats = np.issubdtype(values.dtype, np.floating) or values.dtype.name.startswith(("bfloat16", "float8"))
        if not floats or not np.isfinite(wide := values.astype(np.float32)).all():
            found = (
                f"{stored} of dtype {values.dtype.name}" if not floats else f"{stored} with values that are no numbers"
            )
            raise CheckpointError(
                problem(f"{_FIELD} {self.directory / WEIGHTS}", found, "finite floating-point values")
            )
        return wide

    def _number(self, config: Mapping[str, Any], key: str, kind: Any) -> Any:
        value = config.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
            expected = "a whole number above 0" if kind is int else "a number above 0"
            raise ConfigError(problem(f"{self._where}: {key}", f"found {value!r}", expected))
        return value

    def _refuse_unsupported(self, config: Mapping[str, Any]) -> None:
        def refuse(key: str, expected: str) -> None:
            action = "merge it with the library that made it and give the merged folder as target.source"
            raise ConfigError(problem(f"{self._where}: {key}", f"found {config.get(key)!r}", expected, action))

        if config.get("peft_type") != "LORA":
            refuse("peft_type", "'LORA'")
        if config.get("use_rslora") not in (None, True, False):
            refuse("use_rslora", "true or false")
        if config.get("bias", "none") != "none":
            refuse("bias", "'none'")
        start = config.get("init_lora_weights", True)
        if type(start) not in (bool, str) or start not in _NEUTRAL_START:
            refuse("init_lora_weights", "one that leaves the base weights alone (true, false, gaussian, orthogonal)")
        for key, value in config.items():
            if key not in _READ | _HARMLESS and value not in (None, False, {}, [], ""):
                refuse(key, "null: only plain LoRA of rank r is merged")

    def _cover(self, wanted: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
        """The target's name -> (B's, A's) name in the file, each matrix that is wanted exactly once."""
        matrices = {
            name: shape
            for name, shape in shapes.items()
            if len(shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name
        }
        chosen = {name for name in matrices if self._names(wanted, name.removesuffix(".weight"))}
        if not chosen:
            expected = f"names of its matrices, such as {next(iter(matrices)).removesuffix('.weight')}"
            raise ConfigError(problem(f"{self._where}: target_modules", f"{wanted!r}, none of the target's", expected))
        found, left_over, broken = {}, set(self._header.entries), []
        for name in sorted(chosen):
            pair = [f"{_PREFIX}{name.removesuffix('.weight')}.lora_{half}.weight" for half in "BA"]
            expected_shapes = ((matrices[name][0], self.rank), (self.rank, matrices[name][1]))
            for stored, shape in zip(pair, expected_shapes, strict=True):
                entry = self._header.entries.get(stored)
                if entry is None:
                    broken.append(f"missing {stored}")
                elif entry.shape != shape:
                    broken.append(f"{stored} of shape {list(entry.shape)}, expected {list(shape)}")
                left_over.discard(stored)
            found[name] = (pair[0], pair[1])
        broken += [f"left over {stored}" for stored in sorted(left_over)]
        if broken:
            shown = "; ".join(broken[:8]) + (f" and {len(broken) - 8} more" if len(broken) > 8 else "")
            raise CheckpointError(
                problem(
                    f"{_FIELD} {self.directory / WEIGHTS}", shown,
                    f"lora_A and lora_B of rank {self.rank} for each of the target's {len(chosen)} matrices that "
                    "target_modules names, and nothing else",
                    "check that the adapter was made for this target",
                )
            )  # fmt: skip
        return found

    def _names(self, wanted: Any, module: str) -> bool:
        """Whether target_modules means this module: a list of names or ends of names, a pattern of a whole name, or
        "all-linear", which leaves the head out."""
        if wanted == "all-linear":
            return module != "lm_head"
        if isinstance(wanted, str):
            try:
                return re.fullmatch(wanted, module) is not None
            except re.error as error:
                found, expected = f"{wanted!r} ({error})", "a list of names or a regular expression"
                raise ConfigError(problem(f"{self._where}: target_modules", found, expected)) from error
        if isinstance(wanted, list) and all(isinstance(one, str) for one in wanted):
            return any(module == one or module.endswith(f".{one}") for one in wanted)
        raise ConfigError(problem(f"{self._where}: target_modules", wanted, "a list of names or a regular expression"))
