"""`make test-slow-smoke`: every method's smoke run lowers its loss, and its export serves with tau above 1."""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.drafting import DraftOptions, open_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.config import TrainConfig, load_config
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.evaluation.tau import measure_tau
from jaxspec.training.build import fresh_drafter, initial_params
from tests.decoding.smollm2_pair import recorded
from tests.slow import smoke
from tests.slow.identical import Record, printing

PROMPTS, NEW_TOKENS, TREE_NODES = 8, 32, 8
WINDOW = 5  # steps at either end whose mean loss is compared: one batch of four answers is no measurement


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("smollm2", "float32")


def taus(target: Target, draft: Draft, num_proposals: int | None, *params: Any) -> list[float]:
    """tau of each of these weights on prompts that no data file holds, greedy, by the serving round."""
    prompts = [record["prompt_ids"] for record in recorded()[:PROMPTS]]
    context = max(map(len, prompts)) + NEW_TOKENS
    runner = SlotRunner(target, draft, num_slots=PROMPTS, max_context=context, num_proposals=num_proposals)
    found = []
    for weights in params:
        runner.replace_draft(weights)
        found.append(measure_tau(runner, prompts, SamplingParams(max_new_tokens=NEW_TOKENS))[0].tau)
    return found


@pytest.mark.parametrize("method", smoke.methods())
@pytest.mark.slow("smoke", covers=("jaxspec", "pallas_kernels", "configs/smollm2", "demo/data"))
def test_the_smoke_run_of_a_config_learns_and_serves(method: str, target: Target, record_property: Record) -> None:
    shown = printing(record_property)
    record: Record = lambda name, value: shown(f"{method}_{name}", value)  # noqa: E731
    record("cores", len(os.sched_getaffinity(0)))
    smoke.train(method, "run.fresh=true", "run.log_every=1")
    report = json.loads((smoke.directory(method) / "report.json").read_text())
    lines = (smoke.directory(method) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    first, last = (sum(part) / WINDOW for part in (losses[:WINDOW], losses[-WINDOW:]))
    record("steps", report["step"])
    record("seconds", round(report["seconds"], 1))
    record("first_loss", round(first, 4))
    record("last_loss", round(last, 4))

    config = load_config(TrainConfig, smoke.CONFIGS / f"{method}.yaml", smoke.overrides(method))
    fresh = fresh_drafter(config, target.config)
    options = DraftOptions(tree_nodes=TREE_NODES if fresh.tree_nodes else None)
    draft, count = open_drafter(smoke.export(method), target, options)
    assert draft.drafter.method == method
    begun = initial_params(draft.drafter, jax.random.key(config.run.seed), "float32")
    untrained, trained = taus(target, draft, count, begun, draft.params)
    record("untrained_tau", round(untrained, 4))
    record("tau", round(trained, 4))
    assert last <= 0.9 * first, f"{method}: loss {first:.4f} -> {last:.4f}, expected at least 10 % lower"
    assert trained > max(1.0, untrained), f"{method}: tau {trained:.4f}, untrained {untrained:.4f}"
