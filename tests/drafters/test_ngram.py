"""Prompt lookup, against a search by hand, and its law through the shipped acceptance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Rows, Slots
from jaxspec.drafters.ngram import NGram
from jaxspec.errors import ConfigError
from jaxspec.models.layout import uniform_layout
from tests.decoding.enumeration import Case, output_law, random_case, target_law
from tests.decoding.test_enumeration import through_jaxspec

pytestmark = pytest.mark.ci

ROOM, M = 48, 5
DRAFTER = NGram(vocab_size=9, num_proposals=M, max_ngram=3)


def by_hand(text: list[int], shortest: int = 1, longest: int = 3) -> list[int] | None:
    """Longest suffix first, then the latest occurrence; a continuation that meets the end goes on periodically."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[len(text) - size :]
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == suffix:
                following = text[end + 1 :]
                return [following[k % len(following)] for k in range(M)]
    return None


def committed(texts: list[list[int]], drafter: NGram = DRAFTER, chunk: int = 7) -> tuple[jax.Array, Slots]:
    """The texts in a drafter's state, written in chunks into slots in turn; the last token of each is the anchor."""
    state = jnp.full((len(texts), ROOM + 1), np.iinfo(np.int32).max, jnp.int32)
    for slot, text in enumerate(texts):
        for start in range(0, len(text) - 1, chunk):
            piece = text[start : min(start + chunk, len(text) - 1)]
            rows = np.zeros(chunk, np.int32)
            rows[: len(piece)] = piece
            layout = uniform_layout(jnp.array([start]), jnp.array([len(piece)]), jnp.zeros((1, 12), jnp.int32), chunk)
            layout = type(layout)(**{**vars(layout), "owners": jnp.array([slot])})
            state = drafter.commit({}, None, state, Rows(jnp.zeros((chunk, 0)), jnp.asarray(rows), rows), layout)
    anchors = jnp.array([text[-1] for text in texts])
    positions = jnp.array([len(text) - 1 for text in texts])
    live = jnp.ones(len(texts), bool)
    return state, Slots(anchors, positions, jnp.zeros((len(texts), 12), jnp.int32), live)


@jax.jit
def propose(state: jax.Array, slots: Slots) -> tuple[jax.Array, jax.Array]:
    out = DRAFTER.propose({}, None, state, slots, None, None)  # type: ignore[arg-type]
    return out.tokens, out.confidence


def test_proposals_are_those_of_a_search_by_hand() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, int(rng.integers(1, 9)), int(rng.integers(1, ROOM))).tolist() for _ in range(200)]
    for start in range(0, 200, 20):
        group = texts[start : start + 20]
        tokens, confidence = (np.asarray(x) for x in propose(*committed(group)))
        for text, row, sure in zip(group, tokens.tolist(), confidence, strict=True):
            wanted = by_hand(text)
            assert (sure == (wanted is not None)).all()
            assert row == (wanted if wanted is not None else [text[-1]] * M), text


def test_longer_then_later_occurrences_win() -> None:
    text = [1, 2, 3, 4, 0, 2, 3, 5, 0, 3, 6, 0, 1, 2, 3]
    tokens, _ = propose(*committed([text] * 20))
    assert np.asarray(tokens)[0].tolist() == [4, 0, 2, 3, 5]  # "1 2 3" beats the later "2 3" and "3"
    text = [2, 3, 4, 0, 2, 3, 5, 7, 2, 3]
    tokens, _ = propose(*committed([text] * 20))
    assert np.asarray(tokens)[0].tolist() == [5, 7, 2, 3, 5]  # the later "2 3", continued periodically


def test_min_ngram_leaves_short_matches_alone() -> None:
    strict = NGram(9, M, min_ngram=2, max_ngram=3)
    state, slots = committed([[1, 2, 3, 4, 2], [1, 2, 3, 1, 2]], strict)
    out = strict.propose({}, None, state, slots, None, None)  # type: ignore[arg-type]
    assert np.asarray(out.confidence)[:, 0].tolist() == [0.0, 1.0]
    assert np.asarray(out.tokens)[1].tolist() == [3, 1, 2, 3, 1]


@pytest.mark.parametrize("mode", ["ratio", "block"])
def test_B02_the_law_of_a_round_is_the_targets(mode: str) -> None:
    """Texts over V ids, the drafter's own proposals, every cut: the enumerated law is the target's."""
    rng = np.random.default_rng(5)
    for vocab, m in ((2, 2), (3, 2), (4, 2), (3, 3)):
        drafter = NGram(vocab, m)
        text = rng.integers(0, vocab, 20).tolist()
        state, slots = committed([text], drafter)
        out = drafter.propose({}, None, state, slots, None, None)  # type: ignore[arg-type]
        path = np.asarray(out.tokens)[0]
        law = random_case(rng, vocab, m)
        point = tuple(np.broadcast_to(np.eye(vocab)[path[k]], (vocab,) * (k + 1)) for k in range(m))
        case = Case(law.p, point, argmax=True)
        for cut in range(m + 1):
            found = output_law(case, through_jaxspec(mode, "point"), cut)
            np.testing.assert_allclose(found, target_law(case), atol=1e-6)


def test_options_are_checked_and_nothing_is_trained_or_exported() -> None:
    with pytest.raises(ConfigError, match=r"engine\.ngram_min and engine\.ngram_max: found 4 and 3"):
        NGram(9, min_ngram=4)
    with pytest.raises(ConfigError, match=r"engine\.num_proposals: found 0"):
        NGram(9, 0)
    for call in (DRAFTER.to_hf, lambda: DRAFTER.loss({}, None, None, None), lambda: DRAFTER.objective({})):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="'ngram'"):
            call()
