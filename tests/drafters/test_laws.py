"""B02 for every method: what its own `propose` guesses goes through the round's jitted acceptance, enumerated.

V is 4 (3 where a draw a row of a tree makes that too many branches), chains are 2 long, trees 2 deep and 2 wide. The
law of the first three tokens must be the target's, greedy and at temperature 0.7 and 1, at every cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Point, Proposal, Rows, Shared, Slots, Sparse
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflare import DFlare
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.draft_tree import DynamicTree, StaticTree
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.eagle_config import EagleConfig, fresh_model
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.selector import SelectorConfig
from jaxspec.drafters.small_model import SmallModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import FINAL, Decoder
from jaxspec.models.layout import uniform_layout
from tests.decoding import test_trees as trees
from tests.decoding.enumeration import Case, output_law, random_case, target_law
from tests.decoding.test_enumeration import through_jaxspec
from tests.drafters import tiny

pytestmark = pytest.mark.ci

M, HIDDEN, DRAWS = 2, 16, 96
TEMPERATURES = (0.0, 0.7, 1.0)


def model(vocab: int) -> ModelConfig:
    return ModelConfig.from_hf({
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64, "rope_theta": 100.0,
    })  # fmt: skip


def block(rows: int = M + 1, vocab: int = 4) -> Any:
    taps = (1, 3)
    return fresh_config(model(vocab), num_layers=1, block_size=rows, mask_token_id=vocab - 1, target_layer_ids=taps)


def eagle(tree: Any) -> Eagle:
    return Eagle(EagleConfig(fresh_model(model(4)), (FINAL,), 4, 5, HIDDEN), tree, M)


def eagle3(tree: Any) -> Eagle3:
    """Three of the four tokens can be drafted."""
    return Eagle3(EagleConfig(fresh_model(model(4)), (0, 1), 3, 5, HIDDEN), tree, M, maps=("d2t", "t2d"))


def small_model() -> SmallModel:
    return SmallModel(Decoder(dataclasses.replace(model(4), num_layers=1, layer_windows=(None,))), num_proposals=M)


CHAINS: dict[str, Callable[[], Any]] = {
    "dflash-argmax": lambda: DFlash(block()),
    "dflash-sample": lambda: DFlash(block(), draft_sampling="sample"),
    "dflare": lambda: DFlare(block(), draft_sampling="sample"),
    "dflash2": lambda: DFlash2(block(), conv=ConvConfig(2, 4), selector=SelectorConfig(4, 3)),
    "dspark": lambda: DSpark(block(M), MarkovConfig(3)),
    "eagle": lambda: eagle(None),
    "eagle3": lambda: eagle3(None),
    "ngram": lambda: NGram(4, num_proposals=M),
    "small_model": small_model,
}
BINARY = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))
TREES: dict[str, Callable[[], Any]] = {
    "eagle-static": lambda: eagle(BINARY),
    "eagle2": lambda: eagle(DynamicTree(2, M, 6)),
    "eagle3": lambda: eagle3(DynamicTree(2, M, 6)),
    "ddtree": lambda: DDTree(DFlash(block(vocab=3)), 6),
}


def proposals(drafter: Any, temperature: float, draws: int) -> list[Proposal]:
    """The proposals of one request, its context committed by the drafter itself, under so many keys."""
    rng, vocab = np.random.default_rng(3), 3 if isinstance(drafter, DDTree) else 4
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = drafter.init(jax.random.key(1), jnp.float32)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 and x.dtype == jnp.float32 else x, params)
    if getattr(drafter, "maps", ()):
        params = drafter.with_vocabulary(params, np.array([1, 0, 2, 3]))
    shared = Shared(draw(vocab, HIDDEN), 0.3 * draw(vocab, HIDDEN))  # a head that leaves every token a chance
    table, length = jnp.asarray([[1, 2]]), 5
    layout = uniform_layout(jnp.zeros(1, jnp.int32), jnp.full(1, length), table, length)
    tokens = jnp.asarray([0, 1, 2, 0, 1, 2])
    rows = Rows(draw(length, len(drafter.taps) * HIDDEN), tokens[:-1], tokens[1:])
    slots = Slots(tokens[-1:], jnp.full(1, length), table, jnp.ones(1, bool))
    sampling = tiny.sampled(1, temperature) if temperature else tiny.greedy(1)

    @jax.jit
    def run(key: Any) -> Proposal:
        state = drafter.commit(params, shared, drafter.init_state(3, 4, jnp.float32, 1), rows, layout)
        found = drafter.propose(params, shared, state, slots, key[None], sampling)
        return dataclasses.replace(found, trace=None)

    return [run(key) for key in jax.random.split(jax.random.key(7), draws)]


def as_case(found: list[Proposal], p: tuple[np.ndarray, ...], greedy: bool) -> Case:
    """The q of both slots for every first token that was drawn; behind the others, which the law cannot tell apart from
    any, it is even."""
    point = greedy or isinstance(found[0].q, Point)
    vocab = p[0].shape[-1]
    first, second = np.zeros(vocab), np.full((vocab, vocab), 1 / vocab)
    for one in found:
        tokens = np.asarray(one.tokens[0])
        q = [np.asarray(one.q.rows(jnp.full(1, slot))[0], np.float64) for slot in range(M)]
        if point:
            q = [np.eye(vocab)[token] for token in tokens]
        else:
            assert all(row[token] > 0 for row, token in zip(q, tokens, strict=True))
        first, second[tokens[0]] = q
    return Case(p, (first, second), argmax=point)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method", CHAINS)
def test_B02_the_law_of_a_chain_is_the_targets(method: str, temperature: float) -> None:
    found = proposals(CHAINS[method](), temperature, DRAWS if temperature else 1)
    kind = "point" if not temperature or isinstance(found[0].q, Point) else "dense"
    kind = "sparse" if kind == "dense" and isinstance(found[0].q, Sparse) else kind
    if kind != "point":
        assert len({int(one.tokens[0, 0]) for one in found}) > 1, "one first token only: no conditional was tested"
    rng = np.random.default_rng(5)
    for _ in range(3):
        p = random_case(rng, 4, M).p
        if not temperature:
            p = tuple(np.eye(4)[row.argmax(-1)] for row in p)
        case = as_case(found, p, not temperature)
        for cut in range(M + 1):
            law = output_law(case, through_jaxspec("ratio", kind, temperature), cut)
            np.testing.assert_allclose(law, target_law(case), atol=2e-6)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method", TREES)
def test_B02_the_law_of_a_tree_is_the_targets(method: str, temperature: float) -> None:
    drafter = TREES[method]()
    found = proposals(drafter, temperature, 1)[0]
    assert found.tree is not None and found.tree.max_depth == M
    tokens, parents, valid = (np.asarray(x[0]) for x in (found.tokens, found.tree.parents, found.tree.valid))
    rng, vocab = np.random.default_rng(6), 3 if method == "ddtree" else 4
    lengths = set()
    for _ in range(8 if not temperature else 2):
        world = dataclasses.replace(trees.random_world(rng, vocab, 0.3), parents=parents, tokens=tokens, valid=valid)
        if temperature:
            for limit in range(M + 1):
                law = trees.output_law(world, limit, temperature, drafter.tree_acceptance)
                np.testing.assert_allclose(law, world.law(), atol=2e-6)
            continue
        accepted, token, _, said = trees.run(world, np.zeros((1, 7)), np.zeros(1), M, 0.0, drafter.tree_acceptance)
        walk: list[int] = []
        for step in world.p:
            walk.append(int(np.argmax(step[tuple(walk)])))
        r = int(accepted[0])
        assert said[0, : r + 1].tolist() == walk[: r + 1] and token[0] == walk[r]
        lengths.add(r)
    assert temperature or len(lengths) > 1
