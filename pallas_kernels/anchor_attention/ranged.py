"""Attention of rows that each see two key ranges, with its gradient: what the TPU and the GPU kernels share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.anchor_attention.ranges import Ranges


class Keys(NamedTuple):
    """Context K and V [B, S, kv, D], own K and V [B, O, kv, D]."""

    context_k: Array
    context_v: Array
    own_k: Array
    own_v: Array


class Kernels(Protocol):
    """An implementation: hashable, since it is a static argument of the traced program."""

    def multiples(self, q: Array, keys: Keys) -> tuple[int, int, int]:
        """What R, S and O must be multiples of. Raises ValueError for operands the kernels do not take."""
        ...

    def forward(self, q: Array, keys: Keys, ranges: Ranges, scale: float) -> tuple[Array, Array]:
        """Output [B, R, heads, D] and natural log-sum-exp [B, heads, R]."""
        ...

    def backward(
        self, q: Array, keys: Keys, ranges: Ranges, lse: Array, delta: Array, d_out: Array, scale: float
    ) -> tuple[Array, Keys]:
        """Gradients of q and keys; delta [B, heads, R] = sum(out * d_out) less the gradient of lse."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ranged(kernels: Kernels, scale: float, q: Array, keys: Keys, ranges: Ranges) -> tuple[Array, Array]:
    return kernels.forward(q, keys, ranges, scale)


def _ranged_fwd(kernels: Kernels, scale: float, q: Array, keys: Keys, ranges: Ranges) -> tuple[Any, Any]:
    out, lse = kernels.forward(q, keys, ranges, scale)
    return (out, lse), (q, keys, ranges, out, lse)


def _ranged_bwd(kernels: Kernels, scale: float, residuals: Any, gradients: Any) -> tuple[Any, Any, None]:
    q, keys, ranges, out, lse = residuals
    d_out, d_lse = gradients
    delta = jnp.einsum("brhd,brhd->bhr", out, d_out, preferred_element_type=jnp.float32) - d_lse
    return (*kernels.backward(q, keys, ranges, lse, delta, d_out, scale), None)


_ranged.defvjp(_ranged_fwd, _ranged_bwd)


def padded_dim(dim: int) -> int:
    """The next of 64, 128 and 256. Raises ValueError past them."""
    for wide in (64, 128, 256):
        if dim <= wide:
            return wide
    raise ValueError(f"head dim: found {dim}, expected at most 256")


def _pad(x: Array, axis: int, multiple: int) -> Array:
    short = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x


def _readable(keys: Keys, ranges: Ranges) -> Keys:
    """Context rows before the first and behind the last visible one are zeros: whatever an unwritten cache holds there,
    a weight of zero times it must not be NaN."""
    index = jnp.arange(keys.context_k.shape[1])
    seen = ranges.lo < ranges.hi
    first = jnp.min(ranges.lo, axis=1, where=seen, initial=index.size)
    seen_rows = (index >= first[:, None]) & (index < jnp.max(ranges.hi, axis=1)[:, None])
    clean = lambda x: jnp.where(seen_rows[:, :, None, None], x, 0)  # noqa: E731
    return keys._replace(context_k=clean(keys.context_k), context_v=clean(keys.context_v))


def ranged_attention(
    kernels: Kernels, q: Float[Array, "B R heads D"], keys: Keys, ranges: Ranges
) -> tuple[Float[Array, "B R heads D"], Float[Array, "B heads R"]]:
    """One softmax over both ranges of each row, in float32; and its natural log-sum-exp.

    A row that sees nothing gives zeros and -inf, and no gradient. Rows, keys and head dim are padded to what the
    kernels take. Raises ValueError for operands that they do not take.
    """
    rows, dim = q.shape[1], q.shape[-1]
    if q.shape[2] % keys.context_k.shape[2]:
        raise ValueError(f"anchor_attention: found {q.shape[2]} query heads over {keys.context_k.shape[2]} K/V heads")
    row_multiple, key_multiple, own_multiple = kernels.multiples(q, keys)
    wide = padded_dim(dim)
    ready = _pad(_pad(q, 3, wide), 1, row_multiple)
    multiples = (key_multiple, key_multiple, own_multiple, own_multiple)
    keys = _readable(keys, ranges)
    ready_keys = Keys(*(_pad(_pad(x, 3, wide), 1, m) for x, m in zip(keys, multiples, strict=True)))
    ready_ranges = ranges.padded(ready.shape[1] - rows)
    out, lse = _ranged(kernels, dim**-0.5, ready, ready_keys, ready_ranges)
    return out[:, :rows, :, :dim], lse[:, :, :rows]
