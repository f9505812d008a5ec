"""Times a plain decoding step and whole speculative rounds at a public target's shape, with random weights.

    python tools/bench_round.py --shape qwen3-4b --context 1024 [--out FILE]

One request, greedy. A round is draft, verify, accept and commit; acceptance plays no part in its time. Medians of
synchronous calls after warm-up; the first call's compilation is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}
MASK = 7


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A target or a drafter in memory."""

    params: Any
    model: Any = None
    drafter: Any = None
    embedding: Any = None
    head: Any = None


def random_weights(abstract: Any) -> Any:
    """bfloat16 weights of a plausible size, made on the device leaf by leaf."""
    make = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    leaves, tree = jax.tree.flatten(abstract)
    return jax.tree.unflatten(tree, [make(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)])


def drafters(target: ModelConfig) -> dict[str, Any]:
    """The methods that are timed."""
    base = {"num_layers": 5, "mask_token_id": MASK}
    return {
        "none": None,
        "dflash b16": DFlash(fresh_config(target, block_size=16, **base)),
        "dspark b7": DSpark(fresh_config(target, block_size=7, **base), heads=MarkovConfig(rank=256)),
    }


def time_rounds(runner: SlotRunner, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of a round of one request at about `context` committed tokens."""
    prompt = np.random.default_rng(0).integers(10, runner.vocab_size, context).tolist()
    started = time.perf_counter()
    runner.warm_up()
    compiled = time.perf_counter() - started
    started = time.perf_counter()
    runner.admit(prompt, SamplingParams(max_new_tokens=10_000, ignore_eos=True))
    prefill = time.perf_counter() - started
    for _ in range(5):
        runner.step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        runner.step()
        times.append(time.perf_counter() - started)
    return {
        "compile_s": compiled,
        "prefill_s": prefill,
        "round_ms": 1e3 * statistics.median(times),
        "compiles": runner.compile_count,
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = ModelConfig.from_hf(SHAPES[arguments.shape])
    decoder = Decoder(config)
    target = Loaded(random_weights(decoder.abstract_params(jnp.bfloat16)), model=decoder)
    report: dict[str, Any] = {
        "shape": arguments.shape,
        "context": arguments.context,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": "bfloat16",
        "rounds": {},
    }
    for name, drafter in drafters(config).items():
        draft = (
            None if drafter is None else Loaded(random_weights(drafter.abstract_params(jnp.bfloat16)), drafter=drafter)
        )
        runner = SlotRunner(target, draft, num_slots=1, max_context=2 * arguments.context, prefill_chunk=256)
        report["rounds"][name] = time_rounds(runner, arguments.context, arguments.repeats)
        print(name, report["rounds"][name], flush=True)
        del runner
    plain = report["rounds"]["none"]["round_ms"]
    report["round_over_plain_step"] = {k: v["round_ms"] / plain for k, v in report["rounds"].items() if k != "none"}
    print(json.dumps(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
