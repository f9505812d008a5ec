"""DFlash 2's grouped dynamic convolution: each row of a block mixes in the rows before it, with kernels of its own.

A sublayer (attention or MLP) is wrapped on both sides:

    y  = norm(x)
    y' = conv(y, side 0);  a = sublayer(y');  a' = conv(a, side 1);  x + a'
    conv(z)[j, ch] = sum over taps t of (base[side, t, ch] + delta[j, side, t, group of ch]) z[j - t, ch]

The deltas of both sides are predicted from the same y, before any convolution, by the row that they are used on.
Rows before the block's first are zero: a block never sees another one, and the context is not convolved. With base = 1
on the row itself, 0 elsewhere and deltas of 0 the wrapper is the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayer

SIDES = 2  # 0: before the sublayer, 1: after it


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """Taps of the kernel (the row itself counts) and channels that share a dynamic coefficient."""

    kernel_size: int = 2
    group_size: int = 16

    def check(self, hidden: int, block: int) -> None:
        """Raises ConfigError where the convolution does not fit the block or the width."""
        if not 1 <= self.kernel_size <= block:
            raise ConfigError(f"conv_kernel_size: found {self.kernel_size}, expected 1 to block_size = {block}")
        if self.group_size < 1 or hidden % self.group_size:
            raise ConfigError(f"conv_group_size: found {self.group_size}, expected a divisor of hidden_size = {hidden}")


def convolve(
    rows: Float[Array, "*blocks block H"],
    base: Float[Array, "taps H"],
    deltas: Float[Array, "*blocks block taps groups"],
) -> Float[Array, "*blocks block H"]:
    """One side, summed in float32 and rounded once."""
    block, width = rows.shape[-2:]
    wide = rows.astype(jnp.float32)
    kernels = base.astype(jnp.float32) + jnp.repeat(deltas.astype(jnp.float32), width // deltas.shape[-1], axis=-1)
    mixed = kernels[..., 0, :] * wide
    for tap in range(1, base.shape[0]):
        before = jnp.pad(wide[..., : block - tap, :], [(0, 0)] * (rows.ndim - 2) + [(tap, 0), (0, 0)])
        mixed = mixed + kernels[..., tap, :] * before
    return mixed.astype(rows.dtype)


class GroupedConv(nnx.Module):
    """`base_kernel` [side, tap, H] and the projection of a row to its deltas [side, tap, group], side-major."""

    def __init__(self, hidden: int, config: ConvConfig):
        self.base_kernel = nnx.Param(jnp.zeros((SIDES, config.kernel_size, hidden)))
        self.kernel_projection = ly.Linear(hidden, SIDES * config.kernel_size * (hidden // config.group_size))

    def deltas(self, normed: Float[Array, "*rows H"]) -> Float[Array, "*rows sides taps groups"]:
        """What each row adds to the base kernels."""
        return self.kernel_projection(normed).reshape(*normed.shape[:-1], SIDES, self.base_kernel.shape[1], -1)

    def __call__(
        self, normed: Float[Array, "*blocks block H"], sublayer: Callable[[Array], Array]
    ) -> tuple[Float[Array, "*blocks block H"], dict[str, Array]]:
        """The wrapped sublayer's output, and the rows on the way (unused, they cost nothing under jit)."""
        deltas, base = self.deltas(normed), self.base_kernel[...]
        prepared = convolve(normed, base[0], deltas[..., 0, :, :])
        finished = convolve(sublayer(prepared), base[1], deltas[..., 1, :, :])
        return finished, {"in": normed, "prepared": prepared, "finished": finished}


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with both sublayers wrapped; called as a DecoderLayer, it returns the convolutions' rows too."""

    def __init__(self, model: ModelConfig, config: ConvConfig):
        super().__init__(model)
        self.attention_conv = GroupedConv(model.hidden_size, config)
        self.mlp_conv = GroupedConv(model.hidden_size, config)

    def __call__(
        self, x: Array, cos: Array, sin: Array, attend: Callable[[Array, Array, Array], tuple[Array, Any]]
    ) -> tuple[Array, dict[str, dict[str, Array]]]:
        def attention(rows: Array) -> Array:
            keys, values = self.self_attn.keys_values(rows, cos, sin)
            return self.self_attn.output(attend(self.self_attn.queries(rows, cos, sin), keys, values)[0])

        attended, first = self.attention_conv(self.input_layernorm(x), attention)
        x = x + attended
        mixed, second = self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return x + mixed, {"attention_conv": first, "mlp_conv": second}


def identity(params: ly.Params) -> ly.Params:
    """A layer's parameters with both convolutions doing nothing."""
    same = {}
    for name in ("attention_conv", "mlp_conv"):
        base, projection = params[name]["base_kernel"], params[name]["kernel_projection"]["weight"]
        same[name] = {
            "base_kernel": jnp.zeros_like(base).at[:, 0].set(1),
            "kernel_projection": {"weight": jnp.zeros_like(projection)},
        }
    return params | same
