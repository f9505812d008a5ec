"""The Philox draw source: known answers of the generator, and the stream that SGLang's sampler uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.philox import gumbel, gumbel_draw, philox4x32, uniforms

pytestmark = pytest.mark.ci

# published known-answer vectors of Philox4x32-10: (counter, key, output)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    found = philox4x32(tuple(jnp.asarray(word, jnp.uint32) for word in counter), key)
    assert tuple(int(word) for word in found) == words


def test_no_x64_is_needed():
    assert not jax.config.jax_enable_x64
    assert uniforms(2**63 + 5, jnp.arange(2), 0, 8).dtype == jnp.float32


def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_vocabulary():
    whole = uniforms(77, jnp.arange(5), 2, 19)
    np.testing.assert_array_equal(uniforms(77, jnp.array([3]), 2, 19)[0], whole[3])
    np.testing.assert_array_equal(uniforms(77, jnp.arange(5), 2, 7), whole[:, :7])


def test_key_row_step_and_token_all_matter():
    base = np.asarray(uniforms(1, jnp.arange(3), 0, 64))
    assert np.unique(base).size == base.size
    for other in (
        uniforms(2, jnp.arange(3), 0, 64),
        uniforms(1 + 2**32, jnp.arange(3), 0, 64),
        uniforms(1, jnp.arange(3), 1, 64),
    ):
        assert not np.isin(np.asarray(other), base).any()


def test_uniforms_are_uniform_and_open():
    u = np.asarray(uniforms(9, jnp.arange(64), 0, 2048)).ravel()
    assert u.min() > 0 and u.max() < 1
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert (
        np.sum((counts - counts.mean()) ** 2 / counts.mean()) < 120
    )  # chi-square with 63 degrees of freedom, p about 1e-5
    assert np.isfinite(np.asarray(gumbel(jnp.array([1.2e-10, 1 - 2.0**-24], jnp.float32)))).all()


def test_gumbel_draw_follows_the_softmax_and_leaves_greedy_rows_alone():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    rows = jnp.arange(20000)
    draw = gumbel_draw(5, rows, jnp.where(rows % 2 == 0, 1.0, 0.0))
    tokens = np.asarray(draw(0, jnp.broadcast_to(logits, (20000, 4))))
    assert (tokens[1::2] == 0).all()
    np.testing.assert_allclose(np.bincount(tokens[::2], minlength=4) / 10000, [0.5, 0.3, 0.15, 0.05], atol=0.02)
    cold = gumbel_draw(5, rows, jnp.full((20000,), 0.5))(0, jnp.broadcast_to(logits, (20000, 4)))
    squares = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(np.bincount(np.asarray(cold), minlength=4) / 20000, squares / squares.sum(), atol=0.02)
