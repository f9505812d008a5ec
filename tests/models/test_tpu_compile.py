"""The round and the prefill compile for a TPU ahead of time, without one."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.marks import REPEATS
from tests.helpers.process import run_python

pytestmark = pytest.mark.ci

SCRIPT = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxspec.decoding.round import PrefillInput, Program, Weights
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Shared
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.drafters.none import NoDrafter
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder

config = ModelConfig.from_hf({
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
})
decoder = Decoder(config)
block = fresh_config(config, num_layers=1, block_size=8, mask_token_id=511, target_layer_ids=(0, 1))
drafter = {
    "none": lambda: NoDrafter(512),
    "dflash": lambda: DFlash(block),
    "dspark": lambda: DSpark(block, MarkovConfig(8)),
}[sys.argv[1]]()
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
place = lambda tree: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)), tree
)
program = Program(decoder, drafter, max_context=128, num_slots=4, page_size=16)
state = place(jax.eval_shape(lambda: program.init_state(jnp.bfloat16)))
params = decoder.abstract_params(jnp.bfloat16)
shared = Shared(decoder.embedding(params), decoder.head(params))
weights = place(Weights(params, drafter.abstract_params(jnp.bfloat16), shared))
leaf = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
chunk = place(PrefillInput(
    tokens=leaf(32), next_tokens=leaf(32), start=leaf(), count=leaf(), slot=leaf(), final=leaf(dtype=bool),
    generation=leaf(), seed=leaf(2, dtype=jnp.uint32), sample=leaf(),
    sampling=jax.eval_shape(lambda: SlotSampling.zeros(1)),
))
for name, step, extra in (("round", program.round, place(leaf(4, dtype=bool))), ("prefill", program.prefill, chunk)):
    compiled = jax.jit(step, donate_argnums=1).lower(weights, state, extra).compile()
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    assert memory.alias_size_in_bytes > 0, "the state was not donated"
    print("COMPILED", sys.argv[1], name, device.device_kind, memory.argument_size_in_bytes, memory.output_size_in_bytes,
          memory.temp_size_in_bytes, cost.get("flops"))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; it compiles for a TPU without one"
)
@pytest.mark.parametrize("drafter", [*(pytest.param(name, marks=REPEATS) for name in ("none", "dflash")), "dspark"])
def test_round_and_prefill_compile_ahead_of_time_for_one_tpu(drafter):
    done = run_python(
        "-c",
        SCRIPT,
        drafter,
        timeout=280,
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        JAX_DEFAULT_MATMUL_PRECISION=None,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("COMPILED")]
    print(done.stdout)
    assert [line[2] for line in lines] == ["round", "prefill"]
    assert all("TPU" in " ".join(line) for line in lines)
