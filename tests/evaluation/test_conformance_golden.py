"""Every golden case that was handed out: those of known kinds pass, the others fail as unknown."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding import acceptance
from jaxspec.drafters.block import BlockDrafter
from jaxspec.drafters.draft_tree import DynamicTree, StaticTree
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.evaluation.conformance import eagle_trees
from jaxspec.evaluation.conformance.cases import case_name, find_cases
from jaxspec.evaluation.conformance.kinds import KINDS
from jaxspec.evaluation.conformance.main import run_case
from jaxspec.models.decoder import Decoder

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = find_cases(GOLDEN)


def kind(folder: Path) -> str:
    return json.loads((folder / "case.json").read_text())["kind"]


def name(folder: Path) -> str:
    return case_name(folder, GOLDEN)


def test_all_cases_are_here_and_their_kinds_are_those_that_have_a_runner():
    assert len(CASES) == 41
    assert {kind(folder) for folder in CASES} == set(KINDS)


@pytest.mark.parametrize("folder", CASES, ids=name)
def test_golden_case(folder):
    outcome = run_case(folder, GOLDEN, dump=None)
    assert outcome.status == "pass", outcome.line()
    said = json.loads((folder / "case.json").read_text())["checks"]
    assert outcome.compared == sum(check["mode"] != "diagnostic" for check in said.values())
    assert outcome.excused == 0  # no handed-out row is close to its margin


def zeros_like_output(function):
    def silenced(*arguments, **settings):
        return jax.tree.map(jnp.zeros_like, function(*arguments, **settings))

    return silenced


SILENCED = [
    (
        BlockDrafter,
        "block_layers",
        (
            "2.",
            "3.",
            "4.dflash",
            "5.dspark_training",
            "5.dspark_generate",
            "6.dflash2_generate",
            "6.dflash2_training",
            "10.ddtree_gen",
        ),
    ),
    (BlockDrafter, "block_logits", ("5.dspark_block_sampling",)),
    (DSpark, "walk", ("5.dspark_block_sampling", "5.dspark_training_specforge", "5.dspark_generate")),
    (
        Decoder,
        "forward",
        ("1.target_forward", "3.", "6.dflash2_generate", "7.eagle2_inf", "7.eagle3_inf", "10.ddtree_gen"),
    ),
    (Eagle3, "layer", ("7.eagle3_",)),
    (Eagle, "layer", ("7.eagle1_training", "7.eagle2_inference")),
    (DynamicTree, "grow", ("7.eagle2_inference", "7.eagle3_inference")),
    (StaticTree, "tree", ("7.eagle1_static_tree",)),
    (eagle_trees, "next_level", ("7.eagle_tree_sglang",)),
    (eagle_trees, "accept_tree", ("7.eagle_tree_sglang",)),
]


def silenced_cases():
    """One case of each forward of a block drafter or a target belongs to `make test`, the others to
    `make test-slow-silenced`."""
    slow = pytest.mark.slow("silenced", covers=("jaxspec/evaluation", "jaxspec/drafters", "jaxspec/decoding"))
    for owner, method, starts in SILENCED:
        for count, folder in enumerate(folder for folder in CASES if kind(folder).startswith(starts)):
            first = not count and owner in (BlockDrafter, DSpark, Decoder)
            marked = f"{owner.__name__}.{method}-{name(folder)}"
            yield pytest.param(owner, method, folder, marks=() if first else slow, id=marked)


@pytest.mark.parametrize(("owner", "method", "folder"), list(silenced_cases()))
def test_a_silenced_forward_fails_every_case_of_its_kinds(owner, method, folder, monkeypatch):
    """The runner holds no model of its own: with the product's forward gone, nothing passes."""
    monkeypatch.setattr(owner, method, zeros_like_output(getattr(owner, method)))
    jax.clear_caches()
    outcome = run_case(folder, GOLDEN, dump=None)
    monkeypatch.undo()
    jax.clear_caches()
    assert outcome.status == "fail" and outcome.compared > 0, outcome.line()


@pytest.mark.parametrize("folder", [folder for folder in CASES if kind(folder).startswith("8.")], ids=name)
def test_silenced_acceptance_fails_every_case_of_its_kinds(folder, monkeypatch):
    from jaxspec.evaluation.conformance import acceptance as runner

    for function in ("sampled_accept", "greedy_accept", "cut_accept"):
        assert getattr(runner, function) is getattr(acceptance, function), "not the round's own function"
        with monkeypatch.context() as patch:
            patch.setattr(runner, function, zeros_like_output(getattr(acceptance, function)))
            cut_only = function == "cut_accept" and kind(folder) == "8.acceptance_deepspec"  # has no cuts
            assert run_case(folder, GOLDEN, dump=None).status == ("pass" if cut_only else "fail")
