"""Public entry of anchor-block attention: the implementation is named, never guessed silently."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import tuning
from pallas_kernels.anchor_attention import reference
from pallas_kernels.anchor_attention.ranged import Kernels, Keys, padded_dim, ranged_attention
from pallas_kernels.anchor_attention.ranges import Ranges, Scalar, block_ranges, lookahead_ranges

IMPLEMENTATIONS = ("auto", "reference", "tpu", "gpu")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Selection:
    name: str = "reference"
    interpret: Any = False
    batch_axes: tuple[str, ...] = ()
    head_axis: str | None = None


_selected = _Selection()


@contextlib.contextmanager
def use_implementation(
    name: str, interpret: Any = False, batch_axes: tuple[str, ...] = (), head_axis: str | None = None
) -> Iterator[None]:
    """Selects what calls without an `implementation` run, for the whole process. `interpret` is pallas_call's, for
    "tpu" on a machine without one. In a program that is traced under a mesh with these axes every device runs the
    kernel on its own sequences and heads; a compiler cannot split a kernel by itself.

    A compiled program does not know what it was traced with, so jax's caches are cleared on both ends of a change.
    """
    global _selected
    before, wanted = _selected, _Selection(_known(name), interpret, batch_axes, head_axis)
    if wanted == before:
        yield
        return
    _selected = wanted
    jax.clear_caches()
    try:
        yield
    finally:
        _selected = before
        jax.clear_caches()


def _known(name: str) -> str:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: found {name!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    return name


def _selection(implementation: str | None) -> _Selection:
    return _selected if implementation is None else dataclasses.replace(_selected, name=_known(implementation))


def tuned_tpu(q: Array, keys: Keys, interpret: Any = False) -> Kernels:
    """The TPU kernels with the chip's tiles: at most 512 lanes x 512 keys of scores, half that in float32."""
    from pallas_kernels.anchor_attention.tpu import TpuKernels, TpuTiles

    group = q.shape[2] // keys.context_k.shape[2]
    lanes = 128 * max(1, 4 // group) * group
    most = (1 << (17 if q.dtype == jnp.float32 else 18)) // lanes
    widest = max(1 << (most.bit_length() - 1), 128)  # a power of two, which divides common lengths
    longest = -(-keys.context_k.shape[1] // 128) * 128
    guess = {"rows": lanes // group, "kv": min(widest, longest), "own": 128}
    return TpuKernels(TpuTiles(**tuning.tiles("anchor_attention", _shape(q, keys), guess)), interpret)


def tuned_gpu(q: Array, keys: Keys) -> Kernels:
    """The GPU kernels with the chip's tiles. Raises ValueError on a GPU without wgmma."""
    from pallas_kernels.anchor_attention.gpu import GpuKernels, GpuTiles

    device = jax.devices()[0]
    if device.platform == "gpu" and device.compute_capability != "9.0":
        raise ValueError(
            f"anchor_attention, gpu: found compute capability {device.compute_capability}, expected 9.0 (Hopper)"
        )
    wide = GpuTiles(stages=4, dq_kv=128, dq_stages=4, dkv_stages=4)  # a narrow head leaves shared memory for more
    guess = dataclasses.asdict(wide if padded_dim(q.shape[-1]) == 64 else GpuTiles())
    return GpuKernels(GpuTiles(**tuning.tiles("anchor_attention", _shape(q, keys), guess)))


def _shape(q: Array, keys: Keys) -> str:
    return f"{q.dtype} d{padded_dim(q.shape[-1])} group{q.shape[2] // keys.context_k.shape[2]}"


@functools.cache
def _say(chosen: str, reason: str) -> None:
    log.info("anchor_attention: auto chose %s (%s)", chosen, reason)


def _kernels(selection: _Selection, q: Array, keys: Keys) -> Kernels | None:
    """The kernels, or None for the reference."""
    name, kind = selection.name, ""
    if name == "auto":
        kind = tuning.chip()
        name = "tpu" if kind.startswith("TPU") else "gpu" if jax.default_backend() == "gpu" else "reference"
    if name == "reference":
        if kind:
            _say(name, f"on {kind}")
        return None
    try:
        kernels = tuned_tpu(q, keys, selection.interpret) if name == "tpu" else tuned_gpu(q, keys)
        kernels.multiples(q, keys)
    except ValueError as problem:
        if not kind:
            raise
        _say("reference", str(problem))
        return None
    if kind:
        _say(name, f"on {kind}")
    return kernels


def _attend(selection: _Selection, kernels: Kernels, q: Array, keys: Keys, ranges: Ranges) -> Array:
    def own(q: Array, keys: Keys, ranges: Ranges) -> Array:
        return ranged_attention(kernels, q, keys, ranges)[0]

    mesh = jax.sharding.get_abstract_mesh()
    batch = tuple(axis for axis in selection.batch_axes if axis in mesh.axis_names)
    heads = selection.head_axis if selection.head_axis in mesh.axis_names else None
    if heads is not None and keys.context_k.shape[2] % mesh.shape[heads]:
        heads = None  # K/V heads that the devices cannot share out are on each of them
    if math.prod(mesh.shape[axis] for axis in (*batch, *filter(None, [heads]))) == 1:
        return own(q, keys, ranges)
    arrays, numbers = P(batch, None, heads), P(batch)
    specs = arrays, Keys(*[arrays] * 4), Ranges(*[numbers] * 4)
    return jax.shard_map(own, in_specs=specs, out_specs=arrays, check_vma=False)(q, keys, ranges)


def anchor_attention(
    q: Float[Array, "B N block heads D"],
    context_k: Float[Array, "B S kv D"],
    context_v: Float[Array, "B S kv D"],
    block_k: Float[Array, "B N block kv D"],
    block_v: Float[Array, "B N block kv D"],
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    window: Scalar = 0,
    causal: Scalar = False,
    inner_window: Scalar = 0,
    starts: Int[Array, "B N"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B N block heads D"]:
    """See `reference.anchor_attention`; the kernels are fastest where the anchors of a sequence are sorted.

    implementation: one of IMPLEMENTATIONS; None is what `use_implementation` selected, at first the reference. "auto"
    takes the kernel of the device, or the reference where it has none for the operands, and logs which, once.

    Raises ValueError for a name that does not exist and for operands that the named implementation does not take.
    """
    selection = _selection(implementation)
    batch, count, block = q.shape[:3]
    rows = lambda x: x.reshape(batch, count * block, *x.shape[3:])  # noqa: E731
    keys = Keys(context_k, context_v, rows(block_k), rows(block_v))
    kernels = _kernels(selection, rows(q), keys)
    if kernels is None:
        operands = (q, context_k, context_v, block_k, block_v, anchors, keep)
        return reference.anchor_attention(*operands, window, causal, inner_window, starts)
    ranges = block_ranges(anchors, keep, block, context_k.shape[1], window, causal, inner_window, starts)
    return _attend(selection, kernels, rows(q), keys, ranges).reshape(q.shape)


def lookahead_attention(
    q: Float[Array, "B S heads D"],
    first_k: Float[Array, "B S kv D"],
    first_v: Float[Array, "B S kv D"],
    own_k: Float[Array, "B S steps kv D"],
    own_v: Float[Array, "B S steps kv D"],
    index: Scalar,
    lengths: Int[Array, "B"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "B S heads D"]:
    """See `reference.lookahead_attention`; implementation as in `anchor_attention`. Every row is a block of its own
    whose context ends behind itself."""
    selection = _selection(implementation)
    batch, rows, steps = own_k.shape[:3]
    keys = Keys(first_k, first_v, *(x.reshape(batch, rows * steps, *x.shape[3:]) for x in (own_k, own_v)))
    kernels = _kernels(selection, q, keys)
    if kernels is None:
        return reference.lookahead_attention(q, first_k, first_v, own_k, own_v, index, lengths)
    return _attend(selection, kernels, q, keys, lookahead_ranges(batch, rows, steps, index, lengths))
