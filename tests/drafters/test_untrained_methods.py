"""DDTree, n-gram and small-model drafters in the served loop: they change nothing but the number of rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.small_model import SmallModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from tests.helpers.guards import no_compiles
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import TINY, tiny_draft, tiny_target

pytestmark = pytest.mark.ci

ROOM = 560


def target(seed: int = 0) -> Any:
    model = Decoder(ModelConfig.from_hf({**TINY, "model_type": "qwen3", "max_position_embeddings": ROOM}))
    made = tiny_target(seed=seed)
    return dataclasses.replace(made, model=model)


def draft(method: str, of: Any) -> Draft:
    if method == "ddtree":
        made = tiny_draft(of)
        return dataclasses.replace(made, drafter=DDTree(made.drafter, 9))
    if method == "ngram":
        return Draft(NGram(of.model.config.vocab_size, num_proposals=4), {})
    family = "llama" if method == "small_llama" else "qwen3"
    config = ModelConfig.from_hf({**TINY, "model_type": family, "num_hidden_layers": 1, "num_key_value_heads": 1})
    model = Decoder(dataclasses.replace(config, layer_windows=(24,)))
    return Draft(SmallModel(model, num_proposals=3), tiny_target(family, seed=3).params | {"model": _model(model, 3)})


def _model(model: Decoder, seed: int) -> Any:
    import jax

    return model.init(jax.random.key(seed), jnp.float32, 0.3)["model"]


METHODS = ("ddtree", "ngram", "small_llama")


def runner(of: Any, draft: Draft | None, slots: int = 3, **options: Any) -> SlotRunner:
    return SlotRunner(
        of, draft, num_slots=slots, max_context=ROOM, prefill_chunk=8, page_size=8, cache_fill=float("nan"), **options
    )


PROMPTS = ([5, 9, 9, 2], [7] * 11, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
GREEDY = SamplingParams(max_new_tokens=512, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    of = target()
    return [one.tokens for one in generate(runner(of, None), PROMPTS, GREEDY)]


@pytest.mark.ci
@pytest.mark.parametrize("method", METHODS)
def test_B14_512_greedy_tokens_are_those_of_plain_decoding(method: str, plain: Any) -> None:
    of = target()
    served = runner(of, draft(method, of))
    served.warm_up()
    with no_compiles():
        answers = generate(served, PROMPTS, GREEDY)
    assert [one.tokens for one in answers] == plain
    assert all(len(one.tokens) == 512 for one in answers)
    assert sum(sum(one.accepted) for one in answers) > 0, "nothing was ever accepted, so acceptance was not tested"


@pytest.mark.ci
@pytest.mark.parametrize("method", METHODS)
def test_B10_B30_a_mixed_batch_leaves_each_request_as_it_is_alone(method: str) -> None:
    """Greedy and sampled rows side by side, another order, and alone: the same tokens by seed."""
    of = target()
    served = runner(of, draft(method, of))
    each = [
        SamplingParams(max_new_tokens=40, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=0.8, top_k=9, seed=4, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
    ]
    together = generate(served, PROMPTS, each)
    turned = generate(served, PROMPTS[::-1], each[::-1])[::-1]
    alone = [generate(served, [prompt], one)[0] for prompt, one in zip(PROMPTS, each, strict=True)]
    for a, b, c in zip(together, turned, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
        assert a.accepted == b.accepted == c.accepted
    mixed_greedy = generate(runner(of, None), PROMPTS[:1], each[:1])[0]
    assert together[0].tokens == mixed_greedy.tokens


@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(name, marks=REPEATS) for name in METHODS if name != "ngram")]
)
def test_a_context_that_ends_inside_a_round(method: str) -> None:
    """The last rounds are cut by the room that is left; nothing is written beyond it."""
    of = target()
    one = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    small = {"num_slots": 1, "max_context": 32, "prefill_chunk": 8, "page_size": 8, "cache_fill": float("nan")}
    expected = generate(SlotRunner(of, None, **small), [PROMPTS[1]], one)[0]
    found = generate(SlotRunner(of, draft(method, of), debug=True, **small), [PROMPTS[1]], one)[0]
    assert found.tokens == expected.tokens and len(found.tokens) == 32 - len(PROMPTS[1])
    assert found.finish_reason == "length"


def test_a_slot_is_reused_without_memory_of_its_last_owner() -> None:
    """An n-gram drafter keeps text by slot: what a slot's last request said must not be looked up."""
    of = target()
    served = runner(of, draft("ngram", of), slots=1)
    one = SamplingParams(max_new_tokens=24, ignore_eos=True)
    first = generate(served, [PROMPTS[0]], one)[0]
    generate(served, [list(np.random.default_rng(0).integers(0, 60, 40))], one)
    again = generate(served, [PROMPTS[0]], one)[0]
    assert (first.tokens, first.accepted) == (again.tokens, again.accepted)
