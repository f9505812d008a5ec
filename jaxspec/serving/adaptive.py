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
    """Decayed tokens, seconds, rounds and requests in them, of one way to run a round."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    requests: float = 0.0

    def fade(self, kept: float) -> None:
        self.tokens, self.seconds = kept * self.tokens, kept * self.seconds
        self.rounds, self.requests = kept * self.rounds, kept * self.requests

    def add(self, requests: int, tokens: int, seconds: float, kept: float) -> None:
        self.fade(kept)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.rounds, self.requests = self.rounds + 1, self.requests + requests

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def round(self) -> tuple[float, float]:
        """Tokens and seconds of one; nothing before there was one."""
        return self.tokens / max(self.rounds, 1e-9), self.seconds / max(self.rounds, 1e-9)


@dataclasses.dataclass
class _Load:
    """What is known at one load: the speed with (True) and without drafts, and which is tried when."""

    speeds: dict[bool, _Speed] = dataclasses.field(default_factory=lambda: {True: _Speed(), False: _Speed()})
    drafting: bool = True
    trying: int = 0  # rounds of a trial that are left
    wait: int = 0  # rounds until the next trial
    period: int = 0

    @property
    def measured(self) -> bool:
        return all(speed.rounds for speed in self.speeds.values())

    @property
    def gain(self) -> tuple[float, float]:
        """Tokens and seconds that drafts add to a round."""
        drafted, plain = self.speeds[True].round, self.speeds[False].round
        return drafted[0] - plain[0], drafted[1] - plain[1]

    @property
    def best(self) -> float:
        """Tokens a second of the faster way."""
        return max(speed.rate for speed in self.speeds.values())


class DraftSwitch:
    """Whether a round of R requests drafts at all: whichever was measured to bring more tokens a second at that load.

    A load is a fifth of R wide, since both speeds change with R. Rounds that carry a prompt's chunk (`prefilling`) are
    a load of their own. The chunk is paid for either way, so that drafts pay there if they bring more tokens for the
    seconds that they add than a round without a chunk would in these seconds.

    The loser is tried again for `trial` rounds, after `first` rounds, then after four times as long each time that it
    loses again, up to `longest`; so what trials cost stays below trial / longest of the loss. What drafts bring varies
    from round to round and request to request: speeds are means over about `memory` rounds of a request, and drafts are
    not judged by fewer than `evidence` of them. A trial leaves a quarter of what was known of the loser, since the
    world may have changed.
    """

    def __init__(self, *, trial: int = 2, first: int = 64, longest: int = 4096, memory: int = 1024, evidence: int = 32):
        self._trial, self._first, self._longest = trial, first, longest
        self._memory, self._evidence = memory, evidence
        self._loads: dict[tuple[int, bool], _Load] = {}

    def drafting(self, requests: int, prefilling: bool = False) -> bool:
        """For the next round."""
        load = self._load(requests, prefilling)
        return load.drafting != (load.trying > 0)

    def observe(self, requests: int, drafted: bool, tokens: int, seconds: float, prefilling: bool = False) -> None:
        """A finished round: whether it drafted, what it brought, how long it took."""
        load = self._load(requests, prefilling)
        load.speeds[drafted].add(requests, tokens, seconds, 1 - min(requests / self._memory, 0.1))
        if load.trying:
            load.trying -= drafted != load.drafting  # rounds that were under way when the trial began do not count
            if not load.trying:
                self._decide(requests, prefilling)
        else:
            load.wait -= 1
            if load.wait <= 0:
                other = load.speeds[not load.drafting]
                other.fade(0.25)
                load.trying = self._trial if load.drafting else self._rounds(requests, other.requests)

    def break_even(self, requests: int, prefilling: bool = False) -> float:
        """Accepted drafts a round and request that pay for drafting at this load; 0 until both kinds were measured."""
        load = self._load(requests, prefilling)
        _, longer = load.gain
        return self._worth(requests, prefilling) * longer / requests if load.measured and requests else 0.0

    def _load(self, requests: int, prefilling: bool) -> _Load:
        key = round(4 * math.log2(max(requests, 1))), prefilling
        if key not in self._loads:
            self._loads[key] = _Load(wait=self._rounds(requests, 0.0), period=self._first)
        return self._loads[key]

    def _rounds(self, requests: int, known: float) -> int:
        """Of drafting, until there is evidence beside what is known."""
        return max(self._trial, math.ceil((self._evidence - known) / max(requests, 1)))

    def _worth(self, requests: int, prefilling: bool) -> float:
        """Tokens that a second more of a round has to bring: what it would bring without drafts, and beside a chunk
        what it would in the best round that has none."""
        decoding, own = self._load(requests, False), self._load(requests, prefilling)
        return decoding.best if prefilling and decoding.measured else own.speeds[False].rate

    def _decide(self, requests: int, prefilling: bool) -> None:
        load = self._load(requests, prefilling)
        more, longer = load.gain
        pays = more > self._worth(requests, prefilling) * longer
        better = pays if load.measured else load.speeds[True].rounds > 0
        load.period = min(4 * load.period, self._longest) if better == load.drafting else self._first
        load.drafting, load.wait = better, load.period


class RequestSwitch:
    """Whether one request drafts: not while its drafts bring less than they cost.

    `break_even` is how many accepted drafts a round must bring at the present load (`DraftSwitch.break_even`). After
    `patience` rounds or more whose mean is below it by twice its standard error, and by 2 / rounds since many rounds
    without luck are no rarity, the request pauses for `first` rounds, then for twice as long after each trial that
    fails too.
    """

    def __init__(self, *, patience: int = 8, first: int = 16, longest: int = 1024):
        self._patience, self._first, self._longest = patience, first, longest
        self._pause, self._left = first, 0
        self._forget()

    def _forget(self) -> None:
        self._seen = self._accepted = self._squares = 0

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
        self._squares += accepted * accepted
        if self._seen < self._patience:
            return
        mean = self._accepted / self._seen
        unsure = 2 * math.sqrt(max(self._squares / self._seen - mean * mean, 0.0) / self._seen) + 2 / self._seen
        if mean + unsure < break_even:
            self._left, self._pause = self._pause, min(2 * self._pause, self._longest)
            self._forget()
        elif mean - unsure >= break_even or self._seen == 8 * self._patience:
            self._pause = self._first
            self._forget()


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
