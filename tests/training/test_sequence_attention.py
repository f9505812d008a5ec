"""Whole sequences by the blocks' kernels, every row a block of its own: what dense causal attention says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import lookahead
from jaxspec.models.attention import DenseCausal
from jaxspec.training.features import Causal
from pallas_kernels.anchor_attention.api import use_implementation

SIZES = [(2, 70, 6, 2, 16), (1, 130, 3, 1, 64)]  # sequences, rows, heads, K/V heads, dim


def draw(size, dtype=jnp.float32):
    batch, rows, heads, kv, dim = size
    keys = jax.random.split(jax.random.key(rows), 3)
    return [jax.random.normal(key, (batch, rows, n, dim), dtype) for key, n in zip(keys, (heads, kv, kv), strict=True)]


def attend(attention, arrays, window=0):
    """Jitted anew: what is selected is no part of jax's key."""
    return np.asarray(jax.jit(lambda q, k, v: attention(q, k, v, None, window)[0])(*arrays), np.float32)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("tpu", marks=pytest.mark.ci)])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_sees_itself_and_what_is_before_it_within_its_window(size, implementation):
    arrays = draw(size)
    with use_implementation(implementation, interpret=implementation == "tpu"):
        for window in (0, 1, 9):
            expected = attend(DenseCausal(), arrays, window)
            np.testing.assert_allclose(attend(Causal(), arrays, window), expected, atol=2e-5)
    first = np.asarray(arrays[2])[:, 0]  # the first row has nothing but itself
    group = size[2] // size[3]
    np.testing.assert_allclose(attend(Causal(), arrays)[:, 0], np.repeat(first, group, axis=1), atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("tpu", marks=pytest.mark.ci)])
def test_the_first_step_of_a_training_time_test_is_causal_inside_its_sequence(implementation):
    arrays, lengths = draw(SIZES[0]), jnp.asarray([70, 31])
    real = np.arange(70) < np.asarray(lengths)[:, None]
    with use_implementation(implementation, interpret=implementation == "tpu"):
        for given in (lengths, None):
            found = attend(lookahead.Causal(given), arrays)
            np.testing.assert_allclose(found[real], attend(DenseCausal(given), arrays)[real], atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 4096, 32, 8, 128), (2, 700, 9, 3, 64)])
def test_the_gpu_kernels_say_what_dense_attention_says(size):
    arrays = draw(size, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays]
    for window in (0, 128):
        expected = attend(DenseCausal(), wide, window)
        with use_implementation("gpu"):
            np.testing.assert_allclose(attend(Causal(), arrays, window), expected, atol=2e-2)
            if not window:
                np.testing.assert_allclose(attend(lookahead.Causal(None), arrays), expected, atol=2e-2)
