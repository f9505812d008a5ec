"""The evaluation inside a run: what training says of acceptance is what the served round does, slot by slot."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Batch, Shared
from jaxspec.evaluation import during_training
from jaxspec.models.layers import stack_layers, unembed
from jaxspec.training.build import fresh_drafter
from jaxspec.training.features import capture
from tests.helpers.marks import REPEATS
from tests.training import world

PROMPTS = [[2, 3, 4, 5], [9, 8, 7], [20, 30, 10, 11, 12], [35, 6, 31]]
NEW, STEPS = 24, 30


def greedy(target, new: int) -> list[tuple[int, ...]]:
    """The target's own answers, prompt included, by plain forwards over the whole text."""
    stacked = stack_layers(target.params)

    @jax.jit
    def best(ids, last):
        hidden = target.model.forward_sequences(stacked, ids, ()).hidden
        rows = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        return jnp.argmax(unembed(rows, target.head), axis=-1)

    ids = np.zeros((len(PROMPTS), max(map(len, PROMPTS)) + new), np.int32)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    for _ in range(new):
        ids[np.arange(len(PROMPTS)), lengths] = np.asarray(best(ids, lengths - 1))
        lengths += 1
    return [tuple(ids[row, :length].tolist()) for row, length in enumerate(lengths)]


class Scene:
    """A target, its answers (longer than what is served, so that no served block ends without labels), and a drafter
    that learns some of them."""

    def __init__(self, tmp_path, method: str):
        self.target = world.target()
        extra = {"drafter__selector_rank": 4, "drafter__selector_top_k": 6, "drafter__conv_group_size": 4}
        changes = {"run__eval_new_tokens": NEW, **(extra if method == "dflash2" else {})}
        self.config = world.config(tmp_path / "run", tmp_path / "none.npz", method, **changes)
        self.drafter = fresh_drafter(self.config, world.MODEL)
        self.answers = greedy(self.target, NEW + self.drafter.num_proposals)
        size = max(map(len, self.answers))
        self.ids, self.mask = np.zeros((len(PROMPTS), size), np.int32), np.zeros((len(PROMPTS), size), bool)
        for row, (prompt, text) in enumerate(zip(PROMPTS, self.answers, strict=True)):
            self.ids[row, : len(text)], self.mask[row, len(prompt) : len(text)] = text, True
        stacked = stack_layers(self.target.params)
        inputs = capture(self.target.model, self.drafter, stacked, jnp.asarray(self.ids), jnp.float32)
        self.features, self.teacher = inputs
        self.shared = Shared(self.target.embedding, self.target.head)

        @jax.jit
        def terms(params, batch):
            def loss(params):
                found = self.drafter.loss(params, self.shared, batch, jax.random.key(0))
                return self.drafter.objective(found), found

            (_, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return found, grads

        self.terms = terms
        self.params = self._trained()

    def batch(self, anchors: list[list[int]]) -> Batch:
        """One of NEW anchors a row, whatever their number: one shape."""
        places, keep = np.zeros((len(anchors), NEW), np.int32), np.zeros((len(anchors), NEW), bool)
        for row, found in enumerate(anchors):
            places[row, : len(found)], keep[row, : len(found)] = found, True
        return Batch(
            *map(jnp.asarray, (self.ids, self.mask)), self.features, *map(jnp.asarray, (places, keep)), self.teacher
        )

    def _trained(self):
        adam = optax.adam(1e-2)
        params = self.drafter.init(jax.random.key(1), jnp.float32)
        state, update = adam.init(params), jax.jit(adam.update)
        everywhere = self.batch([list(range(len(prompt), len(prompt) + NEW)) for prompt in PROMPTS])
        for _ in range(STEPS):
            moves, state = update(self.terms(params, everywhere)[1], state)
            params = jax.tree.map(jnp.add, params, moves)
        return params

    def draft(self) -> Draft:
        return Draft(self.drafter, self.params)


@pytest.mark.ci
@pytest.mark.parametrize("method", [pytest.param("dflash2", marks=REPEATS), "dspark"])
def test_B38_acceptance_in_training_is_the_served_rounds_count_by_count(tmp_path, method):
    """fp32, greedy, the same weights and tokens: the numbers of accepted and of reached slots are equal, slot by slot.
    Of a DSpark, the evaluation inside a run is held against the same counts."""
    scene = Scene(tmp_path, method)
    runner = SlotRunner(scene.target, scene.draft(), num_slots=2, max_context=64, prefill_chunk=8)
    done = generate(runner, PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    served = count(done, scene.drafter.num_proposals)
    assert 0 < sum(served.accepted_at) < served.rounds * scene.drafter.num_proposals and served.accepted_at[-1]
    anchors: list[list[int]] = []
    for one, text in zip(done, scene.answers, strict=True):
        assert one.prompt_ids + one.tokens == text[: len(one.prompt_ids) + NEW]  # losslessness, by the way
        starts = itertools.accumulate((r + 1 for r in one.accepted), initial=len(one.prompt_ids))
        anchors.append(list(starts)[:-1])
    terms, _ = scene.terms(scene.params, scene.batch(anchors))
    stood, reached = (np.asarray(part) for part in terms["metric/accepted_position"])
    assert stood.tolist() == served.accepted_at and reached.tolist() == served.reached_at
    total, blocks = terms["metric/accepted_tau"]
    assert (float(total), float(blocks)) == (served.tokens, served.rounds)
    if method == "dspark":
        _evaluation(scene, runner)


def _evaluation(scene: Scene, runner: SlotRunner):
    stacked = dataclasses.replace(scene.target, params=stack_layers(scene.target.params))
    measure = during_training.measurement(scene.config, PROMPTS, stacked, scene.drafter, scene.shared)
    numbers = measure(scene.params)
    slots = range(1, scene.drafter.num_proposals + 1)
    assert {f"{name}/{slot}" for name in ("ece", "brier") for slot in slots} <= numbers.keys()
    assert any(name.startswith("auroc/") for name in numbers)
    assert all(0 <= numbers[f"ece/{slot}"] <= 1 and 0 <= numbers[f"brier/{slot}"] <= 1 for slot in slots)
    counter = count(generate(runner, PROMPTS, SamplingParams(max_new_tokens=NEW)), scene.drafter.num_proposals)
    assert (numbers["tau"], numbers["rounds"]) == (counter.tau, counter.rounds)
    assert numbers["tau_low"] <= numbers["tau"] <= numbers["tau_high"]
    assert [numbers[f"acceptance/{slot}"] for slot in slots] == counter.acceptance_conditional
    assert [numbers[f"survival/{slot}"] for slot in slots] == counter.acceptance_unconditional
    assert measure(jax.tree.map(jnp.zeros_like, scene.params))["tau"] < numbers["tau"]
    assert measure(scene.params) == numbers
