"""A DSpark that starts from a DFlash, DeepSpec's or z-lab's: with W2 at zero it changes nothing at step 0."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.drafters.dspark import DEEPSPEC, with_fresh_heads
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.errors import ConfigError
from jaxspec.training import main as training
from jaxspec.training.build import fresh_drafter, warm_start
from tests.drafters import tiny
from tests.helpers.marks import REPEATS
from tests.training import world

pytestmark = pytest.mark.ci

SOURCES = {
    "z-lab": lambda: tiny.dflash(layer_types=("sliding_attention", "full_attention"), sliding_window=5),
    "deepspec": lambda: tiny.dspark(0, confidence=False, layout=DEEPSPEC),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_warm_start_changes_nothing_bit_for_bit(source: str, kind: str, dtype: Any) -> None:
    """Hidden states and logits of training; hidden states, rows and greedy proposals of serving."""
    drafter = SOURCES[source]()
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.random_params(drafter))
    grown, warm = with_fresh_heads(drafter, params, jax.random.key(1), MarkovConfig(3, kind))
    assert jax.tree.structure(warm) == jax.tree.structure(grown.abstract_params())
    assert grown.sample_from_anchor == (source == "deepspec") and grown.num_proposals == drafter.num_proposals
    assert grown.config.layer_masks == drafter.config.layer_masks
    w2 = warm["markov_head"]["markov_w2"]["weight"]
    assert not np.asarray(w2).any() and np.asarray(warm["markov_head"]["markov_w1"]["weight"]).any()
    shared = jax.tree.map(lambda x: x.astype(dtype), tiny.shared())
    batch = tiny.batch([[0, 3, 7], [2, 5, 11]])
    rows = [np.random.default_rng(8).normal(size=pool.shape) for pool in drafter.init_state(7, 4, dtype)]
    table = tiny.page_tables(2, 3)

    def both(one: Any, weights: Any) -> tuple[Any, ...]:
        hidden = one.training_hidden(weights, shared, batch)
        logits = one.block_logits(shared, hidden)
        if one is grown:  # the grown drafter's own logits, previous tokens and all
            z = one._token_inputs(weights, shared, batch)[0][1]
            logits = one.draft_logits(weights, shared, hidden[:, :, one.first_row :], z)
        else:
            logits = logits[:, :, drafter.config.block_size - drafter.num_proposals :]
        state = tuple(jnp.asarray(row, dtype) for row in rows)
        out = one.propose(weights, shared, state, tiny.slots([7, 9], [3, 6], table), tiny.keys(2), tiny.greedy(2))
        served = out.trace["draft_hidden"]
        return hidden, logits, out.tokens, served[:, served.shape[1] - drafter.num_proposals :]

    batch = dataclasses.replace(batch, teacher_hidden=jnp.zeros((*batch.input_ids.shape, tiny.HIDDEN), dtype))
    before, after = (jax.jit(lambda w, o=one: both(o, w))(w) for one, w in ((drafter, params), (grown, warm)))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(old, np.float32), np.asarray(new, np.float32))


def sources(tmp_path: Path, deepspec: bool) -> Path:
    """An exported draft of the training world, in either layout."""
    target = world.target()
    config = world.config(tmp_path / "x", tmp_path / "x.npz", "dflash")
    drafter = fresh_drafter(config, target.config)
    draft = Draft(drafter, drafter.init(jax.random.key(3), jnp.float32))
    if deepspec:
        headless = MarkovConfig(0, confidence=False, confidence_with_markov=False)
        drafter, params = with_fresh_heads(drafter, draft.params, jax.random.key(0), headless)
        drafter = dataclasses.replace(drafter, layout=DEEPSPEC, sample_from_anchor=True)
        draft = Draft(drafter, params, target.embedding, target.head)
    return save_drafter(tmp_path / "source", draft)


@pytest.mark.parametrize("deepspec", [False, pytest.param(True, marks=REPEATS)])
def test_a_run_from_a_dflash_starts_where_it_is_and_exports_a_dspark(deepspec: bool, tmp_path: Path) -> None:
    target, data = world.target(), world.write_data(tmp_path / "data.npz")
    source = sources(tmp_path, deepspec)
    changes = {
        "drafter__source": str(source), "drafter__sample_from_anchor": deepspec, "run__steps": 4,
        "run__export": str(tmp_path / "export"),
    }  # fmt: skip
    before = load_drafter(source, target)
    assert before.drafter.method == ("dspark" if deepspec else "dflash")
    config = world.config(tmp_path / "run", data, "dspark", **changes)
    warm = warm_start(config, before)
    assert warm.drafter.heads.rank == 4 and warm.drafter.heads.confidence
    np.testing.assert_array_equal(warm.params["fc"]["weight"], before.params["fc"]["weight"])
    report = training.run(config, target=target)
    trained = load_drafter(report["export"], target)
    assert trained.drafter.method == "dspark" and trained.drafter.sample_from_anchor == deepspec
    assert trained.drafter.own_embeddings == deepspec
    assert np.asarray(trained.params["markov_head"]["markov_w2"]["weight"]).any()  # and from there on it learns


@pytest.mark.parametrize("deepspec", [False, True])
def test_B45_rows_that_the_source_did_not_train_are_refused(deepspec: bool, tmp_path: Path) -> None:
    before = load_drafter(sources(tmp_path, deepspec), world.target())
    changes = {"drafter__source": "x", "drafter__sample_from_anchor": not deepspec}
    expected = str(deepspec).lower()
    with pytest.raises(ConfigError, match=rf"drafter\.sample_from_anchor: found .*, expected {expected}, as"):
        warm_start(world.config(tmp_path / "run", tmp_path / "d.npz", "dspark", **changes), before)


def test_B48_a_dspark_with_heads_keeps_them(tmp_path: Path) -> None:
    """A source that has heads is trained on as it is; asking for none of them leaves a headless one headless."""
    drafter = tiny.dspark(3)
    draft = Draft(drafter, drafter.init(jax.random.key(0), jnp.float32))
    config = world.config(tmp_path / "run", tmp_path / "d.npz", "dspark", drafter__source="x")
    assert warm_start(config, draft) is draft
    headless = tiny.dspark(0, confidence=False)
    draft = Draft(headless, headless.init(jax.random.key(0), jnp.float32))
    none = {"drafter__source": "x", "drafter__markov_rank": 0, "drafter__confidence_head": False}
    assert warm_start(world.config(tmp_path / "run", tmp_path / "d.npz", "dspark", **none), draft) is draft
