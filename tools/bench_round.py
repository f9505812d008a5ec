"""Times the server's round on this machine's device at a public target's shape, with random weights.

    python tools/bench_round.py --shape qwen3-4b qwen3-0.6b [--curve qwen3-4b] [--json FILE]

Every figure is `Engine.step` with overlapped rounds, greedy requests without options, their contexts put in place
instead of prefilled; the time of `--repeats` steps one after the other over their number, after warm-up. A round is
draft, verify, accept and commit; with random weights nearly nothing is accepted, which plays no part in its time.
`verify` is the n-gram drafter's round, whose drafts cost next to nothing; `--curve` times it over requests R and rows
M.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.drafters.ngram import NGram
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.packed import pack
from jaxspec.serving.engine import Engine
from jaxspec.serving.pages import rows_in_flight
from jaxspec.serving.requests import Phase
from tools.profile_table import profile

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "tiny": _QWEN3
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 16}
    | {"vocab_size": 512, "head_dim": 16},
}
MASK = 7
CURVE = {1: (1, 4, 16, 64), 8: (8, 64), 16: (16, 64, 256), 64: (64, 256, 512)}  # requests: rows
SPARE = 256  # positions behind the context


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A target or a drafter in memory."""

    params: Any
    model: Any = None
    drafter: Any = None
    embedding: Any = None
    head: Any = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One figure: a drafter and a number of requests, with the rows that the target then gets."""

    name: str
    draft: Loaded | None
    requests: int = 1
    rows: int = 1
    room: int | None = None  # positions behind the context; None: as many again


def random_weights(abstract: Any) -> Any:
    """bfloat16 weights of a plausible size, made on the device leaf by leaf."""
    make = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    leaves, tree = jax.tree.flatten(abstract)
    return jax.tree.unflatten(tree, [make(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)])


def load_target(shape: str, packed: bool) -> Loaded:
    """Packed once here for all engines, which would each make a copy."""
    config = ModelConfig.from_hf(SHAPES[shape])
    decoder = Decoder(config)
    params = random_weights(decoder.abstract_params(jnp.bfloat16))
    return Loaded(pack(params, config) if packed else params, model=decoder)


def ngram(target: ModelConfig, proposals: int) -> Loaded | None:
    """The drafter of `verify`; without proposals none."""
    return Loaded({}, drafter=NGram(target.vocab_size, proposals)) if proposals else None


def round_cases(target: ModelConfig, requests: int = 1) -> list[Case]:
    """Plain decoding, verification and whole rounds."""
    base = {"num_layers": 5, "mask_token_id": MASK}
    methods: dict[str, Any] = {
        "dflash b16": DFlash(fresh_config(target, block_size=16, **base)),
        "dspark b7": DSpark(fresh_config(target, block_size=7, **base), heads=MarkovConfig(rank=256)),
    }
    whole = [
        Case(
            name, Loaded(random_weights(method.abstract_params(jnp.bfloat16)), None, method), requests, requests * rows
        )
        for (name, method), rows in zip(methods.items(), (16, 8), strict=True)
    ]
    verify = Case("verify 16 rows", ngram(target, 15), requests, requests * 16)
    return [Case("plain", None, requests, requests), verify, Case("plain, batch 8", None, 8, 8), *whole]


def curve_cases(target: ModelConfig, known: list[Case]) -> list[Case]:
    """The points of `CURVE` that no other case has."""
    timed = {(case.requests, case.rows) for case in known if case.draft is None or case.name.startswith("verify")}
    points = [(requests, rows) for requests, all_rows in CURVE.items() for rows in all_rows]
    return [
        Case(f"verify R={r} M={m}", ngram(target, m // r - 1), r, m, room=SPARE)
        for r, m in points
        if (r, m) not in timed
    ]


class Bench:
    """An engine on which `case.requests` requests have decoded up to `context` tokens."""

    def __init__(self, case: Case, target: Loaded, context: int, attention: str, bare: bool | None):
        self.case, self.context = case, context
        room = context if case.room is None else case.room
        self.engine = Engine(
            target, case.draft, num_slots=case.requests, slot_buckets=(case.requests,), max_context=context + room,
            pause_drafting=False, attention=attention, pack_weights=False, bare_rounds=bare,
        )  # fmt: skip

    def compile(self) -> float:
        """Of all executables the one that is timed; seconds."""
        executables, drafts = self.engine.executables, self.case.draft is not None
        wanted = [
            shape
            for shape in executables.shapes
            if not shape.prefill and shape.drafting == drafts and shape.rows == self.case.rows
        ]
        executables.shapes = wanted[-1:]  # the bare one where there are two
        started = time.perf_counter()
        self.engine.warm_up()
        return time.perf_counter() - started

    def fill(self) -> None:
        """Requests in mid-answer: pages, positions and anchors as a prefill would leave them, noise in the caches."""
        engine = self.engine
        prompt = np.random.default_rng(0).integers(10, engine.vocab_size, self.context).tolist()
        for _ in range(self.case.requests):
            engine.admit(prompt, SamplingParams(max_new_tokens=100_000, ignore_eos=True))
        for request in engine._requests():
            request.text, request.phase = request.history, Phase.DECODING
            rows = self.context + rows_in_flight(1, engine._inputs.written)
            pages = engine._pages
            assert request.lease.reserve(pages._allocator, rows, engine.max_context, pages._cache.evict)
            request.lease.commit(self.context)
        noise = jax.jit(
            lambda old, seed: 0.5 * jax.random.normal(jax.random.key(seed), old.shape, old.dtype), donate_argnums=0
        )
        state, count = engine._state, len(engine._slots)
        random = lambda tree: [  # noqa: E731
            noise(leaf, i) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for i, leaf in enumerate(jax.tree.leaves(tree))
        ]
        fresh = {
            name: jax.tree.unflatten(jax.tree.structure(tree), random(tree))
            for name, tree in (("target", state.target), ("draft", state.draft))
        }
        put = lambda values: jax.device_put(np.asarray(values, np.int32), engine._device)  # noqa: E731
        engine._state = dataclasses.replace(
            state, anchors=put(prompt[:1] * count), positions=put([self.context] * count), **fresh
        )

    def time(self, repeats: int, profiled: int) -> dict[str, Any]:
        """Milliseconds of a round, and what a profile of `profiled` more says."""
        for _ in range(10):
            self.engine.step()
        self.engine._compilations.reset()
        times = []
        for _ in range(repeats + 1):
            times.append(time.perf_counter())
            self.engine.step()
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
        found = {
            "requests": self.case.requests, "rows": self.case.rows, "round_ms": statistics.mean(steps),
            "median_ms": statistics.median(steps), "compilations": self.engine.compile_count,
        }  # fmt: skip
        return found | ({"profile": profile(self.engine.step, profiled)} if profiled else {})


def run(shape: str, arguments: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """Every case of a shape. Programs are compiled several at a time, then the cases run one after the other; what is
    measured is saved, should a later one fail."""
    target = load_target(shape, not arguments.unpacked)
    cases = [
        case
        for case in round_cases(target.model.config, arguments.requests)
        if not arguments.only or case.name in arguments.only
    ]
    if missing := set(arguments.only) - {case.name for case in cases}:
        raise SystemExit(
            f"error: --only: found {', '.join(sorted(missing))}, expected names of rounds as they are printed"
        )
    cases += curve_cases(target.model.config, cases) if shape in arguments.curve else []
    bare = False if arguments.conditions else None
    started = time.perf_counter()
    benches = [Bench(case, target, arguments.context, arguments.attention, bare) for case in cases]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(Bench.compile, benches))
    print(f"{shape}: {len(benches)} programs compiled in {time.perf_counter() - started:.0f} s", flush=True)
    found: dict[str, Any] = {}
    own: dict[str, Any] = {"shape": shape, "context": arguments.context, "dtype": "bfloat16", "rounds": found}
    report["runs"].append(own)
    for position, case in enumerate(cases):
        bench, benches[position] = benches[position], None  # type: ignore[call-overload]
        bench.fill()
        found[case.name] = bench.time(arguments.repeats, arguments.profile if case.room is None else 0)
        if "plain" in found:
            found[case.name]["plain_steps"] = found[case.name]["round_ms"] / found["plain"]["round_ms"]
        print(f"  {case.name}: {found[case.name]['round_ms']:.3f} ms", flush=True)
        save()
        del bench
        gc.collect()


def header() -> dict[str, Any]:
    """How, on what and of which commit."""
    commit = os.environ.get("SOURCE_COMMIT")
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    asked = sys.argv[1:]
    if "--json" in asked:  # where a run kept its file says nothing
        at = asked.index("--json")
        del asked[at : at + 2]
    return {
        "command": " ".join(["python", "tools/bench_round.py", *asked]),
        "commit": commit,
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].client.platform_version.strip(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def main() -> None:
    """Prints a line a figure; `--json` writes them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", default=["qwen3-4b"])
    parser.add_argument("--curve", choices=sorted(SHAPES), nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[], help="names of rounds, as they are printed")
    parser.add_argument("--requests", type=int, default=1, help="of each round that names no batch")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--profile", type=int, default=4, help="rounds that are profiled; 0 for none")
    parser.add_argument("--attention", default="auto", help="engine.attention")
    parser.add_argument("--unpacked", action="store_true", help="engine.pack_weights=false")
    parser.add_argument("--conditions", action="store_true", help="engine.bare_rounds=false")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error(f"--requests: found {arguments.requests}, expected at least 1")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = header() | {"runs": []}

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")

    for shape in arguments.shape:
        run(shape, arguments, report, save)


if __name__ == "__main__":
    main()
