"""Context K/V: every implementation against numpy, row by row, over poisoned rows and numbered pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Rows, Shared
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.models.config import ModelConfig
from jaxspec.models.layout import uniform_layout
from jaxspec.models.rope import rotary
from pallas_kernels.context_kv import api, tpu
from pallas_kernels.context_kv.rows import ContextRows, LayerWeights
from tests.helpers.kernels import assert_close, interpreted

pytestmark = pytest.mark.ci

R, PAGE, PAGES, EPS = 3, 4, 3, 1e-5
# rows, hidden, feature columns, K/V heads, head dimension, layers: nothing is a multiple of a tile
SHAPES = {"small": (21, 40, 72, 2, 16, 3), "one-layer": (5, 24, 24, 1, 64, 1), "wide": (19, 32, 300, 3, 8, 2)}


def draw(seed, shape="small", dtype=np.float32, normed=True):
    total, hidden, width, kv, dim, layers = SHAPES[shape]
    rng = np.random.default_rng(seed)
    slots = np.full(total, 0)
    requests = rng.integers(0, R, total)
    valid = rng.random(total) < 0.7
    free = [list(rng.permutation(PAGE * PAGES)) for _ in range(R)]
    for i in range(total):
        if valid[i] and not free[requests[i]]:
            valid[i] = False
        slots[i] = free[requests[i]].pop() if valid[i] else [-1, 0, 10**6][rng.integers(3)]
        requests[i] = requests[i] if valid[i] else [-1, 0, 99][rng.integers(3)]
    late = np.flatnonzero(valid)[-1]
    slots[late] = PAGE * PAGES  # past the context's limit: nothing may be written
    small = lambda *size: (rng.normal(size=size) / np.sqrt(size[-1])).astype(dtype)  # noqa: E731
    features = rng.normal(size=(total, width)).astype(dtype)
    features[~valid] = np.nan
    angles = rng.uniform(0, 100, (total, dim // 2))
    scale = lambda size: (1 + rng.normal(size=size) / 4).astype(dtype)  # noqa: E731
    return {
        "features": features, "fc": small(hidden, width), "hidden_norm": scale(hidden),
        "layers": [
            (small(kv * dim, hidden), small(kv * dim, hidden), scale(dim) if normed else None) for _ in range(layers)
        ],
        "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32),
        "pools": [rng.normal(size=(2 + R * PAGES, PAGE, 2 * kv, dim)).astype(dtype) for _ in range(layers)],
        "valid": valid, "requests": requests.astype(np.int32), "slots": slots.astype(np.int32),
        "table": (1 + rng.permutation(R * PAGES).reshape(R, PAGES)).astype(np.int32),
    }  # fmt: skip


@functools.cache
def compiled(name):
    def run(d):
        rows = ContextRows(d["valid"], d["requests"], d["slots"], d["table"])
        layers = [LayerWeights(*layer) for layer in d["layers"]]
        return api.context_kv(
            d["features"], d["fc"], d["hidden_norm"], layers, d["cos"], d["sin"], d["pools"], rows, EPS,
            implementation=name, **interpreted(name),
        )  # fmt: skip

    return jax.jit(run)


def oracle(d):
    """Pools after the writes, in float64 but for the roundings that the drafters do."""
    dtype = d["fc"].dtype
    rounded = lambda x: np.asarray(np.asarray(x, np.float64).astype(dtype), np.float64)  # noqa: E731

    def norm(x, weight):
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
        return rounded(rounded(x) * np.asarray(weight, np.float64))

    pools = [pool.copy() for pool in d["pools"]]
    for i in np.flatnonzero(d["valid"]):
        slot = d["slots"][i]
        if slot >= PAGE * PAGES:
            continue
        context = norm(
            rounded(np.asarray(d["fc"], np.float64) @ np.asarray(d["features"][i], np.float64)), d["hidden_norm"]
        )
        for pool, (k_proj, v_proj, k_norm) in zip(pools, d["layers"], strict=True):
            kv, dim = pool.shape[2] // 2, pool.shape[3]
            keys, values = (rounded(np.asarray(w, np.float64) @ context).reshape(kv, dim) for w in (k_proj, v_proj))
            if k_norm is not None:
                keys = norm(keys, k_norm)
            first, second = keys[:, : dim // 2], keys[:, dim // 2 :]
            cos, sin = d["cos"][i], d["sin"][i]
            keys = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
            place = pool[d["table"][d["requests"][i], slot // PAGE], slot % PAGE]
            place[0::2], place[1::2] = keys.astype(dtype), values.astype(dtype)
    return pools


def check(name, d):
    got = compiled(name)(d)
    for pool, right, before in zip(got, oracle(d), d["pools"], strict=True):
        assert_close(pool[1:], right[1:])
        untouched = (np.asarray(right, np.float32) == np.asarray(before, np.float32)).all(axis=(2, 3))
        untouched[0] = False  # page 0 is trash
        np.testing.assert_array_equal(np.asarray(pool)[untouched], before[untouched])


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_B62_B63_rows_equal_numpy_and_touch_no_other_slot(name, shape):
    for seed in range(4):
        check(name, draw(seed, shape))


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_B70_bfloat16_rounds_where_the_drafters_do(name):
    check(name, draw(10, dtype=jnp.bfloat16))


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_layers_without_a_key_norm(name):
    check(name, draw(11, normed=False))


@pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
def test_padding_alone_changes_no_page(name):
    d = draw(12)
    d["valid"][:] = False
    check(name, d)


def test_several_tiles_of_rows_and_a_partial_block_of_columns(monkeypatch):
    monkeypatch.setattr(tpu, "tuned", lambda *_: {"rows": 16, "columns": 128})
    compiled.cache_clear()  # the tiles are chosen while tracing
    check("tpu", draw(13, "wide"))
    compiled.cache_clear()


def test_a_drafters_commit_is_this_function():
    model = ModelConfig.from_hf({
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    })  # fmt: skip
    drafter = DFlash(fresh_config(model, num_layers=2, block_size=4, mask_token_id=3))
    params = drafter.init(jax.random.key(0))
    state = drafter.init_state(7, 4, jnp.float32)
    layout = uniform_layout(jnp.asarray([5, 0]), jnp.asarray([3, 2]), jnp.asarray([[3, 1, 6], [2, 5, 4]]), 4)
    features = jax.random.normal(jax.random.key(1), (8, params["fc"]["weight"].shape[1]))
    rows = Rows(features, jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32))
    shared = Shared(jnp.zeros((64, 32)), jnp.zeros((64, 32)))
    expected = drafter.commit(params, shared, state, rows, layout)
    layers = [
        LayerWeights(
            layer["self_attn"]["k_proj"]["weight"],
            layer["self_attn"]["v_proj"]["weight"],
            layer["self_attn"]["k_norm"]["weight"],
        )
        for layer in params["layers"]
    ]
    cos, sin = rotary(drafter.config.model.rope, 16, layout.positions)
    places = ContextRows(layout.valid, layout.requests, layout.slots, layout.page_table)
    for name in api.IMPLEMENTATIONS:
        pools = api.context_kv(
            features, params["fc"]["weight"], params["hidden_norm"]["weight"], layers, cos, sin, state, places,
            drafter.config.model.rms_norm_eps, implementation=name, **interpreted(name),
        )  # fmt: skip
        for pool, right in zip(pools, expected, strict=True):
            assert_close(pool[1:], right[1:])


def test_wrong_arguments_are_named():
    d = draw(0)
    rows = ContextRows(d["valid"], d["requests"], d["slots"], d["table"])
    layers = [LayerWeights(*layer) for layer in d["layers"]]
    rest = d["cos"], d["sin"], [jnp.asarray(pool) for pool in d["pools"]], rows, EPS
    given = d["features"], d["fc"], d["hidden_norm"]
    with pytest.raises(ValueError, match="'turbo'"):
        api.context_kv(*given, layers, *rest, implementation="turbo")
    with pytest.raises(ValueError, match="k_proj, v_proj"):
        api.context_kv(*given, [LayerWeights(d["fc"], d["fc"])] * 3, *rest)
    with pytest.raises(ValueError, match="features, fc, cos"):
        api.context_kv(d["features"][:, 1:], *given[1:], layers, *rest)
    with pytest.raises(ValueError, match="k_norm: found 2 of 3"):
        mixed = [LayerWeights(layers[0].k_proj, layers[0].v_proj), *layers[1:]]
        api.context_kv(*given, mixed, *rest, implementation="tpu", **interpreted("tpu"))
    assert len(api.context_kv(*given, layers, *rest, implementation="auto")) == 3
