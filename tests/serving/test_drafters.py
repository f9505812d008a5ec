"""Every way to name a drafter reaches the server's runner: by name, by a model's folder, and as a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.config import ServeConfig, load_config
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.serving.main import load
from tests.helpers.marks import REPEATS

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
Q3A = GOLDEN / "targets" / "q3a"
PROMPT = [5, 9, 2, 5, 9, 2, 5]


def served(tmp_path: Path, *overrides: str) -> tuple[object, list[int]]:
    common = [f"target.source={Q3A}", "target.dtype=float32", f"compilation_cache={tmp_path / 'xla'}"]
    common += ["engine.num_slots=1", "engine.max_context=64", "engine.prefill_chunk=8", "engine.rules=false"]
    loaded = load(load_config(ServeConfig, None, [*common, *overrides]), lambda: None)
    answer = generate(loaded.runner, [PROMPT], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
    return loaded.facts, list(answer.tokens)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return served(tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.parametrize(
    ("overrides", "method", "proposals"),
    [
        (["drafter=ngram", "engine.num_proposals=3", "engine.ngram_max=2"], "ngram", 3),
        pytest.param([f"drafter={Q3A}", "engine.num_proposals=2"], "small_model", 2, marks=REPEATS),
        pytest.param(
            [f"drafter={GOLDEN / '03_dflash_gen_q3a' / 'draft'}", "engine.tree_nodes=6"], "ddtree", None, marks=REPEATS
        ),
    ],
)
def test_by_name_by_model_and_as_a_tree(
    tmp_path: Path, plain: list[int], overrides: list[str], method: str, proposals: int | None
) -> None:
    facts, tokens = served(tmp_path, *overrides)
    assert tokens == plain
    assert facts.method == method
    assert proposals is None or facts.num_proposals == proposals
