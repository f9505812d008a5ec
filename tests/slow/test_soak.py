"""`make test-slow-soak`: 2,000 requests of every kind over all drafters, each answered as if it were alone.

Random arrivals, prompts and answers of 1 token to the limit, chunk sizes, cancels, preemptions, prefix hits, every
sampling feature, grammars, overlap on and off, budgets by a cost table. Compared are ids, text, reason, usage and log
probabilities to 1e-4 with the request alone and without a drafter; accept lengths, and ids that were drawn with a seed,
with the request alone and its drafter.
"""

from __future__ import annotations

import collections
import random
import time

import pytest

from jaxspec.serving.cost import StepsTable
from tests.slow import soak
from tests.slow.identical import Record, printing

COVERS = ("jaxspec/decoding", "jaxspec/drafters", "jaxspec/models", "jaxspec/serving", "pallas_kernels")
REQUESTS, SEED = 2000, 0
EACH = -(-REQUESTS // len(soak.DRAFTS))
TABLE = StepsTable((1, 6, 12, 20), (1000.0, 900.0, 500.0, 400.0), 40)
TIGHT = 1 + soak.CONTEXT // soak.PAGE + 4  # pages for little more than one whole request
SMALL_PAGES = {"prefill_chunk": 1, "overlap": False, "num_pages": 2 * TIGHT, "page_size": soak.PAGE // 2}
BUDGETS = {"prefill_chunk": 7, "prefill_pieces": 2, "num_pages": TIGHT, "cost_table": TABLE}
CHUNKS = {"prefill_chunk": 16, "num_pages": TIGHT}
ROOMY = {"prefill_chunk": 64}
WORLDS = {  # and whether grammars are served
    "none": (CHUNKS, True),
    "dflash": (BUDGETS, True),
    "dspark": (BUDGETS, True),
    "dflash2": (SMALL_PAGES, False),
    "dflare": (CHUNKS, False),
    "eagle_chain": (BUDGETS, False),
    "eagle_tree": (SMALL_PAGES, False),
    "eagle2_tree": (CHUNKS, True),
    "eagle3_chain": (CHUNKS, False),
    "eagle3_tree": (CHUNKS, False),
    "ddtree": ({**CHUNKS, "overlap": False}, False),
    "ngram": (ROOMY, False),
    "small_model": (CHUNKS, False),
}


@pytest.fixture(scope="module")
def oracle():
    """Decodes alone, without a drafter."""
    made = soak.lone(None)
    made.warm_up()
    return made


@pytest.mark.parametrize("name", list(soak.DRAFTS))
@pytest.mark.slow("soak", covers=COVERS)
def test_B14_every_answer_is_that_of_a_lone_request(name: str, oracle, record_property: Record) -> None:
    record, began = printing(record_property), time.perf_counter()
    record("seed", SEED)
    rng = random.Random(f"{SEED} {name}")
    draft, (world, constrained) = soak.draft_of(name), WORLDS[name]
    engine = soak.engine(draft, **world, **({} if constrained else {"grammars": None}))
    engine.warm_up()
    # A drafter's requests that are drawn know one oracle only, itself: their grammars are those of drafter none.
    asked = soak.random_requests(rng, EACH, constrained, drawn_grammars=draft is None)
    answers = soak.together(engine, asked, rng, cancel=0.01)
    metrics = engine.metrics()
    counted: collections.Counter[str] = collections.Counter(
        requests=len(asked), compared=len(answers), cancelled=len(asked) - len(answers),
        preemptions=metrics.preemptions, prefix_hits=metrics.prefix_hits,
    )  # fmt: skip
    accepted: collections.Counter[int] = collections.Counter()
    engine.drop_prefixes()
    assert engine.held_pages == 0
    for at, found in answers.items():
        one = asked[at]
        accepted.update(found.accepted)
        counted["drawn"] += not one.greedy
        counted["grammars"] += one.grammar is not None
        if one.greedy or draft is None:
            soak.compare(found, soak.alone(oracle, one))
        if draft is not None and (not one.greedy or ("cost_table" not in world and at % 2 == 0)):
            itself = soak.alone(engine, one)
            engine.drop_prefixes()
            soak.compare(found, itself)
            if "cost_table" not in world:
                assert found.accepted == itself.accepted
                counted["accept_lengths_compared"] += 1
    assert engine.compile_count == 0
    assert metrics.preemptions > 0 or "num_pages" not in world
    assert metrics.prefix_hits > 0 or name == "ngram"
    assert draft is None or (accepted[0] and sum(accepted[r] for r in accepted if r > 1)), accepted
    for key, value in counted.items():
        record(f"{name}_{key}", value)
    record(f"{name}_rounds_by_accepted", [accepted[r] for r in range(max(accepted, default=0) + 1)])
    record(f"{name}_seconds", round(time.perf_counter() - began, 1))
