"""Logit processors against plain numpy, and what padding rows and ties may not do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.acceptance import accept, greedy_accept
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Point, Proposal
from jaxspec.drafters.draws import inverse_cdf

VOCAB = 12
served = jax.jit(SlotSampling.probabilities)
serve_accept = jax.jit(accept)


def sampling(temperature, top_k=0, top_p=1.0, min_p=0.0) -> SlotSampling:
    columns = np.broadcast_arrays(*map(np.atleast_1d, (temperature, top_k, top_p, min_p)))
    kinds = (np.float32, np.int32, np.float32, np.float32)
    return SlotSampling(*(jnp.asarray(c, kind) for c, kind in zip(columns, kinds, strict=True)))


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row in float64, by the words of the definition: the smallest set of best ids whose mass reaches top_p."""
    if temperature <= 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda v: (-scaled[v], v))
    if top_k > 0:
        order = order[:top_k]
    mass = np.exp(scaled[order] - scaled[order[0]])
    mass /= mass.sum()
    kept, total = [], 0.0
    for v, share in zip(order, mass, strict=True):
        kept.append(v)
        total += share
        if total >= top_p - 1e-9:
            break
    if top_p >= 1:
        kept = order
    probs = np.zeros(len(scaled))
    probs[kept] = np.exp(scaled[kept] - scaled[order[0]])
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0.0
    return probs / probs.sum()


def rows(kind: str, rng: np.random.Generator) -> np.ndarray:
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32) * 2
    if kind == "ties":
        logits = np.round(logits)
    if kind == "minus_infinity":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[:, 5] = 0.5
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "minus_infinity"])
@pytest.mark.parametrize("top_k", [0, 1, 3, VOCAB, 10**6])
def test_processors_equal_the_numpy_oracle(kind: str, top_k: int) -> None:
    rng = np.random.default_rng(top_k % 97)
    for top_p in (1.0, 0.9, 0.5, 1e-6):
        for min_p in (0.0, 0.2):
            logits = rows(kind, rng)
            temperatures = np.array([0.0, 0.3, 0.7, 1.0, 1.7, 3.0])
            got = np.asarray(served(sampling(temperatures, min(top_k, VOCAB), top_p, min_p), logits))
            for row, temperature in enumerate(temperatures):
                expected = oracle(logits[row], temperature, top_k, top_p, min_p)
                np.testing.assert_array_equal(got[row] > 0, expected > 0, err_msg=str((row, top_p, min_p)))
                np.testing.assert_allclose(got[row], expected, atol=2e-6)


def test_slots_of_a_request_share_its_parameters() -> None:
    """[R, slots, V] is the same as one slot after the other."""
    logits = np.random.default_rng(0).normal(size=(3, 4, VOCAB)).astype(np.float32)
    mixed = sampling([0.0, 0.8, 1.2], [0, 3, 0], [1.0, 0.9, 0.6], [0.0, 0.0, 0.1])
    whole = np.asarray(served(mixed, logits))
    for slot in range(4):
        np.testing.assert_allclose(whole[:, slot], served(mixed, logits[:, slot]), atol=1e-7)
    np.testing.assert_array_equal(whole, jax.jit(SlotSampling.draft_probs)(mixed, logits))


def test_B08_min_p_holds_for_every_emitted_token() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(200, VOCAB)).astype(np.float32) * 3
    probs = np.asarray(served(sampling(np.full(200, 1.0), min_p=0.2), logits))
    plain = np.asarray(jax.nn.softmax(logits))
    drawn = np.asarray(inverse_cdf(probs, rng.random(200).astype(np.float32)))
    chosen = plain[np.arange(200), drawn]
    assert (chosen >= 0.2 * plain.max(axis=1) * (1 - 1e-5)).all()


TIES = np.array([[1.0, 1.0, 0.0]] * 4, np.float32)


def test_B06_ties_and_mixed_batches_stay_greedy() -> None:
    """(1, 1, 0): T = 0 gives id 0, alone, beside a sampled row, with top_p; {T 1, top_k 1} too; 200 draws each."""
    mixed = sampling([0.0, 0.0, 1.0, 1.0], [0, 0, 1, 0], [1.0, 0.9, 1.0, 1.0])
    probs = np.asarray(served(mixed, TIES))
    np.testing.assert_array_equal(probs[:3], [[1, 0, 0]] * 3)
    np.testing.assert_allclose(probs[3], np.exp([1, 1, 0]) / np.exp([1, 1, 0]).sum(), rtol=1e-6)
    u = np.random.default_rng(0).random((200, 4)).astype(np.float32)
    drawn = np.asarray(jax.vmap(lambda one: inverse_cdf(probs, one))(u))
    assert (drawn[:, :3] == 0).all()
    assert set(drawn[:, 3]) == {0, 1, 2}
    np.testing.assert_array_equal(np.asarray(served(sampling([0.0]), TIES[:1])), [[1, 0, 0]])


def test_B06_verification_breaks_ties_as_plain_decoding_does() -> None:
    """A proposal of the tied higher id is rejected by greedy rows, and by {T 1, top_k 1}, whatever the uniform."""
    m = 2
    logits = jnp.asarray(np.broadcast_to(TIES[0], (4, m + 1, 3)))
    mixed = sampling([0.0, 0.0, 1.0, 1.0], [0, 0, 1, 0], [1.0, 0.9, 1.0, 1.0])
    run = jax.jit(
        lambda drafts, u: accept(logits, Proposal(drafts, Point(drafts, 3)), mixed, u, u[:, 0], jnp.full(4, m))
    )
    for first, expected in ((1, 0), (0, 2)):
        drafts = jnp.full((4, m), first)
        for u in np.linspace(0, 1, 21, endpoint=False, dtype=np.float32):
            out = run(drafts, jnp.full((4, m), u))
            np.testing.assert_array_equal(out.accepted[:3], expected)
            np.testing.assert_array_equal(out.token[:3], 0)


@pytest.mark.parametrize("junk", [-1.0, 0.0, np.nan])
@pytest.mark.parametrize("kind", ["point", "dense"])
def test_B04_padding_parameters_leave_live_rows_alone(junk: float, kind: str) -> None:
    """Rows 3 to 7 are padding, with junk in every parameter and in their logits: rows 0 to 2 keep their bits."""
    rng = np.random.default_rng(2)
    m, live, padded = 3, 3, 8
    logits = rng.normal(size=(padded, m + 1, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, VOCAB, (padded, m))
    q = rng.dirichlet(np.ones(VOCAB), (padded, m)).astype(np.float32)
    u = rng.random((padded, m)).astype(np.float32)
    columns = [np.array([0.0, 0.7, 1.3]), np.array([0, 4, 0]), np.array([1.0, 0.9, 0.8]), np.array([0.0, 0.05, 0.1])]
    whole = int(junk) if np.isfinite(junk) else np.iinfo(np.int32).min
    fill = [junk, whole, junk, junk]
    padding = [np.concatenate([c, np.full(padded - live, f)]) for c, f in zip(columns, fill, strict=True)]
    dirty = logits.copy()
    dirty[live:] = np.nan

    def run(parameters, values, count):
        tokens = jnp.asarray(drafts[:count])
        law = Point(tokens, VOCAB) if kind == "point" else Dense(jnp.asarray(q[:count]))
        asked = sampling(*parameters)
        out = serve_accept(
            jnp.asarray(values[:count]), Proposal(tokens, law), asked, u[:count], u[:count, 0], jnp.full(count, m)
        )
        return out.accepted, out.token, served(asked, jnp.asarray(values[:count, 0]))

    alone, beside = run(columns, logits, live), run(padding, dirty, padded)
    for a, b in zip(alone, beside, strict=True):
        assert np.isfinite(np.asarray(b)[:live]).all()
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b)[:live])


def test_B69_argmax_is_taken_in_float32_with_the_lowest_id_on_ties() -> None:
    """bfloat16 logits tie where float32 ones do not; a narrow argmax would pick by position."""
    wide = np.array([[[21.370, 21.374, 21.36]]], np.float32)
    narrow = jnp.asarray(wide, jnp.bfloat16)
    assert len(set(np.asarray(narrow, np.float32)[0, 0].tolist())) == 1  # all three tie in bfloat16
    empty = jnp.zeros((1, 0), jnp.int32)
    assert int(greedy_accept(jnp.asarray(wide), empty, jnp.zeros(1, jnp.int32)).token[0]) == 1
    assert int(greedy_accept(narrow, empty, jnp.zeros(1, jnp.int32)).token[0]) == 0
    for row, best in (([3.0, 21.375, 21.375], 1), ([21.375, 3.0, 21.375], 0)):
        logits = jnp.asarray([[row]], jnp.bfloat16)
        assert int(greedy_accept(logits, empty, jnp.zeros(1, jnp.int32)).token[0]) == best
        np.testing.assert_array_equal(served(sampling([0.0]), logits[:, 0])[0], np.eye(3)[best])


def test_B69_a_bfloat16_target_gives_float32_logits() -> None:
    from tests.helpers.worlds import tiny_target

    target = tiny_target(dtype=jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(0), (40, 32), jnp.bfloat16)
    logits = target.model.logits(target.params, hidden)
    assert logits.dtype == jnp.float32
    exact = np.asarray(hidden, np.float32) @ np.asarray(target.head, np.float32).T
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert (np.asarray(rounded) != np.asarray(logits)).mean() > 0.5  # rounding through bfloat16 would show


def test_inverse_cdf_never_returns_an_id_of_weight_zero() -> None:
    weights = jnp.asarray([[0.0, 0.5, 0.0, 0.5, 0.0]] * 5)
    u = jnp.asarray([0.0, 0.4999999, 0.5, 0.99999994, 1.0])
    np.testing.assert_array_equal(inverse_cdf(weights, u), [1, 1, 3, 3, 3])
