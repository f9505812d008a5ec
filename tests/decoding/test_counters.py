"""B38: acceptance numbers, each with one definition."""

from __future__ import annotations

import pytest

from jaxspec.decoding.counters import TauCounter, repeated_bigram_share


@pytest.mark.parametrize("accepted", range(5))
def test_B38_accepted_a_means_a_plus_one_tokens(accepted: int) -> None:
    counter = TauCounter(4)
    counter.add(accepted, 4)
    assert (counter.rounds, counter.tokens, counter.tau) == (1, accepted + 1, accepted + 1)


def test_B38_conditional_and_unconditional_rates() -> None:
    """Rounds with r = 0, 1, 3, 3 of 3: P(slot 2) is 2/4; given that slot 1 stood it is 2/3."""
    counter = TauCounter(3)
    for accepted in (0, 1, 3, 3):
        counter.add(accepted, 3)
    assert counter.acceptance_unconditional == [3 / 4, 2 / 4, 2 / 4]
    assert counter.acceptance_conditional == [3 / 4, 2 / 3, 2 / 2]
    assert counter.tau == (1 + 2 + 4 + 4) / 4
    assert counter.report() == {
        "tau": 2.75,
        "rounds": 4,
        "tokens": 11,
        "acceptance_unconditional": [0.75, 0.5, 0.5],
        "acceptance_conditional": [0.75, 2 / 3, 1.0],
    }


def test_B38_a_slot_that_was_never_offered_is_not_a_rejection() -> None:
    counter = TauCounter(3)
    counter.add(1, 1)
    counter.add(2, 3)
    assert counter.acceptance_unconditional == [1.0, 1.0, 0.0]
    assert counter.acceptance_conditional == [1.0, 1.0, 0.0]
    assert counter.offered_at == [2, 1, 1]


def test_B38_tau_pools_over_rounds_and_is_zero_without_any() -> None:
    assert TauCounter(3).tau == 0.0
    assert TauCounter(3).acceptance_conditional == [0.0, 0.0, 0.0]
    counter = TauCounter(7)
    for _ in range(9):
        counter.add(0, 7)
    counter.add(7, 7)
    assert counter.tau == 17 / 10  # not the mean of two requests' means, (1 + 8) / 2


def test_B38_repeated_bigram_share() -> None:
    assert repeated_bigram_share([]) == 0.0
    assert repeated_bigram_share([[5]]) == 0.0
    assert repeated_bigram_share([[1, 2, 3, 4]]) == 0.0
    assert repeated_bigram_share([[1, 2, 1, 2, 1]]) == 2 / 4  # (1,2) (2,1) and both again
    assert repeated_bigram_share([[1, 2], [1, 2]]) == 0.0  # each answer has its own history
    assert repeated_bigram_share([[1, 1, 1, 1], [3, 4, 5]]) == 2 / 5
