"""Draft length and drafting itself from what was observed, for methods that say nothing about their own chances.

`ObservedAcceptance` gives the planner a confidence, so methods with and without a confidence head share one planner.
`DraftSwitch` and `RequestSwitch` turn drafting off where it loses, for a load and for a request; `PrefillSpeed` knows
which deadlines cannot be met. All of them see
finished rounds alone, so no decision knows the tokens it is about (CONTRACTS.md §6.3).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Float, Int


class ObservedAcceptance:
    """Chance of each slot's draft, given that those before it stood: a decayed mean with a prior, per serving slot.

    Evidence fades by `decay` each round, tested or not, so that a slot that is not verified any more drifts back to
    the prior and is tried again. `weight` is how many rounds of evidence the prior is worth.
    """

    def __init__(self, slots: int, proposals: int, *, decay: float = 0.95, prior: float = 0.7, weight: float = 2.0):
        self._decay, self._prior, self._weight = decay, prior, weight
        self._tested = np.zeros((slots, proposals))
        self._stood = np.zeros((slots, proposals))

    def reset(self, slot: int) -> None:
        """A new request on the slot."""
        self._tested[slot] = self._stood[slot] = 0

    def observe(
        self, slots: Int[np.ndarray, "R"], verified: Int[np.ndarray, "R"], accepted: Int[np.ndarray, "R"]
    ) -> None:
        """A round verified so many drafts of these slots, of which `accepted` stood."""
        index = np.arange(self._tested.shape[1])
        tested = index < np.minimum(verified, accepted + 1)[:, None]
        self._tested[slots] = self._decay * self._tested[slots] + tested
        self._stood[slots] = self._decay * self._stood[slots] + (index < accepted[:, None])

    def confidence(self, slots: Int[np.ndarray, "R"]) -> Float[np.ndarray, "R m"]:
        """What the budget search and the device allocation take as confidence."""
        known = self._stood[slots] + self._weight * self._prior
        return (known / (self._tested[slots] + self._weight)).astype(np.float32)


@dataclasses.dataclass
class _Speed:
    """Decayed tokens, seconds and number of rounds of one way to run a round."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int, seconds: float, decay: float) -> None:
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds
        self.rounds = decay * self.rounds + 1

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class _Load:
    """What is known at one load: the speed with (True) and without drafts, and which is tried when."""

    speeds: dict[bool, _Speed] = dataclasses.field(default_factory=lambda: {True: _Speed(), False: _Speed()})
    drafting: bool = True
    trying: int = 0  # rounds of a trial that are left
    wait: int = 0  # rounds until the next trial
    period: int = 0


class DraftSwitch:
    """Whether a round of R requests drafts at all: whichever was measured to bring more tokens a second at that load.

    A load is a fifth of R wide, since both speeds change with R; rounds that carry a prompt's chunk (`prefilling`) are
    a load of their own, since the chunk costs the same in each of them. The loser is tried again for `trial` rounds,
    after `first` rounds, then after twice as long each time that it loses again, up to `longest`; so what trials cost
    stays below trial / longest of the loss.
    """

    def __init__(self, *, trial: int = 4, first: int = 64, longest: int = 4096, decay: float = 0.9):
        self._trial, self._first, self._longest, self._decay = trial, first, longest, decay
        self._loads: dict[tuple[int, bool], _Load] = {}

    def drafting(self, requests: int, prefilling: bool = False) -> bool:
        """For the next round."""
        load = self._load(requests, prefilling)
        return load.drafting != (load.trying > 0)

    def observe(self, requests: int, drafted: bool, tokens: int, seconds: float, prefilling: bool = False) -> None:
        """A finished round: whether it drafted, what it brought, how long it took."""
        load = self._load(requests, prefilling)
        load.speeds[drafted].add(tokens, seconds, self._decay)
        if load.trying:
            load.trying -= drafted != load.drafting  # rounds that were under way when the trial began do not count
            if not load.trying:
                self._decide(load)
        else:
            load.wait -= 1
            if load.wait <= 0:
                load.trying = self._trial
                load.speeds[not load.drafting] = _Speed()  # the world may have changed since

    def break_even(self, requests: int, prefilling: bool = False) -> float:
        """Accepted drafts a round and request that pay for drafting at this load; 0 until both kinds were measured."""
        drafted, plain = (self._load(requests, prefilling).speeds[drafting] for drafting in (True, False))
        if not (drafted.rounds and plain.rounds):
            return 0.0
        return break_even(drafted.seconds / drafted.rounds, plain.seconds / plain.rounds)

    def _load(self, requests: int, prefilling: bool) -> _Load:
        key = round(4 * math.log2(max(requests, 1))), prefilling
        if key not in self._loads:
            self._loads[key] = _Load(wait=self._trial, period=self._first)
        return self._loads[key]

    def _decide(self, load: _Load) -> None:
        better = load.speeds[True].rate > load.speeds[False].rate
        load.period = min(2 * load.period, self._longest) if better == load.drafting else self._first
        load.drafting, load.wait = better, load.period


class RequestSwitch:
    """Whether one request drafts: not while its drafts bring less than they cost.

    `break_even` is how many accepted drafts a round must bring at the present load: seconds(with) / seconds(without)
    - 1. After `patience` rounds below it the request pauses for `first` rounds, then for twice as long after each trial
    of `patience` rounds that fails too.
    """

    def __init__(self, *, patience: int = 8, first: int = 16, longest: int = 1024):
        self._patience, self._first, self._longest = patience, first, longest
        self._pause, self._left, self._seen, self._accepted = first, 0, 0, 0

    @property
    def drafting(self) -> bool:
        """For the next round."""
        return not self._left

    def observe(self, accepted: int, break_even: float) -> None:
        """A finished round of the request; `accepted` is 0 where it did not draft."""
        if self._left:
            self._left -= 1
            return
        self._seen, self._accepted = self._seen + 1, self._accepted + accepted
        if self._seen < self._patience:
            return
        if self._accepted / self._seen < break_even:
            self._left, self._pause = self._pause, min(2 * self._pause, self._longest)
        else:
            self._pause = self._first
        self._seen = self._accepted = 0


class PrefillSpeed:
    """How long a prompt takes at least: its chunks, each as long as the fastest round with prompt rows so far."""

    def __init__(self, chunk: int):
        self._chunk, self._fastest = chunk, math.inf

    def observe(self, seconds: float) -> None:
        """A finished round that had prompt rows."""
        self._fastest = min(self._fastest, seconds)

    def seconds(self, rows: int) -> float:
        """Of so many prompt rows; 0 until a round was seen."""
        return -(-rows // self._chunk) * self._fastest if self._fastest < math.inf else 0.0


def break_even(with_drafts: float, without: float) -> float:
    """Accepted drafts a round and request that pay for drafting, from the seconds of both kinds of round."""
    return with_drafts / without - 1 if without > 0 else math.inf
