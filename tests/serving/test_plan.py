"""`serve.py --plan`: every program of a server compiles for chips that are not there, and what it says of them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import ServeConfig, load_config
from jaxspec.errors import ConfigError
from jaxspec.parallel.mesh import GIB
from jaxspec.serving.cost import StepsTable, load_cost_table, parse_cost_table, save_cost_table
from jaxspec.serving.plan import Estimate, estimated_table, repeated_bytes
from jaxspec.serving.requests import Shape
from tests.helpers.process import ROOT, run_python

SMALL = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 256,
    "eos_token_id": 511, "tie_word_embeddings": True,
}  # fmt: skip
TAPS = {"mask_token_id": 510, "target_layer_ids": [0, 1]}
HEADS = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}
BLOCK = {**SMALL, "num_hidden_layers": 1, "num_target_layers": 2, "block_size": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {**BLOCK, "architectures": ["DFlashDraftModel"], "dflash_config": TAPS},
    "dspark": {**BLOCK, "architectures": ["DSparkDraftModel"], "dflash_config": {
        "projector_type": "dspark", "attention_mode": "gqa", **HEADS, **TAPS}},
    "dflash2": {**BLOCK, "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": {
        **TAPS, "block_size": 4, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16,
        "selector_top_k": 8}},
    "eagle3": {**SMALL, "model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"],
               "draft_vocab_size": 512, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}},
}  # fmt: skip
COVERS = ("jaxspec/parallel", "jaxspec/serving", "jaxspec/decoding", "jaxspec/models")
CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed, and it is what compiles for a TPU"
)


def write(folder: Path, drafter: str | None, **engine: Any) -> Path:
    """A serving config of the small shape."""
    (folder / "target.json").write_text(json.dumps(SMALL))
    if drafter in DRAFTERS:
        (folder / "drafter.json").write_text(json.dumps(DRAFTERS[drafter]))
    said = {
        "version": 1,
        "target": {"source": str(folder / "target.json")},
        "drafter": str(folder / "drafter.json") if drafter in DRAFTERS else drafter,
        "engine": {"num_slots": 4, "slot_buckets": [4], "max_context": 128, "prefill_chunk": 32, **engine},
        "compilation_cache": str(folder / "xla"),
    }
    (folder / "serve.yaml").write_text(json.dumps(said))  # JSON is YAML
    return folder / "serve.yaml"


def plan(config: Path, topology: str, *overrides: str, timeout: float = 280) -> tuple[int, str, str]:
    done = run_python(
        str(ROOT / "serve.py"), "--config", str(config), *overrides, "--plan", "--tpu", topology,
        "--cost-table", str(config.parent / "table.json"), timeout=timeout, JAX_DEFAULT_MATMUL_PRECISION=None,
        JAX_DISABLE_MOST_OPTIMIZATIONS=None, JAX_PLATFORMS="cpu",
    )  # fmt: skip
    print(done.stdout)
    return done.returncode, done.stdout, done.stderr


def check(folder: Path, code: int, out: str, error: str, programs: int) -> None:
    assert code == 0, error[-3000:]
    lines = [line for line in out.splitlines() if line.startswith("OK ")]
    assert len(lines) == programs and f"{programs} programs" in out
    for line in lines:
        found = re.search(
            r"arguments [\d.]+ GiB, temporaries [\d.]+ GiB, total [\d.]+ of .* estimated ([\d.]+) ms", line
        )
        assert found and float(found[1]) > 0
    assert "at the chip's limits; nothing was run" in out
    table = load_cost_table(folder / "table.json")
    assert isinstance(table, StepsTable) and table.estimated and min(table.sample_steps_per_sec) > 0


@needs_libtpu
@pytest.mark.ci
def test_a_server_compiles_ahead_of_time(tmp_path: Path) -> None:
    config = write(tmp_path, None, rules=False, max_logprobs=None)
    overrides = ("mesh.data=2", "mesh.tensor=2", "engine.slot_buckets=[2]", "target.quantization=int8")
    check(tmp_path, *plan(config, "v5e:2x2", *overrides), programs=2)


@needs_libtpu
@pytest.mark.slow("plan", covers=COVERS)
@pytest.mark.parametrize("topology", CHIPS)
def test_every_step_compiles_for_every_chip(tmp_path: Path, topology: str, record_property: Any) -> None:
    words: list[str] = []
    for method, overrides in (
        ("none", ("mesh.data=2", "mesh.tensor=2", "engine.slot_buckets=[2]")), ("dflash", ("mesh.tensor=2",)),
        ("dspark", ("engine.grammar=true",)), ("dflash2", ()), ("eagle3", ("target.quantization=int8",)), ("ngram", ()),
    ):  # fmt: skip
        folder = tmp_path / method
        folder.mkdir()
        words += ["--", str(write(folder, method)), *overrides]
    done = run_python(
        "-m", "tests.serving.compile_rounds", topology, *words, timeout=1700, JAX_PLATFORMS="cpu",
        JAX_DEFAULT_MATMUL_PRECISION=None, JAX_DISABLE_MOST_OPTIMIZATIONS=None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("COMPILED")]
    print(done.stdout)
    assert len(lines) == 5 * 2 + 2 * 3  # two rounds a method, and their halves under a grammar
    record_property(topology, [line.partition(" ")[2] for line in lines])


@needs_libtpu
@pytest.mark.slow("plan-8b", covers=COVERS)
def test_qwen3_8b_on_the_four_chips_of_a_v5e_host(tmp_path: Path, record_property: Any) -> None:
    """Plain rounds alone: a program of 36 layers takes the compiler minutes."""
    table = tmp_path / "table.json"
    done = run_python(
        str(ROOT / "serve.py"), "--config", "configs/serve/qwen3-8b-v5e.yaml", "drafter=none",
        "engine.slot_buckets=[16]", "--plan", "--tpu", "v5e:2x2", "--cost-table", str(table), timeout=1700,
        JAX_DEFAULT_MATMUL_PRECISION=None, JAX_DISABLE_MOST_OPTIMIZATIONS=None, JAX_PLATFORMS="cpu",
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if " GiB, total " in line]
    assert len(lines) == 2 and all(line.startswith("OK ") for line in lines)
    for line in lines:
        record_property(line.partition(":")[0], line.partition(": ")[2])
    record_property("estimated table", json.loads(table.read_text()))


def test_an_estimated_table_probes_each_bucket_at_its_lower_edge(tmp_path: Path) -> None:
    seconds = {
        Shape(4, 4, False, 0): 0.001, Shape(4, 8, True, 0): 0.002, Shape(4, 16, True, 0): 0.004,
        Shape(2, 8, True, 0): 0.003, Shape(4, 16, True, 32): 0.008,
    }  # fmt: skip
    table = estimated_table(seconds)
    assert table == StepsTable((1, 9, 17), (1 / 0.003, 1 / 0.004, 1 / 0.008), 48, estimated=True)
    assert table.steps_per_second(jnp.array([8, 9, 16, 17])).tolist() == [1 / 0.003, 250.0, 250.0, 125.0]
    plain = estimated_table({Shape(4, 4, False, 0): 0.001})
    assert plain.sample_batch_tokens == (1,) and plain.max_batch_tokens == 4
    with pytest.raises(ConfigError, match="no estimate"):
        estimated_table({})
    save_cost_table(table, tmp_path / "table.json")
    assert load_cost_table(tmp_path / "table.json") == table


def test_a_measured_table_has_the_fields_of_the_field_alone(tmp_path: Path) -> None:
    measured = StepsTable((1,), (1.0,), 8)
    save_cost_table(measured, tmp_path / "table.json")
    assert set(json.loads((tmp_path / "table.json").read_text())) == {
        "sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="estimated"):
        parse_cost_table({"sample_batch_tokens": [1], "sample_steps_per_sec": [1], "max_batch_tokens": 1,
                          "estimated": "yes"})  # fmt: skip


def test_what_does_not_fit_says_so() -> None:
    one = Estimate(Shape(4, 4, False, 0), "R=4", 3 * GIB, GIB, 17 * GIB, 2e12, 3e9, 0.0042, 12.0)
    assert one.line(16 * GIB) == (
        "DOES NOT FIT R=4: arguments 3.00 GiB, temporaries 1.00 GiB, total 17.00 of 16 GiB; 2000.0 GFLOP and 3.00 GB, "
        "estimated 4.20 ms (compiled in 12 s)"
    )
    assert one.line(32 * GIB).startswith("OK R=4")
    assert Estimate(one.shape, "R=4", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, "too large").line(1) == "DOES NOT FIT R=4: too large"


def test_a_table_that_the_drafter_shares_is_counted_once() -> None:
    from jaxspec.decoding.round import Weights
    from jaxspec.drafters.base import Shared

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    table = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=place)
    own = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=place)
    assert repeated_bytes(Weights({"embed": table}, {}, Shared(table, table))) == 2 * 64
    assert repeated_bytes(Weights({"embed": table}, {}, Shared(table, own))) == 64
    assert repeated_bytes(Weights({"embed": table}, {}, Shared(own, own))) == 64


def test_mesh_keys_and_the_sizes_that_they_divide() -> None:
    base = ["target.source=x", "engine.num_slots=6"]
    assert load_config(ServeConfig, None, base).mesh.tensor == 1
    with pytest.raises(ConfigError, match=r"engine\.num_slots and mesh\.data contradict .* 6 is no multiple of 4"):
        load_config(ServeConfig, None, [*base, "mesh.data=4"])
    with pytest.raises(ConfigError, match=r"engine\.num_pages and mesh\.data"):
        load_config(ServeConfig, None, [*base, "mesh.data=2", "engine.num_pages=33"])
    with pytest.raises(ConfigError, match=r"engine\.slot_buckets and engine\.num_slots / mesh\.data"):
        load_config(ServeConfig, None, [*base, "mesh.data=2", "engine.slot_buckets=[4]"])
    assert load_config(ServeConfig, ROOT / "configs" / "serve" / "qwen3-8b-v5e.yaml").mesh.tensor == 4
