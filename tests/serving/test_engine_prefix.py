"""B27 and B26 for drafters whose context is not a row a token: prefix hits and new owners change no accept length."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.serving.engine import Engine
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import MASK_ID, loud
from tests.slow import soak

pytestmark = pytest.mark.ci

PAGE, WINDOW = 4, 7


def sliding() -> Draft:
    """A full layer and one that slides."""
    config = fresh_config(
        soak.target().model.config, num_layers=2, block_size=4, mask_token_id=MASK_ID, target_layer_ids=(0, 1),
        layer_types=("sliding_attention", "full_attention"), sliding_window=WINDOW,
    )  # fmt: skip
    drafter = DFlash(config)
    return Draft(soak.Hinted(drafter, soak.likely()), loud(drafter.init(jax.random.key(3), jnp.float32)))


def said(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """Rounds of each prompt, two at a time."""
    waiting, owners, heard = list(range(len(prompts))), {}, {}
    while waiting or engine.live:
        while waiting and engine.free_slots:
            index = waiting.pop(0)
            owners[engine.admit(prompts[index], SamplingParams(max_new_tokens=12, ignore_eos=True))] = index
        for event in engine.step():
            heard.setdefault(owners[event.handle], []).append((event.tokens, event.accepted))
    return [heard[index] for index in range(len(prompts))]


@pytest.mark.parametrize("name", ["eagle_chain", pytest.param("ngram", marks=REPEATS), "sliding"])
def test_B26_B27_a_prefix_hit_and_the_slots_last_owner_change_no_accept_length(name: str) -> None:
    draft = sliding() if name == "sliding" else soak.draft_of(name)
    engine = Engine(
        soak.target(), draft, num_slots=2, max_context=64, page_size=PAGE, prefill_chunk=8, slot_buckets=(2,),
        rules=False, max_logprobs=None, pause_drafting=False, cache_fill=float("nan"),
    )  # fmt: skip
    rng = random.Random(3)
    root = [rng.randrange(60) for _ in range(40)]
    # The same beginnings, page edges among them, with other tokens behind: what is known of a page's last row differs.
    prompts = [root[:length] + [rng.randrange(60) for _ in range(more)] for length in (40, 20, 8, 24, 33, 4, 12)
               for more in (1, 1, 5)]  # fmt: skip
    with_hits = said(engine, prompts)
    assert (engine.metrics().prefix_hits > 5) == (name != "ngram")
    fresh = []
    for prompt in prompts:  # nobody before it, and nothing known
        engine.drop_prefixes()
        fresh += said(engine, [prompt])
    assert with_hits == fresh
    assert len({accepted for rounds in fresh for _, accepted in rounds}) > 2
