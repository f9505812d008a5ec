"""A language model as the drafter: the target drafting for itself is the oracle, and every fault must show."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, save_drafter
from jaxspec.checkpoints.drafting import open_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Rows, Slots
from jaxspec.drafters.small_model import SmallModel
from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layout import uniform_layout
from tests.decoding.enumeration import Case, output_law, target_law
from tests.decoding.test_enumeration import through_jaxspec
from tests.helpers.worlds import GOLDEN, TINY, tiny_target

pytestmark = pytest.mark.ci

M = 4
PROMPTS = ([5, 9, 9, 2], [7] * 11, [1, 2, 3, 4, 1, 2])


def windowed() -> Any:
    """A target whose first layer slides, so that the drafter's window is tested too."""
    made = tiny_target()
    config = dataclasses.replace(made.model.config, layer_windows=(6, None))
    return dataclasses.replace(made, model=Decoder(config))


def serve(drafter: SmallModel, params: Any, of: Any, one: SamplingParams) -> Any:
    runner = SlotRunner(
        of,
        Draft(drafter, params),
        num_slots=2,
        max_context=96,
        prefill_chunk=4,
        page_size=4,
        cache_fill=float("nan"),
    )
    return count(generate(runner, PROMPTS, one), M)


GREEDY = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, ignore_eos=True, temperature=0.9, top_k=20, seed=3)


@pytest.mark.ci
@pytest.mark.parametrize("one", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_B51_a_target_that_drafts_for_itself_is_always_accepted(one: SamplingParams) -> None:
    """Same weights, same text, own K/V: q is p, so every proposal stands, drawn ones included."""
    of = windowed()
    counter = serve(SmallModel(of.model, M), of.params, of, one)
    assert counter.tau == M + 1 and sum(counter.accepted_at) == sum(counter.offered_at) > 0


class Shifted(SmallModel):
    """Commits the token after each row instead of the row's own."""

    def commit(self, params: Any, shared: Any, state: Any, rows: Rows, layout: Any) -> Any:
        rows = dataclasses.replace(rows, tokens=rows.next_tokens)
        return super().commit(params, shared, state, rows, layout)


class Forgetful(SmallModel):
    """Loses the last committed row."""

    def propose(self, params: Any, shared: Any, state: Any, slots: Slots, keys: Any, sampling: Any) -> Any:
        return super().propose(
            params, shared, state, dataclasses.replace(slots, positions=slots.positions - 1), keys, sampling
        )


class Blind(SmallModel):
    """Never commits what verification accepted: only prompts reach it."""

    def commit(self, params: Any, shared: Any, state: Any, rows: Rows, layout: Any) -> Any:
        return state if layout.owners is None else super().commit(params, shared, state, rows, layout)


@pytest.mark.ci
@pytest.mark.parametrize("fault", [Shifted, Forgetful, Blind])
def test_B51_controls_a_fault_in_the_context_is_not_accepted(fault: Any) -> None:
    of = windowed()
    drafter, params = fault(of.model, M), of.params
    runner = SlotRunner(of, Draft(drafter, params), num_slots=2, max_context=96, prefill_chunk=4, page_size=4)
    counter = count(generate(runner, PROMPTS, GREEDY), M)
    assert sum(counter.accepted_at) / sum(counter.offered_at) < 0.9


def sampling(temperature: float, count: int) -> SlotSampling:
    rows = jnp.full(count, temperature)
    return SlotSampling(rows, jnp.zeros(count, jnp.int32), jnp.ones(count), jnp.zeros(count))


def tiny(vocab: int, m: int, **options: Any) -> tuple[SmallModel, Any]:
    config = ModelConfig.from_hf({**TINY, "model_type": "llama", "vocab_size": vocab, "eos_token_id": 0})
    drafter = SmallModel(Decoder(config), m, **options)
    return drafter, drafter.init(jax.random.key(7))


def proposed(drafter: SmallModel, params: Any, text: list[int], keys: Any, temperature: float) -> Any:
    """Proposals for one text and many keys."""
    return _proposed(drafter, len(text))(params, jnp.asarray(text, jnp.int32), keys, temperature)


@functools.cache
def _proposed(drafter: SmallModel, length: int) -> Any:
    def run(params: Any, text: jax.Array, keys: jax.Array, temperature: jax.Array) -> Any:
        number, rows = len(keys), length - 1
        table = 1 + jnp.arange(number * 4, dtype=jnp.int32).reshape(number, 4)
        state = drafter.init_state(number * 4 + 1, 4, jnp.float32, number)
        flat = jnp.tile(text[:-1], number)
        layout = uniform_layout(jnp.zeros(number, jnp.int32), jnp.full(number, rows), table, rows)
        state = drafter.commit(params, None, state, Rows(jnp.zeros((flat.size, 0)), flat, flat), layout)
        slots = Slots(jnp.full(number, text[-1]), jnp.full(number, rows), table, jnp.ones(number, bool))
        return drafter.propose(params, None, state, slots, keys, sampling(temperature, number))

    return jax.jit(run)


@pytest.mark.ci
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_q_is_the_law_that_each_token_was_drawn_from(temperature: float) -> None:
    """Row k of q equals the model's own softmax at T over the text and d_<k, from a forward without any cache."""
    drafter, params = tiny(5, 3)
    text = [1, 4, 2, 2, 3]
    out = proposed(drafter, params, text, jax.random.split(jax.random.key(1), 40), temperature)
    tokens, probs = np.asarray(out.tokens), np.asarray(out.q.probs)
    full = jnp.concatenate([jnp.tile(jnp.asarray(text), (40, 1)), tokens], axis=1)
    hidden = drafter.model.forward_sequences(params, full).hidden[:, len(text) - 1 : -1]
    wanted = jax.nn.softmax(drafter.model.logits(params, hidden) / temperature, axis=-1)
    np.testing.assert_allclose(probs, wanted, atol=2e-6)
    assert len({tuple(row) for row in tokens.tolist()}) > 5  # they were drawn
    assert (np.take_along_axis(probs, tokens[..., None], axis=-1) > 0).all()


@pytest.mark.ci
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_B02_the_law_of_a_round_is_the_targets(temperature: float) -> None:
    """Both tables from real models: q from the drafter's served chain, p from another model; every cut."""
    vocab, m, text = 3, 2, [1, 2, 2, 0]
    drafter, params = tiny(vocab, m)
    other = tiny_target("llama", seed=5)
    p_model = Decoder(dataclasses.replace(other.model.config, vocab_size=vocab))
    p_params = p_model.init(jax.random.key(11), jnp.float32, 0.3)
    tables: dict[tuple[int, ...], np.ndarray] = {}
    out = proposed(drafter, params, text, jax.random.split(jax.random.key(2), 200), temperature)
    for row, probs in zip(np.asarray(out.tokens).tolist(), np.asarray(out.q.probs), strict=True):
        for k in range(m):
            tables[tuple(row[:k])] = probs[k]
    assert len(tables) == 1 + vocab, "some first token was never drawn"

    @jax.jit
    def after(sequences: jax.Array) -> jax.Array:
        hidden = p_model.forward_sequences(p_params, sequences).hidden[:, len(text) - 1 :]
        return jax.nn.softmax(p_model.logits(p_params, hidden) / temperature)

    pairs = np.array([[*text, a, b] for a in range(vocab) for b in range(vocab)])
    rows = np.asarray(after(pairs)).astype(np.float64).reshape(vocab, vocab, 3, vocab)
    q = (tables[()], np.stack([tables[(a,)] for a in range(vocab)]))
    p = (rows[0, 0, 0], rows[:, 0, 1], rows[:, :, 2])
    case = Case(p, tuple(x.astype(np.float64) for x in q))
    for mode in ("ratio", "block"):
        for cut in range(m + 1):
            np.testing.assert_allclose(output_law(case, through_jaxspec(mode), cut), target_law(case), atol=2e-6)


def test_a_folder_of_a_language_model_is_opened_as_one_and_exported_as_it_was(tmp_path: Any) -> None:
    of = load_target(GOLDEN / "targets" / "q3a", "float32")
    draft, rest = open_drafter(GOLDEN / "targets" / "q3a", of)
    assert (draft.drafter.method, draft.drafter.num_proposals, rest) == ("small_model", 5, None)
    save_drafter(tmp_path / "out", draft)
    again, _ = open_drafter(tmp_path / "out", of)
    tokens = jnp.arange(12)[None] % 200
    run = lambda one: one.drafter.model.forward_sequences(one.params, tokens).hidden  # noqa: E731
    np.testing.assert_array_equal(run(draft), run(again))


def test_another_vocabulary_is_refused() -> None:
    of = load_target(GOLDEN / "targets" / "q3a", "float32")
    other = dataclasses.replace(of, model=Decoder(dataclasses.replace(of.model.config, vocab_size=999)))
    with pytest.raises(
        ConfigError, match=r"config\.json: vocab_size: the small model has 256, expected the target's 999"
    ):
        open_drafter(GOLDEN / "targets" / "q3a", other)
    for call in (lambda d: d.loss({}, None, None, None), lambda d: d.objective({}), lambda d: d.to_hf()):
        with pytest.raises(ConfigError):
            call(SmallModel(of.model))
    with pytest.raises(ConfigError, match=r"engine\.num_proposals: found 0"):
        SmallModel(of.model, 0)
