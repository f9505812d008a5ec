"""Rows that are written only where they are new, against tables that are made anew each time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.decoding.processors import LogitRules, rule_rows
from jaxspec.decoding.ragged import Rules
from jaxspec.decoding.request import SamplingParams
from jaxspec.serving.ending import AnswerEnd
from jaxspec.serving.pages import PageLease
from jaxspec.serving.requests import Request
from jaxspec.serving.slot_tables import SlotTables

pytestmark = pytest.mark.ci

SLOTS, PAGES = 4, 6
NAMES = ("table", "limits", "pinned", "seeds", "samples", "temperature", "top_k", "top_p", "min_p", "logprobs")


def tables(rules: bool) -> SlotTables:
    config = SimpleNamespace(vocab_size=50)
    program: Any = SimpleNamespace(
        num_slots=SLOTS, pages_per_slot=PAGES, max_context=20, rules=rules, decoder=SimpleNamespace(config=config)
    )
    return SlotTables(program, spare=2)


def request(slot: int, rng: np.random.Generator) -> Request:
    rules = LogitRules(float(rng.uniform(1, 2)), logit_bias={3: 1.0}) if rng.random() < 0.5 else LogitRules()
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7])), top_k=int(rng.integers(0, 99)), top_p=float(rng.uniform(0.1, 1)),
        min_p=float(rng.random()), logprobs=rng.choice([None, 3]), rules=rules, seed=rng.choice([None, 5]),
    )  # fmt: skip
    row: Any = {name: value[0] for name, value in rule_rows(rules).items()}
    asked = None if rules == LogitRules() else Rules(**row)
    pages = rng.integers(1, 99, 2).tolist()
    return Request(
        1, slot, [1], params, int(rng.integers(9)), int(rng.integers(2**63)), AnswerEnd(9), asked, PageLease(4, pages)
    )


@pytest.mark.parametrize("rules", [False, True])
def test_rows_are_those_of_tables_that_were_just_made(rules: bool) -> None:
    rng = np.random.default_rng(0)
    kept, owners = tables(rules), [request(slot, rng) for slot in range(SLOTS)]
    for _ in range(300):
        slot = int(rng.integers(SLOTS))
        pages = owners[slot].lease.pages
        change = rng.integers(4)
        if change == 0:
            owners[slot] = request(slot, rng)
        elif change == 1 and len(pages) < PAGES:
            pages.append(int(rng.integers(1, 99)))
        elif change == 2:  # preempted, and as long as before on other pages
            owners[slot].lease.pages = rng.integers(1, 99, len(pages)).tolist()
        here = [one for one in owners if rng.random() < 0.8]
        fresh = tables(rules)
        for each in (kept, fresh):
            each.show(here)
        for slots in (2, SLOTS):
            for name in NAMES:
                np.testing.assert_array_equal(kept.first(slots, name), fresh.first(slots, name), err_msg=name)
            np.testing.assert_equal(kept.rules(slots), fresh.rules(slots))


def test_a_row_says_what_its_request_asks_and_an_empty_one_nothing() -> None:
    one = request(2, np.random.default_rng(3))
    made = tables(False)
    made.show([one])
    found = {name: made.first(SLOTS, name)[2].tolist() for name in NAMES}
    assert found["table"] == [*one.lease.pages, 0, 0, 0, 0] and found["limits"] == 2 * 4 + 1 - 2
    assert found["seeds"][0] + (found["seeds"][1] << 32) == one.seed
    assert (found["samples"], found["pinned"]) == (one.sample, one.pinned)
    assert found["top_k"] == min(one.params.top_k, 50) and found["logprobs"] == (one.params.logprobs is not None)
    for name in ("temperature", "top_p", "min_p"):
        assert found[name] == pytest.approx(getattr(one.params, name))
    column = made.first(SLOTS, "table")
    made.show([])
    assert column.any()  # what was given out is not written over
    for name in NAMES:
        assert (made.first(SLOTS, name) == (name == "top_p")).all(), name
