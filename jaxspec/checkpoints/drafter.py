"""Drafters in and out of the public checkpoint formats.

Embedding and head are used from the draft's own file where it has them and shared with the target, by reference, where
it has not (DFlash ships neither, DeepSpec's DSpark ships both). An imported draft remembers the layout it came in, so
that it is exported under the same names, in the same dtypes and order, bit for bit where its weights did not change.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.atomic import check_replaceable
from jaxspec.checkpoints.coverage import ignorable
from jaxspec.checkpoints.hub import locate
from jaxspec.checkpoints.placing import place
from jaxspec.checkpoints.store import TensorFolder, check_floats, match, read_config, write_folder
from jaxspec.checkpoints.target import Target, float_dtype
from jaxspec.checkpoints.vocab_map import D2T, T2D, check_vocab_map
from jaxspec.drafters.base import Shared
from jaxspec.drafters.registry import ARCHITECTURES, drafter_from_hf
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.layers import flatten, unflatten

__all__ = ["Draft", "Layout", "load_drafter", "save_drafter"]

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_WRITTEN = {"config.json", "model.safetensors"}  # by an export
_PREFIX = "logit_head."  # early DSpark checkpoints nest their heads under it
_RENAMED = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}  # Muse Glimmer assistants
_MASK_NORM_RATIO = 10.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an imported draft lay on disk: its folder, our name -> the file's name and dtype in file order, and the
    file's metadata.
    """

    directory: Path
    tensors: Mapping[str, tuple[str, np.dtype]]
    metadata: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafter with weights. `embedding` and `head` are [V, H], None where the draft has none of its own.

    `layout` is None for a draft that was made here; `dataclasses.replace(draft, params=...)` keeps the layout of an
    imported one.
    """

    drafter: Any
    params: Any
    embedding: jax.Array | None = None
    head: jax.Array | None = None
    source: str = ""
    config_raw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Layout | None = None

    def shared(self, target: Target) -> Shared:
        """Embedding and head that this draft works with: its own, or the target's by reference."""
        embedding = target.embedding if self.embedding is None else self.embedding
        return Shared(embedding, target.head if self.head is None else self.head)


def load_drafter(
    source: str | os.PathLike[str], target: Target, dtype: Any = None, cache_dir: str | os.PathLike[str] | None = None
) -> Draft:
    """Load a drafter made for `target`.

    Args:
      source: see `jaxspec.checkpoints.hub.locate`; a safetensors folder, not GGUF.
      dtype: of the weights on the device; the target's when left out.

    Raises:
      CheckpointError: tensors are missing, left over or of the wrong shape (all are named).
      ConfigError: config.json does not describe a known drafter of this target.
    """
    located = locate(source, cache_dir, "drafter")
    if located.path.is_file():
        raise CheckpointError(
            f"{located.path}: found a GGUF file, expected a drafter's folder (config.json and *.safetensors)"
        )
    raw = read_config(located.path)
    try:
        drafter = drafter_from_hf(raw, target.config)
    except ConfigError as error:
        raise ConfigError(f"{located.path / 'config.json'}: {error}") from error
    dtype = target.dtype if dtype is None else float_dtype(dtype, "drafter.dtype")
    folder = TensorFolder(located.path)
    names = own_names(folder)
    maps = {name: folder.read(names[name]) for name in (D2T, T2D) if name in names}
    check_vocab_map(raw, maps, target.config.vocab_size, where=str(located.path))
    if hasattr(drafter, "with_tensors"):  # layouts whose config does not say which optional tensors there are
        drafter = drafter.with_tensors(names)
    abstract = flatten(drafter.abstract_params(dtype))
    expected = {name: tuple(leaf.shape) for name, leaf in abstract.items()}
    own = {
        name: (target.config.vocab_size, target.config.hidden_size)
        for name in (EMBEDDING, HEAD)
        if name in names and name not in expected
    }
    match(expected | own, {name: folder.shape(stored) for name, stored in names.items()}, where=str(located.path))
    params = unflatten({name: _leaf(folder, names[name], leaf.dtype) for name, leaf in abstract.items()})
    embedding, head = (
        _shareable(
            folder,
            names.get(name) if name in own else None,
            dtype,
            theirs,
            f"drafter {located.name}: {what}",
            name in expected,
        )
        for name, theirs, what in ((EMBEDDING, target.embedding, "input embedding"), (HEAD, target.head, "output head"))
    )
    layout = Layout(
        located.path, {name: (stored, folder.dtype(stored)) for name, stored in names.items()}, folder.metadata()
    )
    draft = Draft(drafter, params, embedding, head, located.name, raw, layout)
    _check_mask_row(draft, target)
    return draft


def own_names(folder: TensorFolder) -> dict[str, str]:
    """Our name -> the file's name, in file order, without buffers that carry no weight."""
    names: dict[str, str] = {}
    for stored in folder.names():
        if ignorable(stored):
            continue
        name = _RENAMED.get(stored, stored.removeprefix(_PREFIX))
        if name in names:
            raise CheckpointError(
                f"{folder.directory}: found both {names[name]} and {stored}, expected one tensor for {name}"
            )
        names[name] = stored
    return names


def _leaf(folder: TensorFolder, stored: str, dtype: Any) -> jax.Array:
    value = folder.read(stored)
    if jnp.issubdtype(dtype, jnp.floating):
        check_floats(folder, stored)
    kept = value.astype(dtype, copy=False)
    if not jnp.issubdtype(dtype, jnp.floating) and not np.array_equal(kept, value):
        raise CheckpointError(
            f"{folder.directory}: tensor {stored!r}: found values that {np.dtype(dtype).name} cannot hold"
        )
    return jax.device_put(kept)


def _shareable(
    folder: TensorFolder, stored: str | None, dtype: Any, theirs: jax.Array, what: str, is_param: bool
) -> jax.Array | None:
    """The draft's own table, or None for the target's; one log line says which."""
    if is_param:
        _log.info("%s: its own, trained with it", what)
        return None
    if stored is None:
        _log.info("%s: shared with the target (its file has none)", what)
        return None
    spread = theirs.sharding if isinstance(theirs.sharding, jax.sharding.NamedSharding) else None
    check_floats(folder, stored)
    name, shape = stored, folder.shape(stored)
    value = place(lambda index: folder.read_part(name, index).astype(dtype, copy=False), shape, spread)
    if theirs.dtype == value.dtype and bool(jnp.array_equal(value, theirs)):
        _log.info("%s: from its own file, equal to the target's and kept once", what)
        return theirs
    _log.info("%s: from its own file, different from the target's", what)
    return value


@functools.partial(jax.jit, static_argnums=1)
def _row_norms(table: jax.Array, row: int) -> tuple[jax.Array, jax.Array]:
    """Of one row, and the median of all."""
    norms = jnp.sqrt(jnp.sum(jnp.square(table.astype(jnp.float32)), axis=-1))
    return norms[row], jnp.median(norms)


def _check_mask_row(draft: Draft, target: Target) -> None:
    """Warn loudly when the mask token's row looks untrained: checkpoints exist whose mask row is a side file or nearly
    zero.
    """
    mask = getattr(draft.drafter, "mask_token_id", None)
    if mask is None:
        return
    row, median = map(float, _row_norms(draft.shared(target).embedding, mask))
    if not median / _MASK_NORM_RATIO <= row <= median * _MASK_NORM_RATIO:
        _log.warning(
            "mask_token_id %d: found an embedding row of norm %.3g, expected within %gx of the median %.3g; "
            "the drafter will guess badly if it was trained with another row (%s)",
            mask, row, _MASK_NORM_RATIO, median, draft.source,
        )  # fmt: skip


def save_drafter(
    directory: str | os.PathLike[str],
    draft: Draft,
    *,
    dtype: Any = None,
    extra_files: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a drafter in its public format, atomically; returns the folder.

    config.json is the drafter's `to_hf()`. `draft.params` must be in the unrolled form. The dtype is `dtype`, else
    what the imported file had, else that of the weights. Own embedding and head are written where the draft has them.
    The file's metadata is the imported file's with `metadata` over it.

    Raises CheckpointError when the parameters are not exactly the drafter's, or hold NaN or infinity.
    """
    check_export_folder(directory)
    abstract = flatten(draft.drafter.abstract_params(jnp.float32))
    values = flatten(draft.params)
    match(
        {name: leaf.shape for name, leaf in abstract.items()},
        {name: value.shape for name, value in values.items()},
        where="drafter.params",
    )
    values |= {name: value for name, value in ((EMBEDDING, draft.embedding), (HEAD, draft.head)) if value is not None}
    stored = draft.layout.tensors if draft.layout else {}
    order = [*(name for name in stored if name in values), *(name for name in values if name not in stored)]
    original = _source_folder(draft.layout) if dtype is None else None
    tensors: dict[str, np.ndarray] = {}
    for name in order:
        array = np.asarray(values[name])
        if array.dtype.kind not in "biu" and not np.isfinite(array.astype(np.float32)).all():
            raise CheckpointError(
                f"{directory}: tensor {name!r}: found NaN or infinity, expected finite weights; nothing was written"
            )
        # public maps are 64-bit; JAX holds them in 32
        file_name, file_dtype = stored.get(name, (name, np.int64 if array.dtype == np.int32 else array.dtype))
        wide = dtype is None or array.dtype.kind in "biu"
        kept = array.astype(file_dtype if wide else float_dtype(dtype, "dtype"), copy=False)
        if original is not None and kept.dtype.itemsize > array.dtype.itemsize:
            kept = _unchanged_or(original, file_name, array, kept)
        tensors[file_name] = kept
    config = dict(draft.drafter.to_hf())
    if draft.layout is None and tensors:
        config["dtype"] = weights_dtype(tensors)
    said = draft.layout.metadata if draft.layout else None
    if metadata is not None:
        said = {**(said or {}), **metadata}
    return write_folder(directory, tensors, config, extra_files, said)


def weights_dtype(tensors: Mapping[str, np.ndarray]) -> str:
    """What config.json gives as `dtype`: that of the first weight; vocabulary maps are none."""
    weights = (str(tensor.dtype) for tensor in tensors.values() if tensor.dtype.kind not in "biu")
    return next(weights, str(next(iter(tensors.values())).dtype))


def check_export_folder(directory: str | os.PathLike[str]) -> None:
    """Whether `save_drafter` may write here: a free place, an empty folder, or a drafter's checkpoint to be replaced.

    Raises CheckpointError for anything else: neither a target nor a file that no export wrote is ever overwritten.
    """
    directory = Path(directory)
    check_replaceable(directory)
    entries = directory.iterdir() if directory.exists() else ()
    others = sorted(entry.name for entry in entries if entry.name not in _WRITTEN)
    if (directory / "config.json").is_file():
        names = read_config(directory).get("architectures") or []
        # EAGLE drafts and Llama targets share an architecture's name; only a language model keeps its tensors under
        # "model.".
        language_model = any(name.startswith("model.") for name in TensorFolder(directory).names())
        if language_model or not set(names) & set(ARCHITECTURES):
            raise CheckpointError(
                f"{directory}: found a checkpoint of {names}, expected a free place or an earlier drafter; choose "
                "another name"
            )
    if others:
        raise CheckpointError(
            f"{directory}: found {others[0]}, which no export wrote, expected a free place or an earlier drafter "
            "alone; choose another name"
        )


def _source_folder(layout: Layout | None) -> TensorFolder | None:
    return TensorFolder(layout.directory) if layout is not None and layout.directory.is_dir() else None


def _unchanged_or(original: TensorFolder, name: str, narrow: np.ndarray, widened: np.ndarray) -> np.ndarray:
    """The file's own values when the narrower ones in memory are just their rounding, so that export gives the same
    bytes.
    """
    if name not in original.names() or original.shape(name) != narrow.shape:
        return widened
    value = original.read(name)
    return value if np.array_equal(value.astype(narrow.dtype), narrow) else widened
