"""tau and acceptance by position, with one definition for the evaluation, the server and the training run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass
class TauCounter:
    """Counts rounds. Prefill's token is not a round; a request's last round counts whole, before trimming.

    `verified` is the number of proposals the target looked at, so that a slot that was never offered is not a
    rejection.
    """

    num_proposals: int
    rounds: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.num_proposals
        self.offered_at = [0] * self.num_proposals
        self.reached_at = [0] * self.num_proposals

    def add(self, accepted: int, verified: int) -> None:
        """One round of one request: r proposals stood out of `verified`."""
        self.rounds += 1
        self.tokens += accepted + 1
        for slot in range(verified):
            self.offered_at[slot] += 1
            self.accepted_at[slot] += slot < accepted
            self.reached_at[slot] += slot <= accepted

    @property
    def tau(self) -> float:
        """Mean new tokens a round, r + 1, pooled over rounds (0 without rounds)."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_unconditional(self) -> list[float]:
        """P(slot k accepted) among rounds that offered it."""
        return [a / n if n else 0.0 for a, n in zip(self.accepted_at, self.offered_at, strict=True)]

    @property
    def acceptance_conditional(self) -> list[float]:
        """P(slot k accepted | the slots before it were)."""
        return [a / n if n else 0.0 for a, n in zip(self.accepted_at, self.reached_at, strict=True)]

    def report(self) -> dict[str, object]:
        """All of it, by name."""
        return {
            "tau": self.tau,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "acceptance_unconditional": self.acceptance_unconditional,
            "acceptance_conditional": self.acceptance_conditional,
        }


def repeated_bigram_share(sequences: Iterable[Sequence[int]]) -> float:
    """Share of bigrams that occurred before in their sequence: a loop of two tokens is easy to draft and says
    nothing.
    """
    repeated = total = 0
    for tokens in sequences:
        seen: set[tuple[int, int]] = set()
        for pair in itertools.pairwise(tokens):
            total += 1
            repeated += pair in seen
            seen.add(pair)
    return repeated / total if total else 0.0
