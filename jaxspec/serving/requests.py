"""Requests in the engine, the pieces and rounds that hold their rows, and what a round's results say to each."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.decoding.ragged import Rules
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import TokenLogprob
from jaxspec.decoding.sampling import GREEDY_BELOW
from jaxspec.serving.adaptive import RequestSwitch
from jaxspec.serving.ending import AnswerEnd
from jaxspec.serving.grammar import Constraint
from jaxspec.serving.pages import PageLease


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """What an executable is made for: R slots, rows for anchors and proposals, whether it drafts, C prefill rows. In a
    `bare` round nobody asks for more than a temperature and min-p, so that it has no branch that a sort is in."""

    slots: int
    rows: int
    drafting: bool
    prefill: int
    bare: bool = False

    def __str__(self) -> str:
        draft = "draft" if self.drafting else "plain"
        bare = ", bare" if self.bare else ""
        return f"R={self.slots} M={self.rows + self.prefill} ({draft}, {self.prefill} prefill rows{bare})"


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting for pages"
    PREFILL = "prefill"
    DECODING = "decoding"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class Request:
    """One answer on its slot."""

    handle: int
    slot: int
    prompt: list[int]
    params: SamplingParams
    sample: int
    seed: int
    ending: AnswerEnd
    rules: Rules | None  # one row, where it asks for any
    lease: PageLease
    priority: int = 0
    arrived: float = 0.0  # when it got its slot
    phase: Phase = Phase.WAITING
    emitted: list[int] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)  # what prefill runs over; `history` when it began
    epoch: int = 0  # rounds dispatched before a preemption are of an earlier one
    unread: int = 0  # rounds in flight that draft for it
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    constraint: Constraint | None = None
    switch: RequestSwitch = dataclasses.field(default_factory=RequestSwitch)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.emitted

    @property
    def history(self) -> list[int]:
        """What prefill has to run: the prompt, and of an answer that was preempted all but its anchor. Going on from
        that anchor, its rounds are those that it would have had."""
        return self.prompt + self.emitted[:-1]

    @functools.cached_property
    def bare(self) -> bool:
        """Whether a `bare` round can serve it."""
        params = self.params
        narrowed = params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1)
        return not narrowed and params.logprobs is None and self.rules is None and self.constraint is None

    @functools.cached_property
    def pinned(self) -> bool:
        """An explicit seed promises ids that do not depend on the load: every proposal is verified."""
        return self.params.seed is not None and self.params.temperature > 0


@dataclasses.dataclass(frozen=True)
class Flight:
    """A dispatched round: its output, and whose rows and prompt ends it holds."""

    output: Any
    slots: int
    rows: list[tuple[Request, int]]  # request, epoch
    pieces: list[Piece]
    drafters: frozenset[int]  # handles
    began: float
    as_switched: bool  # whether it drafts as the switch of its load said


@dataclasses.dataclass(frozen=True)
class Piece:
    """`count` rows of a request's text from `start`, the `index`-th piece of its round, at row `at` of the chunk."""

    index: int
    request: Request
    epoch: int
    start: int
    count: int
    final: bool
    at: int


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Who takes part in a round."""

    decoding: list[Request]
    pieces: list[Piece]

    @functools.cached_property
    def requests(self) -> list[Request]:
        """All of them."""
        return self.decoding + [piece.request for piece in self.pieces]

    @property
    def slots(self) -> int:
        """Slots up to the last one of theirs."""
        return max((1 + request.slot for request in self.requests), default=0)

    @property
    def constrained(self) -> bool:
        """Whether a grammar's masks are needed."""
        return any(request.constraint is not None for request in self.requests)

    @property
    def bare(self) -> bool:
        """Whether a `bare` round can serve them."""
        return all(request.bare for request in self.requests)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counts since start-up, but for the pages, which are those of now. `rows` are the target's, padding included."""

    executables: int
    compilations: int  # since warm-up: 0 unless something went wrong
    pages: int
    pages_held: int
    preemptions: int
    prefix_hits: int
    prefix_rows: int  # rows that hits spared
    rounds: int
    drafted_rounds: int
    rows: int


def read_logprobs(flight: Flight, host: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Of a round's tokens, of first tokens, and of prompts; read only where a request of the round asked for them."""
    said = flight.output.logprobs is not None  # by the round, to whoever asks
    members = [piece.request for piece in flight.pieces] + [request for request, _ in flight.rows] if said else []
    if not any(request.params.logprobs is not None for request in members):
        return None, None, None
    return host((flight.output.logprobs, flight.output.first_logprobs, flight.output.prompt_logprobs))


def token_logprobs(request: Request, values: Any, where: Any, tokens: list[int]) -> list[TokenLogprob]:
    """One a token, where the request asked for them."""
    top = request.params.logprobs
    if top is None:
        return []
    rows = jax.tree.map(lambda x: x[where], values)
    return [
        TokenLogprob(
            token,
            float(rows.chosen[row]),
            int(rows.rank[row]),
            tuple(zip(rows.ids[row, :top].tolist(), rows.values[row, :top].tolist(), strict=True)),
        )
        for row, token in enumerate(tokens)
    ]


def prompt_logprobs(piece: Piece, values: Any) -> list[TokenLogprob]:
    """Of the tokens behind the piece's rows, as far as they are the prompt's."""
    following = piece.request.prompt[piece.start + 1 : piece.start + piece.count + 1]
    return token_logprobs(piece.request, values, slice(piece.at, piece.at + len(following)), following)
