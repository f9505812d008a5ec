"""What a user calls a drafter, and the keys of `engine` that go with it: clear errors for every mismatch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import jaxspec
from jaxspec.checkpoints.drafting import DraftOptions, check_source, open_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.config import ServeConfig, load_config
from jaxspec.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
Q3A = GOLDEN / "targets" / "q3a"
DFLASH, DSPARK = GOLDEN / "03_dflash_gen_q3a" / "draft", GOLDEN / "05_dspark_train_vanilla" / "draft"
EAGLE3 = GOLDEN / "07_eagle3_train_q3a" / "draft"


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(Q3A, "float32")


def opened(source: Any, target: Any, **options: Any) -> Any:
    return open_drafter(source, target, DraftOptions(**options))


def test_three_kinds_of_source(target: Any) -> None:
    assert opened("ngram", target)[0].drafter.method == "ngram"
    assert opened(DFLASH, target)[0].drafter.method == "dflash"
    assert opened(Q3A, target)[0].drafter.method == "small_model"
    check_source("ngram")
    check_source(DFLASH)
    with pytest.raises(CheckpointError, match="no such folder"):
        check_source("./ngram")


def test_options_reach_the_drafter(target: Any) -> None:
    draft, rest = opened("ngram", target, num_proposals=3, ngram_min=2, ngram_max=5)
    assert (draft.drafter.num_proposals, draft.drafter.min_ngram, draft.drafter.max_ngram, rest) == (3, 2, 5, None)
    assert opened("ngram", target, ngram_min=6)[0].drafter.max_ngram == 6
    draft, rest = opened(Q3A, target, num_proposals=2, survival_confidence=True)
    assert (draft.drafter.num_proposals, draft.drafter.survival_confidence, rest) == (2, True, None)
    draft, rest = opened(DFLASH, target, num_proposals=2, draft_sampling="sample", survival_confidence=True)
    assert (draft.drafter.draft_sampling, draft.drafter.survival_confidence, rest) == ("sample", True, 2)
    draft, rest = opened(DFLASH, target, tree_nodes=12)
    assert (draft.drafter.method, draft.drafter.tree_nodes, rest) == ("ddtree", 12, None)
    draft, _ = opened(EAGLE3, target, tree_nodes=7)
    assert draft.drafter.tree_nodes == 7


@pytest.mark.parametrize(
    "source, options, message",
    [
        (DSPARK, {"tree_nodes": 4}, r"engine\.tree_nodes: found 4, expected null: a dspark drafter proposes a chain"),
        ("ngram", {"tree_nodes": 4}, r"engine\.tree_nodes: found 4, expected null: a ngram drafter"),
        (
            DSPARK,
            {"draft_sampling": "argmax"},
            r"engine\.draft_sampling: found argmax, expected null: a dspark drafter",
        ),
        (DFLASH, {"ngram_max": 4}, r"engine\.ngram_max: found 4, expected null: a dflash drafter looks up no n-grams"),
        (DSPARK, {"survival_confidence": True}, r"engine\.survival_confidence: found true, expected false: a dspark"),
        (DFLASH, {"tree_nodes": 4, "draft_sampling": "sample"}, r"draft_sampling and engine\.tree_nodes contradict"),
        ("ngram", {"ngram_max": 1, "ngram_min": 2}, r"engine\.ngram_min and engine\.ngram_max: found 2 and 1"),
    ],
)
def test_options_that_mean_nothing_are_errors(target: Any, source: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(source, target, **options)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["drafter=x", "engine.tree_nodes=4", "engine.num_proposals=2"], "engine.tree_nodes and engine.num_proposals"),
        (["drafter=x", "engine.tree_nodes=4", "engine.acceptance=block"], "engine.tree_nodes and engine.acceptance"),
        (["drafter=ngram", "engine.ngram_min=4", "engine.ngram_max=2"], "engine.ngram_min and engine.ngram_max"),
        (["engine.tree_nodes=4"], "engine.tree_nodes and drafter"),
        (["engine.survival_confidence=true"], "engine.survival_confidence and drafter"),
    ],
)
def test_contradictions_stop_a_serving_config(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.") + " contradict each other"):
        load_config(ServeConfig, None, ["target.source=t", *overrides])
    load_config(ServeConfig, None, ["target.source=t", "drafter=ngram", "engine.ngram_max=4", "engine.num_proposals=3"])


def test_tokenizers_of_a_small_model_must_agree(target: Any, tmp_path: Path) -> None:
    folders = []
    for name, vocab in (("a", {"x": 0, "y": 1}), ("b", {"x": 0, "y": 2})):
        folder = tmp_path / name
        shutil.copytree(Q3A, folder)
        said = {"model": {"vocab": vocab}, "added_tokens": [{"content": "<e>", "id": 5}]}
        (folder / "tokenizer.json").write_text(json.dumps(said))
        folders.append(folder)
    ours = load_target(folders[0], "float32")
    assert opened(folders[0], ours)[0].drafter.method == "small_model"
    with pytest.raises(ConfigError, match=r"found token 'y' with id 2, expected id 1 as in the target's tokenizer"):
        opened(folders[1], ours)


def test_options_without_a_drafter_are_an_error_in_the_api() -> None:
    with pytest.raises(ConfigError, match="options of a drafter, expected a drafter"):
        jaxspec.load(Q3A, None, dtype="float32", tree_nodes=4)


@pytest.mark.ci
def test_a_recurrent_chain_reports_survival_behind_its_option(target: Any) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxspec.decoding.sampling import SlotSampling
    from jaxspec.drafters.base import Rows, Slots
    from jaxspec.models.layout import uniform_layout

    draft, _ = opened(EAGLE3, target, survival_confidence=True)
    drafter, table = draft.drafter, jnp.arange(1, 5)[None]
    sampling = SlotSampling(jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1))

    @jax.jit
    def run(params: Any, shared: Any) -> Any:
        state = drafter.init_state(5, 4, jnp.float32, 1)
        ids = jnp.array([3, 5, 7])
        features = jax.random.normal(jax.random.key(1), (3, len(drafter.taps) * target.config.hidden_size))
        layout = uniform_layout(jnp.array([0]), jnp.array([3]), table, 3)
        state = drafter.commit(params, shared, state, Rows(features, ids, jnp.array([5, 7, 9])), layout)
        slots = Slots(jnp.array([9]), jnp.array([3]), table, jnp.ones(1, bool))
        return drafter.propose(params, shared, state, slots, jax.random.split(jax.random.key(0), 1), sampling)

    out = run(draft.params, draft.shared(target))
    np.testing.assert_allclose(out.confidence, out.q.probs.max(axis=-1), atol=1e-6)
    tree, _ = opened(GOLDEN / "07_eagle2_infer_llama" / "draft", _llama(), survival_confidence=True)
    assert tree.drafter.tree_nodes and tree.drafter.survival_confidence


def _llama() -> Any:
    return load_target(GOLDEN / "targets" / "llama_a", "float32")
