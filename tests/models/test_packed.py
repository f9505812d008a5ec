"""Packed layers compute what the checkpoint's own do, whatever norms, biases and attention a family has."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.attention import PagedParts
from jaxspec.models.cache import init_pool
from jaxspec.models.layers import flatten
from jaxspec.models.layout import uniform_layout
from jaxspec.models.packed import is_packed, pack
from pallas_kernels.rotate_write import api as rotate_write
from pallas_kernels.verify_attention import api as verify_attention
from tests.helpers.worlds import tiny_target

CLOSE = 2e-5  # a wider product may sum in another order
FAMILIES = {
    "norms": {"qk_norm": True, "qkv_bias": False, "mlp_bias": False, "o_bias": False},
    "biases": {"qk_norm": False, "qkv_bias": True, "mlp_bias": True, "o_bias": True},
}


def family(name: str):
    target = tiny_target()
    model = dataclasses.replace(target.model, config=dataclasses.replace(target.model.config, **FAMILIES[name]))
    return model, model.init(jax.random.key(3), scale=0.3)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_packed_target_computes_the_same(name):
    model, params = family(name)
    packed = pack(params, model.config)
    assert is_packed(packed["model"]["layers"]) and not is_packed(params["model"]["layers"])
    names = {key.split(".")[-2] for key in flatten(packed) if ".layers.0." in key}
    assert {"qkv_proj", "gate_up_proj"} <= names
    assert not names & {"q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate_proj", "up_proj"}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 9)))
    plain, joint = (jax.jit(model.forward_sequences)(each, tokens) for each in (params, packed))
    np.testing.assert_allclose(joint.hidden, plain.hidden, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_kernels_path_writes_and_sees_the_same_pages(name, monkeypatch):
    """Two groups of rows, as a round has them: a request that decodes, one that is not live, and a prompt's piece."""
    for module in (rotate_write, verify_attention):
        kernel = module.IMPLEMENTATIONS["gpu"]
        monkeypatch.setitem(module.IMPLEMENTATIONS, "gpu", lambda *x, kernel=kernel: kernel(*x, interpret=True))
    model, params = family(name)
    config, rng = model.config, np.random.default_rng(1)
    layouts = (
        uniform_layout(jnp.asarray([5, 0]), jnp.asarray([2, 0]), jnp.asarray([[1, 2], [3, 4]], jnp.int32), 2),
        uniform_layout(jnp.asarray([0]), jnp.asarray([3]), jnp.asarray([[5, 6]], jnp.int32), 4),
    )
    valid = np.concatenate([layout.valid for layout in layouts])
    pools = [
        jnp.asarray(rng.normal(size=pool.shape), jnp.float32)
        for pool in [init_pool(8, 4, config.num_kv_heads, config.head_dim, jnp.float32)] * config.num_layers
    ]
    tokens = jnp.asarray(rng.integers(0, 60, valid.size))
    positions = jnp.concatenate([layout.positions for layout in layouts])

    def run(params, attention):
        return jax.jit(lambda params, pools: model.forward(params, tokens, positions, attention, pools))(params, pools)

    plain = run(params, PagedParts(layouts))
    joined = run(pack(params, config), PagedParts(layouts, "gpu"))
    np.testing.assert_allclose(joined.hidden[valid], plain.hidden[valid], rtol=0, atol=CLOSE)
    for got, wanted in zip(joined.caches, plain.caches, strict=True):
        np.testing.assert_allclose(got[1:], wanted[1:], rtol=0, atol=CLOSE)
