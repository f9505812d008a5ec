"""Confidence of tree nodes, the branches that a threshold takes away, and what the runner and the server make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.config import ServeConfig, load_config
from jaxspec.decoding.generate import generate
from jaxspec.decoding.plan import confident_nodes
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.options import DraftOptions, configured
from jaxspec.errors import ConfigError
from jaxspec.serving.main import load
from tests.decoding.test_trees import line, random_parents, tree_of
from tests.drafters import eagle_pairs as pairs
from tests.drafters import tiny
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import GOLDEN, tiny_draft, tiny_target

pytestmark = pytest.mark.ci

TARGET = tiny_target()
PROMPTS = ([5, 9, 9, 2], [7] * 11, [1, 2, 3, 4, 1, 2])
METHODS = ("eagle2", "eagle-static", "eagle3", "ddtree")


def draft(method: str, survival: bool = True) -> Draft:
    if method == "ddtree":
        made = tiny_draft(TARGET)
        inner = dataclasses.replace(made.drafter, survival_confidence=survival)
        return dataclasses.replace(made, drafter=DDTree(inner, 9))
    if method == "eagle3":
        return pairs.draft(pairs.eagle3(TARGET, pairs.DYNAMIC, survival_confidence=survival))
    tree = pairs.STATIC if method == "eagle-static" else pairs.DYNAMIC
    return pairs.draft(pairs.eagle(TARGET, tree, survival_confidence=survival))


def propose(made: Draft) -> Any:
    """Two requests without a context, one greedy and one hot: their trees do not depend on it."""
    sampling = dataclasses.replace(tiny.sampled(2, 3.0), temperature=jnp.array([0.0, 3.0]))
    slots = tiny.slots([3, 3], [0, 0], tiny.page_tables(2, 2))

    @jax.jit
    def run() -> Any:
        state = made.drafter.init_state(5, 8, jnp.float32, 2)
        return made.drafter.propose(made.params, made.shared(TARGET), state, slots, tiny.keys(2), sampling)

    return run()


@pytest.mark.parametrize("method", METHODS)
def test_B12_a_nodes_confidence_depends_on_no_draw_and_is_there_behind_its_option(method: str) -> None:
    made = draft(method)
    out = propose(made)
    confidence = np.asarray(out.confidence)
    assert confidence.shape == out.tokens.shape and ((confidence >= 0) & (confidence <= 1)).all()
    np.testing.assert_allclose(*confidence, rtol=1e-5)  # the same context, another temperature
    parents, depths = np.asarray(out.tree.parents)[0], np.asarray(out.tree.depths)[0]
    for parent in set(parents.tolist()):  # siblings share one distribution
        assert confidence[0][parents == parent].sum() <= 1 + 1e-5
    assert len(set(depths.tolist())) > 1 and np.ptp(confidence[0]) > 1e-3
    tokens = np.asarray(out.tokens)[0]
    if method == "ddtree":
        logits = made.drafter.inner.block_logits(made.shared(TARGET), out.trace["draft_hidden"][:, 1:])
        expected = np.asarray(jax.nn.softmax(logits, axis=-1))[0, depths - 1, tokens]
        np.testing.assert_allclose(confidence[0], expected, rtol=1e-5)
    else:
        first = np.asarray(jax.nn.softmax(out.trace["draft_first_logits"], axis=-1))[0]
        top = np.flatnonzero(depths == 1)
        np.testing.assert_allclose(np.sort(confidence[0][top])[::-1], np.sort(first)[::-1][: len(top)], rtol=1e-5)
    assert propose(draft(method, survival=False)).confidence is None


def test_a_branch_below_the_threshold_goes_with_all_that_hangs_on_it() -> None:
    rng = np.random.default_rng(0)
    parents = np.stack([random_parents(rng, 9) for _ in range(40)])
    confidence, exists = rng.random(parents.shape), rng.random(parents.shape) > 0.2
    found = np.asarray(confident_nodes(tree_of(parents, 40, exists), jnp.asarray(confidence), 0.4).valid)
    for request in range(40):
        for row in range(1, 10):
            way = [one - 1 for one in line(parents[request], row)[1:]]
            assert found[request, row - 1] == all(confidence[request, way] >= 0.4) & all(exists[request, way])
    nothing = confident_nodes(tree_of(parents[:1], 1), jnp.full((1, 9), jnp.nan), 0.1)
    assert not np.asarray(nothing.valid).any()  # a confidence that is no number is none


def answers(made: Draft | None, **options: Any) -> Any:
    runner = SlotRunner(TARGET, made, num_slots=3, max_context=96, prefill_chunk=8, page_size=8, **options)
    return generate(runner, PROMPTS, SamplingParams(max_new_tokens=48, ignore_eos=True))


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=REPEATS if name.startswith("eagle-") or name == "eagle2" else ()) for name in METHODS],
)
def test_B14_a_threshold_prunes_trees_and_changes_no_token(method: str) -> None:
    plain = answers(None)
    whole, pruned, none = (answers(draft(method), confidence_threshold=t) for t in (0.0, 0.3, 1.0))
    for done in (whole, pruned, none):
        assert [one.tokens for one in done] == [one.tokens for one in plain]
    verified = [sum(sum(one.proposed) for one in done) for done in (whole, pruned, none)]
    assert verified[0] > verified[1] > verified[2] == 0, verified
    assert sum(sum(one.accepted) for one in pruned) <= sum(sum(one.accepted) for one in whole)


def test_a_threshold_without_a_confidence_or_out_of_range_is_an_error() -> None:
    for silent, name in ((draft("eagle2", survival=False), "eagle"), (tiny_draft(TARGET), "dflash")):
        runner = SlotRunner(TARGET, silent, num_slots=1, max_context=32, confidence_threshold=0.5)
        with pytest.raises(ConfigError, match=rf"confidence_threshold: found 0\.5, expected 0: the {name} drafter"):
            runner.warm_up()
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"engine\.confidence_threshold: found .*, expected a number from 0 to 1"):
            SlotRunner(TARGET, None, num_slots=1, max_context=32, confidence_threshold=wrong)


def test_options_give_a_tree_its_confidence() -> None:
    tree, _ = configured(draft("eagle3", survival=False).drafter, DraftOptions(survival_confidence=True, tree_nodes=5))
    assert tree.survival_confidence and tree.tree_nodes == 5
    grown, _ = configured(tiny_draft(TARGET).drafter, DraftOptions(survival_confidence=True, tree_nodes=5))
    assert isinstance(grown, DDTree) and grown.inner.survival_confidence


def test_the_servers_key_reaches_the_round() -> None:
    common = ["target.source=" + str(GOLDEN / "targets" / "q3a"), "target.dtype=float32", "engine.num_slots=1",
              "engine.max_context=64", f"drafter={GOLDEN / '03_dflash_gen_q3a' / 'draft'}"]  # fmt: skip
    options = ["engine.survival_confidence=true", "engine.confidence_threshold=0.25"]
    loaded = load(load_config(ServeConfig, None, [*common, *options]), lambda: None)
    assert loaded.runner.program.confidence_threshold == 0.25
    with pytest.raises(ConfigError, match=r"engine\.confidence_threshold and drafter contradict each other"):
        load_config(ServeConfig, None, ["target.source=t", "engine.confidence_threshold=0.5"])
    with pytest.raises(ConfigError, match=r"engine\.confidence_threshold: found 2"):
        load_config(ServeConfig, None, ["target.source=t", "drafter=x", "engine.confidence_threshold=2"])
