"""Run in a process of eight CPU devices: one engine on one device, one on each mesh, the same requests.

    python -m tests.parallel.same_tokens METHOD ROUNDS DATAxTENSOR …

ROUNDS: `full` verifies every proposal, `budget` follows a cost table, `short` is neither with a
budget nor with rules and log probabilities, which is less to compile.

Prints a JSON object a mesh: `same` says for each request whether its tokens are those of the single device.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.small_model import SmallModel
from jaxspec.parallel.mesh import placement
from jaxspec.serving.cost import StepsTable
from jaxspec.serving.engine import Engine
from jaxspec.serving.grammar import Grammar
from jaxspec.serving.sharded import ShardedEngine
from tests.helpers.worlds import tiny_draft, tiny_target

SLOTS, NOISE = 8, 0.05
TABLE = StepsTable((1, 9, 17, 25, 33), (1000.0, 900.0, 700.0, 500.0, 300.0), 64)  # budgets follow the load


class Alternating:
    """Stands for a compiler of grammars: an answer's n-th token has the parity of n."""

    def start(self, grammar: Grammar) -> Parity:
        return Parity()


class Parity:
    """The state of one answer."""

    finished = False

    def __init__(self) -> None:
        self.seen = 0

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        even, odd = np.uint32(0x55555555), np.uint32(0xAAAAAAAA)
        rows = [[odd if (self.seen + row) % 2 else even] * 2 for row in range(len(drafts) + 1)]
        return np.array(rows, np.uint32).view(np.int32)

    def advance(self, tokens: Sequence[int]) -> int:
        for token in tokens:
            assert token % 2 == self.seen % 2, "a token that its mask forbids"
            self.seen += 1
        return len(tokens)


def requests(short: bool, count: int = 10) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded ones in turn; some ask for a processor, penalties or log probabilities."""
    rng = random.Random(3)
    found = []
    for index in range(count):
        changes: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": rng.randint(12, 30)}
        if index % 2:
            changes |= {"temperature": 1.0, "seed": index}
        if index == 3 and not short:
            changes |= {"top_k": 7, "top_p": 0.9}
        if index == 5 and not short:
            changes |= {"min_p": 0.05, "logprobs": 2}
        if index in (4, 7) and not short:
            changes |= {"rules": LogitRules(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 1.0})}
        found.append(([rng.randrange(60) for _ in range(rng.randint(3, 40))], SamplingParams(**changes)))
    return found


def answers(engine: Any, asked: list[tuple[list[int], SamplingParams]], grammars: bool) -> list[list[int]]:
    """Tokens of each request; the slots are never enough, so that requests wait for each other's."""
    owners: dict[int, int] = {}
    found: list[list[int]] = [[] for _ in asked]
    waiting = list(enumerate(asked))
    while waiting or engine.live:
        while waiting and engine.free_slots:
            index, request = waiting.pop(0)
            grammar = Grammar("regex", "parity") if grammars and index % 3 == 0 else None
            owners[engine.admit(*request, 0, grammar)] = index
        for event in engine.step():
            found[owners[event.handle]] += event.tokens
    return found


def noisy_copy(target: Any) -> Draft:
    """The target as its own small model, its layers' matrices a little off: right in part."""
    leaves, structure = jax.tree.flatten(target.params["model"]["layers"])
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [
        leaf + NOISE * jnp.std(leaf) * jax.random.normal(key, leaf.shape) if leaf.ndim > 1 else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    params = {**target.params, "model": {**target.params["model"], "layers": jax.tree.unflatten(structure, noisy)}}
    return Draft(SmallModel(target.model, num_proposals=3), params)


def draft_of(method: str, target: Any) -> Draft | None:
    if method in ("small", "grammar"):
        return noisy_copy(target)
    return None if method == "none" else tiny_draft(target, method)


def main(method: str, rounds: str, *meshes: str) -> None:
    target = tiny_target()
    draft, short = draft_of(method, target), rounds == "short"
    asked = requests(short)
    options: dict[str, Any] = {
        "max_context": 96, "prefill_chunk": 32, "page_size": 8, "pause_drafting": False,
        "rules": not short, "max_logprobs": None if short else 2,
        "grammars": Alternating() if method == "grammar" else None,
        "cost_table": TABLE if rounds == "budget" and draft is not None else None, "row_shares": (0.5,),
    }  # fmt: skip
    alone = answers(
        Engine(target, draft, num_slots=SLOTS, slot_buckets=(SLOTS,), **options), asked, method == "grammar"
    )
    for mesh in meshes:
        data, tensor = (int(size) for size in mesh.split("x"))
        engine = ShardedEngine(
            target, draft, placement=placement(data, tensor), num_slots=SLOTS, slot_buckets=(SLOTS // data,),
            debug=True, **options,
        )  # fmt: skip
        found = answers(engine, asked, method == "grammar")
        layer = engine.weights.target["model"]["layers"][0]["self_attn"]
        gained = accepted(engine)
        pool = jax.tree.leaves(engine.state.target)[0]
        engine.drop_prefixes()
        print(json.dumps({
            "mesh": mesh, "same": [one == other for one, other in zip(found, alone, strict=True)],
            "tokens": sum(len(one) for one in found), "accepted": gained,
            "compilations": engine.compile_count,
            "held_pages": engine.held_pages, "rounds": engine.metrics().rounds,
            "q": layer["q_proj"]["weight"].addressable_shards[0].data.shape,
            "k": layer["k_proj"]["weight"].addressable_shards[0].data.shape,
            "pool": pool.addressable_shards[0].data.shape, "pool_bytes": pool.addressable_shards[0].data.nbytes,
            "across_data": traffic(engine, tensor), "anywhere": traffic(engine, 1),
        }), flush=True)  # fmt: skip


def accepted(engine: ShardedEngine) -> int:
    """Tokens that a request with ignored ends gains over plain rounds."""
    prompt, params = [3, 9, 27], SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine.admit(prompt, params)
    return sum(event.accepted for event in steps(engine))


def steps(engine: Any) -> Iterator[Any]:
    """Events until nothing is left to do."""
    while engine.live:
        yield from engine.step()


def traffic(engine: ShardedEngine, tensor: int) -> int:
    """Bytes of the largest collective between data shards in any of the engine's programs."""
    from tests.parallel.collectives import largest_across

    return max(largest_across(compiled.as_text(), tensor) for compiled in engine.executables.built.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
