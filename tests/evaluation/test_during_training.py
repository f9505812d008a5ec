"""The evaluation inside a run: what training says of acceptance is what the served round does, slot by slot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Batch
from jaxspec.evaluation import during_training
from jaxspec.models.layers import stack_layers
from jaxspec.training import main
from jaxspec.training.features import capture
from tests.training import world
from tests.training.test_run import Lines

PROMPTS = [[2, 3, 4, 5], [9, 8, 7], [20, 30, 10, 11, 12], [35, 6, 31]]
NEW = 24


def greedy(runner: SlotRunner, new: int):
    return generate(runner, PROMPTS, SamplingParams(max_new_tokens=new, ignore_eos=True))


def texts(target, room: int):
    """The target's own answers, longer than what is served by `room`, so that no served block ends without labels."""
    plain = SlotRunner(target, num_slots=2, max_context=64, prefill_chunk=8)
    return [one.prompt_ids + one.tokens for one in greedy(plain, NEW + room)]


def trained(tmp_path, method: str, target, answers):
    """A drafter that has learnt some of these answers and not all."""
    lengths = [len(one) for one in answers]
    np.savez(
        tmp_path / "own.npz",
        tokens=np.concatenate(answers).astype(np.uint16),
        offsets=np.cumsum([0, *lengths]),
        prompt_lengths=[len(prompt) for prompt in PROMPTS],
    )
    extra = {"drafter__selector_rank": 4, "drafter__selector_top_k": 6, "drafter__conv_group_size": 4}
    config = world.config(
        tmp_path / method, tmp_path / "own.npz", method, run__steps=25, data__max_length=max(lengths),
        data__num_anchors=16, **(extra if method == "dflash2" else {}),
    )  # fmt: skip
    report = main.run(config, target=target, reporter=Lines())
    return load_drafter(report["export"], target, "float32")


@pytest.mark.ci
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_B38_acceptance_in_training_is_the_served_rounds_count_by_count(tmp_path, method):
    target = world.target()
    answers = texts(target, 5)
    draft = trained(tmp_path, method, target, answers)
    drafter = draft.drafter
    if method == "dflash2":  # the export does not say with which weight its selector was trained
        objective = dataclasses.replace(drafter.objective_config, selector_alpha=1.0)
        drafter = dataclasses.replace(drafter, objective_config=objective)
    runner = SlotRunner(target, draft, num_slots=2, max_context=64, prefill_chunk=8)
    done = greedy(runner, NEW)
    served = count(done, drafter.num_proposals)
    assert 0 < sum(served.accepted_at) < served.rounds * drafter.num_proposals
    length, rows = max(map(len, answers)), max(one.rounds for one in done)
    ids, mask = np.zeros((len(answers), length), np.int32), np.zeros((len(answers), length), bool)
    anchors, keep = np.zeros((len(answers), rows), np.int32), np.zeros((len(answers), rows), bool)
    for row, (one, text) in enumerate(zip(done, answers, strict=True)):
        assert one.prompt_ids + one.tokens == text[: len(one.prompt_ids) + NEW]  # losslessness, by the way
        ids[row, : len(text)], mask[row, len(one.prompt_ids) : len(text)] = text, True
        at = len(one.prompt_ids)
        for index, accepted in enumerate(one.accepted):
            anchors[row, index], keep[row, index] = at, True
            at += accepted + 1
    stacked = stack_layers(target.params)
    features, teacher = capture(target.model, drafter, stacked, jnp.asarray(ids), jnp.float32)
    batch = Batch(*map(jnp.asarray, (ids, mask)), features, jnp.asarray(anchors), jnp.asarray(keep), teacher)
    terms = jax.jit(lambda params: drafter.loss(params, draft.shared(target), batch, jax.random.key(0)))(draft.params)
    stood, reached = (np.asarray(part) for part in terms["metric/accepted_position"])
    assert stood.tolist() == served.accepted_at and reached.tolist() == served.reached_at
    total, blocks = terms["metric/accepted_tau"]
    assert (float(total), float(blocks)) == (served.tokens, served.rounds)


@pytest.mark.ci
def test_an_evaluation_reports_tau_acceptance_and_calibration_by_slot(tmp_path):
    target = world.target()
    answers = texts(target, 5)
    draft = trained(tmp_path, "dspark", target, answers)
    config = world.config(tmp_path / "e", tmp_path / "own.npz", "dspark", run__eval_new_tokens=NEW)
    stacked = dataclasses.replace(target, params=stack_layers(target.params))
    measure = during_training.measurement(config, PROMPTS, stacked, draft.drafter, draft.shared(target))
    numbers = measure(draft.params)
    slots = range(1, draft.drafter.num_proposals + 1)
    wanted = {f"{name}/{slot}" for name in ("acceptance", "survival", "ece", "brier") for slot in slots}
    assert wanted | {"tau", "tau_low", "tau_high", "rounds", "repeated_bigram_share"} <= numbers.keys()
    assert any(name.startswith("auroc/") for name in numbers)
    runner = SlotRunner(target, draft, num_slots=2, max_context=64)
    counter = count(generate(runner, PROMPTS, SamplingParams(max_new_tokens=NEW)), draft.drafter.num_proposals)
    assert (numbers["tau"], numbers["rounds"]) == (counter.tau, counter.rounds)
    assert [numbers[f"acceptance/{slot}"] for slot in slots] == counter.acceptance_conditional
    assert [numbers[f"survival/{slot}"] for slot in slots] == counter.acceptance_unconditional
    assert all(0 <= numbers[f"ece/{slot}"] <= 1 and 0 <= numbers[f"brier/{slot}"] <= 1 for slot in slots)
    assert measure(jax.tree.map(jnp.zeros_like, draft.params))["tau"] < numbers["tau"]
    assert measure(draft.params) == numbers
