"""Which axis of a mesh splits which parameter, and what a mesh refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.decoding.plan import Schedule
from jaxspec.errors import ConfigError
from jaxspec.models.cache import init_pool
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten
from jaxspec.models.quantization import is_quantised, quantise_weight
from jaxspec.parallel.mesh import CHIPS, placement, tpu_devices
from jaxspec.parallel.rules import ServingRules, anywhere, heads_apart, rows_apart, top_k, vocab_apart, whole
from jaxspec.serving.cost import unmeasured
from jaxspec.serving.drafting import Drafted, Drafting
from jaxspec.serving.sharded import ShardedEngine, drafter_model
from tests.helpers.worlds import tiny_draft, tiny_target
from tests.parallel.collectives import groups_of, largest_across

CONFIG = tiny_target().model.config  # 4 heads, 2 K/V heads, MLP 48, vocabulary 64


def test_every_matrix_of_a_layer_is_split_and_every_vector_of_it_whole():
    rules = ServingRules.of(CONFIG, 2)
    model = Decoder(dataclasses.replace(CONFIG, qkv_bias=True, mlp_bias=True))
    for name, leaf in flatten(model.abstract_params()).items():
        spec = rules.parameter(name, leaf.shape)
        split = [axis for axis in spec if axis]
        whole = "norm" in name or name.endswith(("down_proj.bias", "o_proj.bias"))
        assert split == ([] if whole else ["tensor"]), name


@pytest.mark.parametrize(("tensor", "kv"), [(1, "tensor"), (2, "tensor"), (4, None)])
def test_kv_heads_that_do_not_divide_are_on_every_shard(tensor: int, kv: str | None):
    rules = ServingRules.of(CONFIG, tensor)
    assert rules.parameter("model.layers.0.self_attn.k_proj.weight", (16, 32)) == P(kv, None)
    assert rules.parameter("layers.1.self_attn.v_proj_target.weight", (16, 32)) == P(kv, None)
    pool = jax.eval_shape(lambda: init_pool(5, 8, 2, 8, jnp.float32))
    assert rules.pools([pool, jnp.zeros(3)], 5, 8) == [P(None, None, kv), P()]


def test_a_gate_outside_the_mlp_is_whole():
    assert ServingRules().parameter("markov_head.gate_proj.weight", (4, 36)) == P()
    assert ServingRules().parameter("layers.0.mlp.gate_proj.weight", (48, 32)) == P("tensor", None)


def test_scales_follow_the_rows_of_their_matrix():
    rules = ServingRules.of(CONFIG, 2)
    params = {"self_attn": {"q_proj": {"weight": jnp.ones((32, 32))}, "o_proj": {"weight": jnp.ones((32, 32))}}}
    params = jax.tree.map(quantise_weight, params)
    specs = rules.parameters({"model": {"layers": [params]}})["model"]["layers"][0]["self_attn"]
    assert (specs["q_proj"]["weight"].qvalue, specs["q_proj"]["weight"].scale) == (P("tensor", None), P("tensor", None))
    assert (specs["o_proj"]["weight"].qvalue, specs["o_proj"]["weight"].scale) == (P(None, "tensor"), P(None, None))
    assert is_quantised("model.layers.0.self_attn.q_proj.weight") and not is_quantised("lm_head.weight")


@pytest.mark.parametrize(
    ("field", "tensor", "name"), [("num_heads", 8, "num_heads 4"), ("intermediate_size", 2, "intermediate_size 49"),
                                  ("vocab_size", 2, "vocab_size 65")],
)  # fmt: skip
def test_what_does_not_divide_is_refused_by_name(field: str, tensor: int, name: str):
    odd = {"num_heads": 4, "intermediate_size": 49, "vocab_size": 65}[field]
    with pytest.raises(ConfigError, match=rf"mesh\.tensor: found {tensor}, expected a divisor of the target's {name}"):
        ServingRules.of(dataclasses.replace(CONFIG, **{field: odd}), tensor)


def test_slots_pages_and_devices_that_do_not_divide_are_refused_by_name():
    target = tiny_target()
    with pytest.raises(ConfigError, match=r"mesh\.data x mesh\.tensor: found 2 x 1, expected at most 1"):
        placement(2, 1, jax.devices()[:1])
    two = placement(2, 1, [_Device(0), _Device(1)], abstract=True)
    for key, size in (("num_slots", 3), ("num_pages", 33)):
        with pytest.raises(ConfigError, match=rf"engine\.{key}: found {size}, expected a multiple of mesh\.data 2"):
            ShardedEngine(target, placement=two, **{"num_slots": 4, "max_context": 32, key: size})


class _Device:
    """Stands for a device in a mesh that nothing is put on."""

    platform, device_kind, process_index = "cpu", "none", 0

    def __init__(self, number: int):
        self.id = number


def test_one_array_stays_one_array():
    table = jnp.ones((4, 2))
    placed = placement(1, 1).put({"embedding": table, "head": table, "norm": jnp.ones(2)}, {
        "embedding": P("tensor", None), "head": P("tensor", None), "norm": P()})  # fmt: skip
    assert placed["embedding"] is placed["head"] and placed["embedding"].sharding.spec == P("tensor", None)


def test_a_larger_bucket_is_filled_with_real_drafts():
    drafting = Drafting(
        4, 7, table=unmeasured(1), schedule=Schedule(7), shares=(0.25, 0.5), align=True, pause=False,
        clock=lambda: 0.0, read=lambda x: x,
    )  # fmt: skip
    requests: list[Any] = [object(), object(), object()]
    small = Drafted(requests[:2], 3, 8, True)
    # 16 rows: 3 anchors, one of them paused, and 13 proposals of the 14 that two drafters have
    assert drafting.filled(small, requests, 16) == Drafted(requests[:2], 13, 16, True)
    assert drafting.filled(Drafted([], 0, 4, False), requests, 16) == Drafted([], 0, 16, False)
    alone = Drafting(
        4, 7, table=None, schedule=None, shares=(), align=True, pause=False, clock=lambda: 0.0, read=lambda x: x
    )
    assert alone.filled(small, requests, 32) == Drafted(requests[:2], 3, 32, True)


def test_a_drafter_is_split_by_its_own_heads():
    target = tiny_target()
    assert drafter_model(tiny_draft(target, "dflash").drafter).num_heads == 4
    with pytest.raises(ConfigError, match=r"the drafter's num_heads 4"):
        ServingRules.of(drafter_model(tiny_draft(target, "dspark").drafter), 8, "drafter")


def test_without_a_mesh_nothing_happens():
    x = jnp.arange(6.0).reshape(2, 3)
    assert rows_apart(x) is x and vocab_apart(x) is x and whole(x) is x and heads_apart(x, 2) is x
    asked = jnp.array(True)
    assert anywhere(asked) is asked


def test_a_sorted_top_k_is_the_compilers_own():
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 3, (5, 4, 40)), jnp.float32)  # ties everywhere
    place = placement(1, 1)
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
        values, ids = jax.jit(lambda x: top_k(x, 7))(jax.device_put(x, place.sharding(P())))
    known, where = jax.lax.top_k(x, 7)
    assert (values == known).all() and (ids == where).all()


def test_all_data_shards_take_a_branch_together():
    asked = jnp.array([False, True])
    assert jax.vmap(lambda own: anywhere(own) & True, axis_name="data")(asked).tolist() == [True, True]


def test_unknown_chips_are_refused():
    for topology in ("v4:2x2", "v5e", "cpu:1"):
        with pytest.raises(ConfigError, match=r"--tpu: found .*, expected one of v5e, v5p, v6e, tpu7x"):
            tpu_devices(topology)
    assert all(chip.hbm_bytes >= 16 << 30 for chip in CHIPS.values())


def test_the_reader_of_collectives_sees_what_crosses_data_shards():
    inside = "%a = f32[8,4]{1,0} all-reduce(f32[8,4] %x), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add"
    across = "%a = (f32[8,4]{1,0}, s32[2]) all-gather-start(f32[4,4] %x), replica_groups=[2,2]<=[2,2]T(1,0), dim={0}"
    moved = "%a = bf16[3]{0} collective-permute(bf16[3] %x), source_target_pairs={{0,1},{1,2}}"
    named = "%a = s32[1] all-reduce(s32[1] %x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%or"
    assert groups_of(named) == [[0, 4], [1, 5], [2, 6], [3, 7]] and largest_across(named, 4) == 4
    turned = named.replace("'axis_0'=2,'axis_1'=4]", "'axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0))")
    assert groups_of(turned) == [[0, 1, 2, 3], [4, 5, 6, 7]] and largest_across(turned, 4) == 0
    assert groups_of(inside) == [[0, 1], [2, 3]] and groups_of(across) == [[0, 2], [1, 3]]
    assert [largest_across(text, 2) for text in (inside, across, moved)] == [0, 128, 6]
    assert [largest_across(text, 1) for text in (inside, across, moved)] == [128, 128, 6]
