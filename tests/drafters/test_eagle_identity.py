"""B14: with an EAGLE drafter, good or bad, chain or tree, the greedy text is the target's, token by token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.draft_tree import DynamicTree
from jaxspec.models.layers import stack_layers
from tests.drafters import eagle_pairs as pairs
from tests.helpers import worlds
from tests.helpers.marks import REPEATS

pytestmark = pytest.mark.ci

PROMPTS = ([1, 2, 3], [9, 8, 9, 10, 11, 40, 41], [16] * 7, [31])
NEW = 512
BUILD = {
    "eagle3-chain": lambda target: pairs.eagle3(target),
    "eagle3-tree": lambda target: pairs.eagle3(target, pairs.DYNAMIC),
    "eagle3-static": lambda target: pairs.eagle3(target, pairs.STATIC, reduced=False),
    "eagle-chain": lambda target: pairs.eagle(target, None),
    "eagle-static": lambda target: pairs.eagle(target, pairs.STATIC),
    "eagle2": lambda target: pairs.eagle(target, pairs.DYNAMIC),
}


def long_target(family: str) -> Any:
    made = worlds.tiny_target(family)
    config = dataclasses.replace(made.model.config, max_position=NEW + 16)
    return dataclasses.replace(made, model=dataclasses.replace(made.model, config=config))


def texts(target: Any, draft: Any, prompts: Any = PROMPTS, new: int = NEW, **changes: Any) -> Any:
    options = {
        "num_slots": len(prompts),
        "max_context": NEW + 16,
        "prefill_chunk": 4,
        "page_size": 8,
        "cache_fill": float("nan"),
    }
    runner = SlotRunner(target, draft, **{**options, **changes})
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return generate(runner, [list(prompt) for prompt in prompts], params)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=REPEATS)])
def world(request: pytest.FixtureRequest) -> Any:
    target = long_target(request.param)
    return target, [list(one.tokens) for one in texts(target, None)]


OTHERS = ("eagle3-chain", "eagle3-static", "eagle-static", "eagle2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=REPEATS if name in OTHERS else ()) for name in BUILD])
def test_B14_512_greedy_tokens_are_the_targets_own(world: Any, name: str) -> None:
    target, expected = world
    assert [list(one.tokens) for one in texts(target, pairs.draft(BUILD[name](target)))] == expected


TREE = DynamicTree(top_k=4, depth=5, nodes=19)


@pytest.mark.parametrize(
    ("target", "case", "tree", "new"),
    [
        pytest.param("llama_b", "07_eagle3_infer_llama", None, NEW, marks=REPEATS),
        pytest.param("llama_b", "07_eagle3_infer_llama", TREE, NEW, marks=REPEATS),
        pytest.param("q3a", "07_eagle3_infer_q3_fullvocab", TREE, NEW, marks=REPEATS),
        pytest.param("q3a", "07_eagle3_infer_q3_fullvocab", None, NEW, marks=REPEATS),
        pytest.param("llama_a", "07_eagle2_infer_llama", TREE, NEW, marks=REPEATS),
        ("llama_a", "07_eagle2_infer_llama", TREE, 96),
        pytest.param("llama_a", "07_eagle2_infer_llama", None, NEW, marks=REPEATS),
    ],
)
def test_B14_many_tokens_with_drafters_that_are_often_right(target: str, case: str, tree: Any, new: int) -> None:
    """Overfitted ones: long accepted paths at first, garbage later; both are lossless, on a few requests at once."""
    loaded, draft, prompts = worlds.golden_pair(target, case, new + 32)
    prompts = [*prompts, prompts[0][:3]]
    draft = dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, tree=tree))
    size = {"new": new, "max_context": new + 32}
    expected = [list(one.tokens) for one in texts(loaded, None, prompts, **size)]
    answers = texts(loaded, draft, prompts, **size)
    assert [list(one.tokens) for one in answers] == expected
    assert max(r for one in answers for r in one.accepted) >= 3
    assert count(answers, draft.drafter.num_proposals).tau > 1.0


def test_stacked_target_layers_are_compacted_alike() -> None:
    loaded, draft, prompts = worlds.golden_pair("llama_b", "07_eagle3_infer_llama", 128)
    draft = dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, tree=DynamicTree(4, 3, 12)))
    stacked = dataclasses.replace(loaded, params=stack_layers(loaded.params))
    one, two = (texts(target, draft, prompts, 60, max_context=120) for target in (loaded, stacked))
    assert [x.tokens for x in one] == [x.tokens for x in two] and [x.accepted for x in one] == [x.accepted for x in two]


@pytest.mark.parametrize("tree", [None, pytest.param(DynamicTree(top_k=3, depth=3, nodes=9), marks=REPEATS)])
def test_weights_that_are_no_number_change_no_token(tree: Any) -> None:
    target = worlds.tiny_target("qwen3")
    made = pairs.draft(pairs.eagle3(target, tree))
    broken = dataclasses.replace(
        made, params=jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, made.params)
    )
    expected = [list(one.tokens) for one in texts(target, None, new=40, max_context=64)]
    assert [list(one.tokens) for one in texts(target, broken, new=40, max_context=64)] == expected


@REPEATS
def test_the_debug_build_finds_nothing_to_complain_about() -> None:
    loaded, draft, prompts = worlds.golden_pair("llama_b", "07_eagle3_infer_llama", 128)
    draft = dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, tree=DynamicTree(3, 3, 9)))
    answers = texts(loaded, draft, prompts, 40, max_context=49, debug=True)
    assert [list(one.tokens) for one in answers] == [
        list(one.tokens) for one in texts(loaded, None, prompts, 40, max_context=49)
    ]
