"""Philox4x32-10 uniforms that depend on nothing but (key, row, step, token): a draw source for DSpark's walk.

The counter layout is the one of SGLang's DSpark sampler, so that a block can be sampled with the very draws of that
server: counter = (token // 4, row, step, STREAM), word = token % 4, u = (word + 1/2) / 2^32. The generator itself is
the one of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). Only uint32 arithmetic: no x64 mode
is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
STREAM = 3  # the fourth counter word of the sampler's stream
LARGEST_UNIFORM = 1.0 - 2.0**-24  # rounding may reach 1, and a Gumbel draw at u = 1 is infinite

Words = tuple[UInt32[Array, "*n"], UInt32[Array, "*n"], UInt32[Array, "*n"], UInt32[Array, "*n"]]


def split_key(key: int) -> tuple[int, int]:
    """The two 32-bit key words of a 64-bit key, low word first."""
    return key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF


def multiply(a: int, b: UInt32[Array, "*n"]) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """High and low words of the 64-bit product a * b, from 16-bit halves."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & jnp.uint32(0xFFFF), b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (carry >> 16), jnp.uint32(a) * b


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """The four output words of each counter under one key."""
    c0, c1, c2, c3 = (jnp.asarray(word, jnp.uint32) for word in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = multiply(MULTIPLIERS[0], c0)
        high1, low1 = multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ jnp.uint32(k0), low1, high0 ^ c3 ^ jnp.uint32(k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(key: int, rows: Int[Array, "R"], step: int | Int[Array, ""], vocab: int) -> Float[Array, "R V"]:
    """Float32 uniforms in (0, 1) of every token of the given rows at one step of the walk.

    `key` is a 64-bit integer. The draw of a row does not depend on the other rows, nor on the size of the batch.
    """
    groups = jnp.arange(-(-vocab // 4), dtype=jnp.uint32)
    shape = (rows.shape[0], groups.shape[0])
    counter = (
        jnp.broadcast_to(groups, shape),
        jnp.broadcast_to(jnp.asarray(rows).astype(jnp.uint32)[:, None], shape),
        jnp.full(shape, step, jnp.uint32),
        jnp.full(shape, STREAM, jnp.uint32),
    )
    words = jnp.stack(philox4x32(counter, split_key(key)), axis=-1).reshape(rows.shape[0], -1)[:, :vocab]
    scaled = words.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return jnp.minimum(scaled, np.float32(LARGEST_UNIFORM))


def gumbel(uniform: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Standard Gumbel noise of uniforms: -log of an exponential draw -log(1 - u)."""
    return -jnp.log(-jnp.log1p(-uniform))


def gumbel_draw(
    key: int, rows: Int[Array, "R"], temperatures: Float[Array, "R"]
) -> Callable[[int, Float[Array, "R V"]], Int[Array, "R"]]:
    """A draw for `DSpark.walk`: Gumbel-max at each row's temperature, the argmax for rows of temperature 0."""

    def draw(step: int, logits: Float[Array, "R V"]) -> Int[Array, "R"]:
        sampled = temperatures > 0
        noise = gumbel(uniforms(key, rows, step, logits.shape[-1]))
        noisy = logits / jnp.where(sampled, temperatures, 1.0)[:, None] + noise
        return jnp.argmax(jnp.where(sampled[:, None], noisy, logits), axis=-1).astype(jnp.int32)

    return draw
