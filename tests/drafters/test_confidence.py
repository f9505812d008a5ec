"""B12: a cut that follows the survival confidence leaves the law alone; one that looks at its own token does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.plan import verify_lengths
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.confidence import survival
from tests.decoding.enumeration import Case, output_law, random_case, target_law
from tests.decoding.test_enumeration import through_jaxspec
from tests.drafters.test_small_model import proposed, tiny
from tests.helpers.worlds import tiny_draft, tiny_target

pytestmark = pytest.mark.ci

FAR = 10_000


def sampled(count: int, temperature: float = 1.0) -> SlotSampling:
    return SlotSampling(jnp.full(count, temperature), jnp.zeros(count, jnp.int32), jnp.ones(count), jnp.zeros(count))


@jax.jit
def planned(q: jax.Array, threshold: jax.Array) -> jax.Array:
    """The shipped planner's cut from the shipped confidence."""
    confidence = survival(jnp.log(q), sampled(q.shape[0]))
    return jnp.stack([
        verify_lengths(jnp.zeros(q.shape[0], jnp.int32), q.shape[1], FAR, confidence, t) for t in THRESHOLDS
    ])[threshold]  # fmt: skip


THRESHOLDS = (0.3, 0.45, 0.6, 0.8, 0.95)


def own_probability(q: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    return np.take_along_axis(q, drafts[..., None], axis=-1)[..., 0]


def cut_by(confidence: np.ndarray, threshold: float) -> np.ndarray:
    return np.cumprod(confidence >= threshold, axis=1).sum(axis=1)


def with_cut(accept: Any, choose: Any) -> Any:
    """An acceptance whose number of kept drafts is chosen per row from (q rows, drafts)."""

    def run(p, drafts, q, u, u_last, cut):
        return accept(p, drafts, q, u, u_last, choose(q, drafts))

    return run


def drawing_at_the_cut(p, drafts, q, u, u_last, cut):
    """Textbook rejection over the kept drafts only: at the cut the last token is drawn from p."""
    accepted, last = np.zeros(len(u), int), np.zeros(len(u), int)
    for i in range(len(u)):
        r = 0
        while r < cut[i] and u[i, r] * q[i, r, drafts[i, r]] < p[i, r, drafts[i, r]]:
            r += 1
        weights = p[i, r] if r == cut[i] else np.maximum(p[i, r] - q[i, r], 0)
        weights = p[i, r] if weights.sum() <= 0 else weights
        accepted[i] = r
        last[i] = min(
            int(np.searchsorted(np.cumsum(weights), u_last[i] * weights.sum(), side="right")), p.shape[-1] - 1
        )
    return accepted, last


def error(case: Case, accept: Any) -> float:
    return float(np.abs(output_law(case, accept, case.m) - target_law(case)).max())


def cases(count: int, seed: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [random_case(rng, int(rng.integers(2, 5)), 1 + index % 2, zeros=0.2) for index in range(count)]


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B12_the_law_with_cuts_by_survival_is_the_targets(mode: str) -> None:
    """Shipped confidence, shipped planner, shipped acceptance; thresholds that cut at every slot."""
    seen = set()
    for case in cases(8, seed=1):
        for index in range(len(THRESHOLDS)):

            def choose(q, drafts, index=index):
                cut = np.asarray(planned(jnp.asarray(q, jnp.float32), index))
                seen.update(cut.tolist())
                return cut

            assert error(case, with_cut(through_jaxspec(mode), choose)) < 1e-6
    assert seen == {0, 1, 2}


def test_B12_survival_is_safe_even_where_the_token_at_the_cut_is_drawn_from_p() -> None:
    """The rule that forgives nothing: a cut that depended on its own token would show here."""
    for case in cases(16, seed=2):
        for index, threshold in enumerate(THRESHOLDS):
            accept = with_cut(drawing_at_the_cut, lambda q, drafts, t=threshold: cut_by(q.max(axis=-1), t))
            assert error(case, accept) < 1e-6, index


def test_B12_control_the_selected_tokens_own_probability_is_biased() -> None:
    """p = (.5, .5), q = (.6, .4), "drop the draft if q(x) <= .5": the law becomes (.7, .3)."""
    p = np.array([0.5, 0.5])
    case = Case((p, np.stack([p, p])), (np.array([0.6, 0.4]),))
    accept = with_cut(drawing_at_the_cut, lambda q, drafts: cut_by(own_probability(q, drafts), 0.5))
    np.testing.assert_allclose(output_law(case, accept, 1).sum(axis=1), [0.7, 0.3], atol=1e-6)
    worst = max(
        error(one, with_cut(drawing_at_the_cut, lambda q, drafts, t=t: cut_by(own_probability(q, drafts), t)))
        for one in cases(8, seed=3)
        for t in THRESHOLDS
    )
    assert worst > 1e-2


def test_B12_control_a_confidence_that_peeks_at_the_next_token_biases_the_shipped_rule_too() -> None:
    def peeking(q: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        own = own_probability(q, drafts)
        return np.concatenate([own[:, 1:], own[:, -1:]], axis=1)  # slot k looks at token k + 1

    worst = max(
        error(case, with_cut(through_jaxspec("ratio"), lambda q, drafts, t=t: cut_by(peeking(q, drafts), t)))
        for case in cases(12, seed=4)
        if case.m == 2
        for t in THRESHOLDS
    )
    assert worst > 1e-2


@pytest.mark.ci
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_B12_a_drawn_token_does_not_move_its_own_confidence(temperature: float) -> None:
    """The small model's chain: slot 0's confidence is one number however it was drawn, slot 1's one for each d_0, and
    both are the mode's mass."""
    drafter, params = tiny(5, 2, survival_confidence=True)
    out = proposed(drafter, params, [1, 4, 2, 3], jax.random.split(jax.random.key(3), 120), temperature)
    tokens, confidence, probs = (np.asarray(x) for x in (out.tokens, out.confidence, out.q.probs))
    np.testing.assert_allclose(confidence, probs.max(axis=-1), atol=1e-6)
    own = own_probability(probs, tokens)
    assert len({*tokens[:, 0].tolist()}) > 2 and np.ptp(own[:, 0]) > 0.01
    assert np.ptp(confidence[:, 0]) == 0
    for first in set(tokens[:, 0].tolist()):
        assert np.ptp(confidence[tokens[:, 0] == first, 1]) < 1e-6


def test_greedy_rows_report_the_softmax_and_not_their_one_hot() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 6)), jnp.float32)
    mixed = dataclasses.replace(sampled(3, 0.5), temperature=jnp.array([0.0, 0.5, 0.0]))
    found = np.asarray(survival(logits, mixed))
    plain, cold = (np.asarray(jax.nn.softmax(logits / t, axis=-1)).max(axis=-1) for t in (1.0, 0.5))
    np.testing.assert_allclose(found, np.where(np.array([[True], [False], [True]]), plain, cold), atol=1e-6)
    np.testing.assert_allclose(np.asarray(survival(logits, SlotSampling.zeros(3))), plain, atol=1e-6)


@pytest.mark.parametrize("draw", ["argmax", "sample"])
def test_dflash_offers_it_behind_its_option(draw: str) -> None:
    from jaxspec.drafters.base import Slots

    of = tiny_target()
    draft = tiny_draft(of, draft_sampling=draw, survival_confidence=True)
    drafter = draft.drafter
    state = drafter.init_state(5, 4, jnp.float32, 1)
    slots = Slots(jnp.array([3]), jnp.array([0]), jnp.arange(1, 5)[None], jnp.ones(1, bool))
    keys = jax.random.split(jax.random.key(0), 1)

    def run(one: Any) -> Any:
        return jax.jit(one.propose)(draft.params, draft.shared(of), state, slots, keys, sampled(1))

    out = run(drafter)
    assert out.confidence.shape == (1, 4) and ((out.confidence > 0) & (out.confidence <= 1)).all()
    if draw == "sample":
        np.testing.assert_allclose(out.confidence, out.q.probs.max(axis=-1), atol=1e-6)
    assert run(dataclasses.replace(drafter, survival_confidence=False)).confidence is None
