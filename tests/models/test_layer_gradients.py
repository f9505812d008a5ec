"""Gradients of the building blocks in a narrow dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import layers as ly


def plain(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


@pytest.mark.parametrize("shape", [(16,), (3, 16), (3, 1, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_a_norms_weight_gets_the_sum_of_all_its_rows(shape, dtype, tolerance):
    """Thousands of rows, whose products a running sum in bfloat16 would lose."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, slope = (jax.random.normal(key, (2000, *shape[:-2], 3, 16)).astype(dtype) for key in keys[:2])
    weight = (1 + 0.1 * jax.random.normal(keys[2], shape)).astype(dtype)
    wide = [value.astype(jnp.float32) for value in (x, weight)]

    def loss(function):
        return lambda x, weight: jnp.sum(function(x, weight).astype(jnp.float32) * slope.astype(jnp.float32))

    found = jax.jit(jax.grad(loss(lambda x, weight: ly.rms_norm(x, weight, 1e-6)), (0, 1)))(x, weight)
    for one, other in zip(found, jax.grad(loss(plain), (0, 1))(*wide), strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert np.linalg.norm(one.astype(np.float32) - other) <= tolerance * np.linalg.norm(other)
