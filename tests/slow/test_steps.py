"""`make test-slow-steps`: 20,000 rounds at temperature 1 with requests that come, go and are cancelled; all stays flat.

Measured each 1,000 rounds, with the engine emptied and the prefix cache dropped: pages held, reference counts, resident
memory, live device arrays, compilations. The drafter's acceptance must not drift (B37).
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import random
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.serving.engine import Engine
from tests.slow import soak
from tests.slow.identical import Record, printing
from tests.slow.test_soak import COVERS

STEPS, EACH, WARM, SEED = 20_000, 1_000, 3, 1
SLOTS, PAGES = 8, 48
MEGABYTES = 8.0  # that resident memory may grow by between the first samples and the last
DRIFT = 0.03  # between the acceptance of the first and the last samples; three standard errors are about 0.02


def resident() -> float:
    """Megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def requests(rng: random.Random) -> soak.Asked:
    """Of every kind, nearly all of them drawn without a seed."""
    (one,) = soak.random_requests(rng, 1)
    drawn = {"temperature": 1.0, "seed": None} if rng.random() < 0.9 else {}
    return dataclasses.replace(one, params=dataclasses.replace(one.params, **drawn))


def churn(engine: Engine, rng: random.Random, steps: int, counted: collections.Counter[str]) -> None:
    """So many rounds, and as many as it takes to come to an end."""
    running: set[int] = set()
    done = 0
    while done < steps or engine.live or engine._flights:  # a cancelled request leaves its round in the air
        while done < steps and engine.free_slots and rng.random() < 0.5:
            one = requests(rng)
            running.add(engine.admit(one.prompt, one.params, one.sample, one.grammar, one.priority))
            counted["requests"] += 1
        for event in engine.step():
            counted["accepted"] += event.accepted
            counted["proposed"] += event.proposed
            counted["tokens"] += len(event.tokens)
            if event.finish_reason is not None:
                running.discard(event.handle)
        done += 1
        if running and rng.random() < 0.02:
            engine.cancel(running.pop())
            counted["cancelled"] += 1


@pytest.mark.slow("steps", covers=COVERS)
def test_B37_20000_rounds_leave_pages_memory_and_acceptance_as_they_were(record_property: Record) -> None:
    record, began = printing(record_property), time.perf_counter()
    record("seed", SEED)
    rng = random.Random(SEED)
    engine = soak.engine(soak.draft_of("small_model"), num_slots=SLOTS, slot_buckets=(SLOTS,), num_pages=PAGES,
                         prefill_chunk=32)  # fmt: skip
    engine.warm_up()
    total: collections.Counter[str] = collections.Counter()
    memory, arrays, rates = [], [], []
    before = 0
    while engine.rounds < STEPS:
        counted: collections.Counter[str] = collections.Counter()
        churn(engine, rng, EACH, counted)
        engine.drop_prefixes()
        assert engine.held_pages == 0 and not np.any(engine._pages._allocator._references)
        assert sorted(engine._pages._allocator._free) == list(range(1, PAGES))
        assert not engine._flights and engine.free_slots == SLOTS
        gc.collect()
        memory.append(round(resident(), 1))
        arrays.append(len(jax.live_arrays()))
        rates.append(round(counted["accepted"] / counted["proposed"], 4))
        assert engine.rounds > before
        before = engine.rounds
        total += counted
        print(before, memory[-1], arrays[-1], rates[-1], flush=True)
    metrics = engine.metrics()
    for key, value in sorted(total.items()):
        record(key, value)
    record("rounds", metrics.rounds)
    record("preemptions", metrics.preemptions)
    record("prefix_hits", metrics.prefix_hits)
    record("resident_megabytes", memory)
    record("live_arrays", arrays)
    record("acceptance", rates)
    record("steps_seconds", round(time.perf_counter() - began, 1))
    assert metrics.compilations == 0 and metrics.preemptions > 100 and total["cancelled"] > 100
    assert len(set(arrays)) == 1, arrays
    assert np.mean(memory[-WARM:]) - np.mean(memory[WARM : 2 * WARM]) < MEGABYTES, memory
    assert abs(np.mean(rates[-WARM:]) - np.mean(rates[:WARM])) < DRIFT, rates
