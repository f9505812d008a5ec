"""Continuous batching over the ragged round: requests with their own lengths, pages and budgets, fixed executables.

Round n + 1 is dispatched before round n is read. The host trims at stop tokens and limits when it reads, one round
late; what an ended or preempted request still gets from a round in flight is dropped.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import enum
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.decoding.compilations import CompilationCounter
from jaxspec.decoding.fit import check_draft, check_options, check_proposals, check_sizes
from jaxspec.decoding.plan import Schedule
from jaxspec.decoding.processors import LogitRules, mask_words, rule_rows
from jaxspec.decoding.ragged import Masks, PrefillRows, RaggedProgram, RoundInput, Rules
from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.decoding.round import Weights
from jaxspec.decoding.runner import DraftLike, Event, TargetLike, TokenLogprob
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Shared
from jaxspec.drafters.none import NoDrafter
from jaxspec.errors import ConfigError, InvariantError, RequestError, problem
from jaxspec.serving.adaptive import DraftSwitch, ObservedAcceptance, RequestSwitch
from jaxspec.serving.buckets import filling_budget, round_up
from jaxspec.serving.budget import BudgetPlanner
from jaxspec.serving.confidence_ring import ConfidenceRelay
from jaxspec.serving.cost import CostTable
from jaxspec.serving.ending import AnswerEnd
from jaxspec.serving.grammar import Constraint, Grammar, GrammarCompiler
from jaxspec.serving.pages import PageAllocator, PageLease, rows_in_flight
from jaxspec.serving.prefix import PrefixCache
from jaxspec.serving.text import Codec


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """What an executable is made for: R slots, rows for anchors and proposals, whether it drafts, C prefill rows."""

    slots: int
    rows: int
    drafting: bool
    prefill: int

    def __str__(self) -> str:
        draft = "draft" if self.drafting else "plain"
        return f"R={self.slots} M={self.rows + self.prefill} ({draft}, {self.prefill} prefill rows)"


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting for pages"
    PREFILL = "prefill"
    DECODING = "decoding"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class _Request:
    handle: int
    slot: int
    prompt: list[int]
    params: SamplingParams
    sample: int
    seed: int
    ending: AnswerEnd
    rules: Rules | None  # one row, where it asks for any
    lease: PageLease
    phase: Phase = Phase.WAITING
    emitted: list[int] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)  # what prefill runs over; `tokens` when it began
    epoch: int = 0  # rounds dispatched before a preemption are of an earlier one
    unread: int = 0  # rounds in flight that draft for it
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    constraint: Constraint | None = None
    switch: RequestSwitch = dataclasses.field(default_factory=RequestSwitch)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.emitted


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched round: its output, and whose rows and prompt ends it holds."""

    output: Any
    rows: list[tuple[_Request, int]]  # request, epoch
    pieces: list[_Piece]
    drafters: frozenset[int]  # handles
    began: float
    as_switched: bool  # whether it drafts as the switch of its load said


@dataclasses.dataclass(frozen=True)
class _Piece:
    """`count` rows of a request's text from `start`, the `index`-th piece of its round, at row `at` of the chunk."""

    index: int
    request: _Request
    epoch: int
    start: int
    count: int
    final: bool
    at: int


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


class Engine:
    """Up to `num_slots` requests at once, each up to `max_context` tokens of prompt and answer, on `num_pages` pages.

    Not thread-safe: one thread owns it. `overlap` dispatches a round before the last one was read. A cost table turns
    on DSpark's budgets, by the drafter's confidence or, where it has none, by what was accepted so far; `align` fills
    the bucket that a budget needs anyway. `pause_drafting` stops drafting for a request or a load where it was measured
    to lose (`clock` in seconds). Construction raises ConfigError for an option out of range and for a drafter that was
    made for another target.
    """

    def __init__(
        self,
        target: TargetLike,
        draft: DraftLike | None = None,
        *,
        num_slots: int = 8,
        max_context: int = 2048,
        prefill_chunk: int = 64,
        prefill_pieces: int = 4,
        page_size: int = 16,
        num_pages: int | None = None,
        slot_buckets: Sequence[int] = (),
        row_shares: Sequence[float] = (0.25, 0.5, 0.75),
        acceptance: str = "ratio",
        num_proposals: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        overlap: bool = True,
        prefix_cache: bool = True,
        cost_table: CostTable | None = None,
        align: bool = True,
        min_verify_rows: int = 1,
        max_verify_rows: int | None = None,
        confidence_threshold: float = 0.0,
        pause_drafting: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        rules: bool = True,
        max_logprobs: int | None = 20,
        codec: Codec | None = None,
        grammars: GrammarCompiler | None = None,
        cache_fill: float = 0.0,
    ):
        sizes = {"num_slots": num_slots, "max_context": max_context, "prefill_chunk": prefill_chunk}
        check_sizes({**sizes, "prefill_pieces": prefill_pieces, "page_size": page_size})
        decoder = target.model
        drafter = draft.drafter if draft is not None else NoDrafter(decoder.config.vocab_size)
        decoder.check_taps(drafter.taps)
        eos = tuple(decoder.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        check_options(acceptance, confidence_threshold, eos, decoder.config.vocab_size)
        check_proposals(drafter, num_proposals, acceptance)
        if draft is not None:
            check_draft(draft, decoder.config, decoder.embedding(target.params).shape[-1])
        if drafter.tree_nodes and cost_table is not None:
            raise ConfigError(problem("engine.cost_table", "a table", "null: a tree is verified whole"))
        max_context = min(max_context, decoder.config.max_position)
        embedding, head = getattr(draft, "embedding", None), getattr(draft, "head", None)
        shared = Shared(
            decoder.embedding(target.params) if embedding is None else embedding,
            decoder.head(target.params) if head is None else head,
        )
        proposals = drafter.num_proposals if num_proposals is None else num_proposals
        scheduled = cost_table is not None and proposals > 0
        limits = Schedule(proposals, min_verify_rows, max_verify_rows or 0) if scheduled else None
        self.program = RaggedProgram(
            decoder,
            drafter,
            max_context,
            num_slots,
            page_size,
            acceptance=acceptance,
            confidence_threshold=confidence_threshold,
            num_proposals=num_proposals,
            schedule=limits,
            rules=rules,
            max_logprobs=max_logprobs,
        )
        self._codec = codec
        if grammars is not None and not rules:
            raise ConfigError(problem("engine.grammar", expected="engine.rules to be on"))
        self._grammars = grammars
        whole = 1 + num_slots * self.program.pages_per_slot
        num_pages = whole if num_pages is None else num_pages
        least = 1 + self.program.pages_per_slot if getattr(drafter, "context_in_pages", True) else whole
        if num_pages < least:
            wanted = f"at least {least}, for max_context {max_context}"
            raise ConfigError(problem("engine.num_pages", num_pages, wanted))
        self.weights = Weights(target.params, draft.params if draft is not None else {}, shared)
        self._allocator = PageAllocator(num_pages, page_size)
        self._cache = PrefixCache(self._allocator, lookahead=getattr(drafter, "context_lookahead", 0))
        self._share = prefix_cache and getattr(drafter, "context_in_pages", True)
        self._chunk, self._pieces = prefill_chunk, prefill_pieces
        self._slot_buckets = _slot_buckets(num_slots, slot_buckets)
        self._rows_each = proposals + 1
        self._written = max(proposals, drafter.tree_nodes) + 1  # rows that one round may write for a request
        self._shares = row_shares if scheduled else ()
        self._planner = BudgetPlanner(cost_table, limits, num_slots) if cost_table and limits else None
        self._align = align
        self._relay = ConfidenceRelay(self._host)
        self._confident = False  # whether the drafter has a confidence; known once a round was traced
        self._observed = ObservedAcceptance(num_slots, proposals)
        self._switch = DraftSwitch() if pause_drafting and proposals else None
        self._clock, self._last_read = clock, 0.0
        self._eos = frozenset(eos)
        self._lag = 1 if overlap else 0
        self._slots: list[_Request | None] = [None] * num_slots
        self._flights: collections.deque[_Flight] = collections.deque()
        self._pending: collections.deque[Event] = collections.deque()
        self._handles = itertools.count(1)
        self._executables: dict[str, Any] = {}
        self._compilations = CompilationCounter()
        self.reads = 0
        self.preemptions = self.rounds = self.drafted_rounds = self.rows = self.prefix_hits = self.prefix_rows = 0
        self._device = next(iter(shared.embedding.devices()))
        with jax.default_device(self._device):
            dtype = shared.embedding.dtype
            self._state = jax.jit(lambda: self.program.init_engine_state(num_pages, dtype, cache_fill))()

    # -- start-up -----------------------------------------------------------------------------------------------------

    def shapes(self) -> list[Shape]:
        """Every executable that a round may take."""
        found = set()
        for slots in self._slot_buckets:
            for prefill in (0, self._chunk):
                found.add(Shape(slots, slots, False, prefill))
                if self._rows_each > 1:
                    found |= {Shape(slots, rows, True, prefill) for rows in self._row_grid(slots)}
        return sorted(found)

    @property
    def num_executables(self) -> int:
        """Programs that `warm_up` compiles: one a shape, three where grammars may be asked for."""
        return len(self.shapes()) * (1 if self._grammars is None else 3)

    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """Compiles every executable, several at a time; returns their names and seconds. Called by the first `admit`
        if it was not before. What `progress` raises ends it.
        """
        if self._executables:
            return []

        def build(name: str, lowered: Any) -> tuple[str, Any, float]:
            started = time.perf_counter()
            return name, lowered.compile(), time.perf_counter() - started

        times = []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = [pool.submit(build, *named) for shape in self.shapes() for named in self._lower(shape)]
            try:
                for done in concurrent.futures.as_completed(waiting):
                    name, executable, seconds = done.result()
                    self._executables[name] = executable
                    times.append((name, seconds))
                    if progress is not None:
                        progress(name, seconds)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # a server that is stopped does not compile on
                raise
        for shape in self.shapes():  # whatever is set up lazily is set up here, not under a user
            inputs = self._inputs(shape, [], [], [], 0)
            self._host(self._run(str(shape), inputs).counts)
            if self._grammars is not None:
                self._run_masked(shape, inputs, [], [])
        jax.block_until_ready(self._state)
        self._compilations.reset()
        self.reads = 0
        return times

    def _lower(self, shape: Shape) -> Iterator[tuple[str, Any]]:
        """The round of a shape, and its two halves where grammars may be asked for."""
        inputs, static = self._inputs(shape, [], [], [], 0), {"rows": shape.rows, "drafting": shape.drafting}

        def jit(step: Callable[..., Any], donated: int, *names: str) -> Any:
            return jax.jit(step, static_argnames=names, donate_argnums=donated)

        whole = jit(self.program.ragged_round, 1, *static)
        lowered = whole.lower(self.weights, self._state, inputs, **static)
        self._confident |= lowered.out_info[1].confidence is not None
        yield str(shape), lowered
        if self._grammars is not None:
            begin = jit(self.program.begin, 1, *static).lower(self.weights, self._state, inputs, **static)
            yield f"{shape}, first half", begin
            masks = self._masks(shape, [], [], None)
            finish = jit(self.program.finish, 1)
            yield f"{shape}, second half", finish.lower(self.weights, *begin.out_info, inputs, masks)

    def _run(self, name: str, inputs: RoundInput) -> Any:
        self._state, output = self._executable(name)(self.weights, self._state, inputs)
        return output

    def _run_masked(self, shape: Shape, inputs: RoundInput, decoding: list[_Request], pieces: list[_Piece]) -> Any:
        """The round in two halves. While the target runs, the rounds in flight are read, since a matcher moves by
        emitted tokens, and the masks are built."""
        self._state, pending = self._executable(f"{shape}, first half")(self.weights, self._state, inputs)
        while self._flights:
            self._read(self._flights.popleft())
        masks = self._masks(shape, decoding, pieces, pending.proposal.tokens)
        self._state, output = self._executable(f"{shape}, second half")(
            self.weights, self._state, pending, inputs, masks
        )
        return output

    def _masks(self, shape: Shape, decoding: list[_Request], pieces: list[_Piece], proposed: Any) -> Masks:
        words = mask_words(self.vocab_size)
        rows = np.full((shape.slots, self._rows_each if shape.drafting else 1, words), -1, np.int32)
        first = np.full((self._pieces, words), -1, np.int32)
        constrained = [request for request in decoding if request.constraint is not None]
        drafts: Any = self._host(proposed) if constrained else None
        for request in constrained:
            assert request.constraint is not None
            rows[request.slot] = request.constraint.masks(drafts[request.slot].tolist())[:, :words]
        for piece in pieces:
            if piece.final and piece.request.constraint is not None:
                first[piece.index] = piece.request.constraint.masks([])[0, :words]
        return jax.device_put(Masks(rows, first), self._device)

    def _executable(self, name: str) -> Any:
        if name not in self._executables:
            raise InvariantError(problem("executable", name, "one that was compiled at start-up"))
        return self._executables[name]

    @property
    def compile_count(self) -> int:
        """Backend compilations of this process since warm-up; 0 unless something went wrong."""
        return self._compilations.count

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.program.max_context

    @property
    def num_proposals(self) -> int:
        """m, as served."""
        return self._rows_each - 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.program.decoder.config.vocab_size

    @property
    def num_slots(self) -> int:
        """Requests that fit at once."""
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        """Slots that `admit` may still fill."""
        return sum(request is None for request in self._slots)

    @property
    def live(self) -> int:
        """Requests on the slots, and events that wait for the next `step`."""
        return self.num_slots - self.free_slots + len(self._pending)

    @property
    def held_pages(self) -> int:
        """Pages that requests or the prefix cache hold."""
        return self._allocator.capacity - self._allocator.free

    def metrics(self) -> Metrics:
        """For operators."""
        return Metrics(
            len(self._executables), self.compile_count, self._allocator.capacity, self.held_pages, self.preemptions,
            self.prefix_hits, self.prefix_rows, self.rounds, self.drafted_rounds, self.rows,
        )  # fmt: skip

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None = None) -> None:
        """Raises RequestError if this request can never be served."""
        params.validate(self.vocab_size)
        validate_prompt(prompt, self.vocab_size, self.max_context)
        most = self.program.max_logprobs
        if params.logprobs is not None and (most is None or params.logprobs > most):
            limit = "none: engine.max_logprobs is off" if most is None else f"at most {most} (engine.max_logprobs)"
            raise RequestError(problem("logprobs", params.logprobs, limit))
        if params.rules != LogitRules() and not self.program.rules:
            raise RequestError(problem("sampling", "penalties, bias or min tokens", "none: engine.rules is off"))
        self._ending(prompt, params)
        self._rules(params)
        if grammar is not None and self._grammars is None:
            raise RequestError(problem("grammar", expected="none: the server was started without grammars"))
        if grammar is not None and self.program.drafter.tree_nodes:
            raise RequestError(problem("grammar", expected="none: the drafter proposes trees"))

    def admit(
        self, prompt: Sequence[int], params: SamplingParams, sample: int = 0, grammar: Grammar | None = None
    ) -> int:
        """Gives a request a slot and returns its handle; its prompt runs in the next rounds.

        `sample` numbers the answers to one request, so that they differ under one seed. Raises RequestError for a
        request that does not fit, and when no slot is free.
        """
        self.check(prompt, params, grammar)
        if not self.free_slots:
            raise RequestError(
                f"slots: all {self.num_slots} are taken, expected a free one; wait for a request to finish"
            )
        constraint = self._grammars.start(grammar) if self._grammars is not None and grammar is not None else None
        self.warm_up()
        handle = next(self._handles)
        if params.max_new_tokens == 0:
            self._pending.append(Event(handle, (), "length", from_round=False))
            return handle
        slot = self._slots.index(None)
        self._observed.reset(slot)
        self._slots[slot] = _Request(
            handle,
            slot,
            [int(token) for token in prompt],
            params,
            sample,
            secrets.randbits(63) if params.seed is None else params.seed,
            self._ending(prompt, params),
            self._rules(params),
            PageLease(self._allocator.page_size, []),
            constraint=constraint,
        )
        return handle

    def step(self) -> list[Event]:
        """Dispatches a round and reads the one before it (the same one without overlap). Returns the events since the
        last step."""
        dispatched = self._dispatch()
        if len(self._flights) > (self._lag if dispatched else 0):
            self._read(self._flights.popleft())
        events = list(self._pending)
        self._pending.clear()
        return events

    def cancel(self, handle: int) -> None:
        """Frees the request's slot and pages; nothing more is reported of it. Harmless for unknown or ended handles."""
        for request in self._requests():
            if request.handle == handle:
                self._end(request)
        self._pending = collections.deque(event for event in self._pending if event.handle != handle)

    def drop_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._cache.clear()

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}))

    def _ending(self, prompt: Sequence[int], params: SamplingParams) -> AnswerEnd:
        return AnswerEnd(
            min(params.max_new_tokens, self.max_context - len(prompt)),
            stop_ids=self._stop_ids(params),
            stops=params.stop,
            codec=self._codec if params.stop else None,
            min_tokens=params.rules.min_tokens,
        )

    def _rules(self, params: SamplingParams) -> Rules | None:
        """The request's row of `Rules`."""
        if params.rules == LogitRules():
            return None
        rows: Any = rule_rows(params.rules, self._stop_ids(params))
        return Rules(**{name: value[0] for name, value in rows.items()})

    # -- a round ------------------------------------------------------------------------------------------------------

    def _requests(self, *phases: Phase) -> list[_Request]:
        """Requests on the slots, oldest first."""
        found = [request for request in self._slots if request is not None and (not phases or request.phase in phases)]
        return sorted(found, key=lambda request: request.handle)

    def _dispatch(self) -> bool:
        """Starts a round for whoever has pages for it; False if there is nobody."""
        before = self.preemptions
        decoding = self._reserve_decoding()
        # Pages that were just taken from a request are not given back to it in the same breath.
        pieces = list(self._prefill_pieces()) if self.preemptions == before else []
        if not decoding and not pieces:
            return False
        taking_part = decoding + [piece.request for piece in pieces]
        slots = round_up(1 + max(request.slot for request in taking_part), self._slot_buckets)
        assert slots is not None
        prefill = self._chunk if pieces else 0
        drafters, as_switched = self._drafters(decoding, slots)
        budget, rows = self._plan(decoding, drafters, slots, prefill)
        shape = Shape(slots, rows if drafters else slots, bool(drafters), prefill)
        inputs = self._inputs(shape, decoding, drafters, pieces, budget)
        began = self._clock()
        if any(request.constraint is not None for request in taking_part):
            output = self._run_masked(shape, inputs, decoding, pieces)
        else:
            output = self._run(str(shape), inputs)
        if self._planner is not None and drafters and self._confident:
            owners = np.zeros(self.num_slots, np.int64)
            owners[[request.slot for request in decoding]] = [request.handle for request in decoding]
            self._relay.publish(output.confidence, owners)
        for piece in pieces:
            piece.request.lease.commit(piece.count)
            if piece.final:
                piece.request.phase = Phase.DECODING
                if self._shares_pages(piece.request):
                    self._cache.insert(piece.request.text, piece.request.lease)
        for request in decoding:
            request.unread += 1
        rows_read = [(request, request.epoch) for request in decoding]
        proposing = frozenset(request.handle for request in drafters)
        self._flights.append(_Flight(output, rows_read, pieces, proposing, began, as_switched))
        self.rounds += 1
        self.drafted_rounds += shape.drafting
        nodes = self.program.drafter.tree_nodes
        self.rows += (slots * (nodes + 1) if nodes and drafters else shape.rows) + prefill
        return True

    def _drafters(self, decoding: list[_Request], slots: int) -> tuple[list[_Request], bool]:
        """Who proposes in this round, and whether that is what the switch of this load said.

        A pinned request always does, since its ids must not depend on the load. Others are paused only where that makes
        the round smaller: drafts that cost nothing may as well be verified.
        """
        if self._rows_each == 1 or not decoding:
            return [], True
        if self._switch is None:
            return decoding, True
        wanted = self._switch.drafting(len(decoding))
        found = [request for request in decoding if _pinned(request) or (wanted and request.switch.drafting)]
        if found and self._bucket(slots, len(decoding), len(found)) == self._bucket(slots, *[len(decoding)] * 2):
            found = decoding
        return found, wanted or not found

    def _bucket(self, slots: int, requests: int, drafters: int) -> int:
        """Rows of the smallest executable for so many requests, of which some draft in full."""
        found = round_up(requests + drafters * (self._rows_each - 1), self._row_grid(slots))
        assert found is not None
        return found

    def _plan(self, decoding: list[_Request], drafters: list[_Request], slots: int, prefill: int) -> tuple[int, int]:
        """Budget of proposals, and the bucket of rows for anchors and proposals."""
        full, bucket = len(drafters) * (self._rows_each - 1), self._bucket(slots, len(decoding), len(drafters))
        if self._planner is None or not drafters:
            return full, bucket
        known = self._survivals(decoding, drafters)
        order = np.array([request.slot for request in decoding])
        current = np.array([request.handle for request in decoding])
        pinned = np.array([_pinned(request) for request in decoding])
        decision = self._planner.plan(known, order, current, prefill_rows=prefill, pinned=pinned)
        if decision is None:
            return full, bucket
        least = max(self._planner.schedule.min_rows, 1)
        paused = len(decoding) - len(drafters)
        budget = min(decision.budget, full)
        rows = paused + min(len(drafters) * least + budget, len(drafters) * self._rows_each)
        found = round_up(rows, self._row_grid(slots))
        assert found is not None
        if self._align:
            budget = max(budget, filling_budget(found - paused, len(drafters), self._rows_each, least))
        return budget, found

    def _survivals(self, decoding: list[_Request], drafters: list[_Request]) -> tuple[np.ndarray, np.ndarray] | None:
        """Confidences [slots, m] and whose they are; those of paused requests are 0, so that no budget is for them."""
        if self._confident:
            known = self._relay.resolve()
        else:
            owners = np.array([0 if request is None else request.handle for request in self._slots])
            known = self._observed.confidence(np.arange(self.num_slots)), owners
        proposing = {request.handle for request in drafters}
        paused = [request for request in decoding if request.handle not in proposing]
        if known is None or not paused:
            return known
        confidence, owners = known[0].copy(), known[1].copy()
        confidence[[request.slot for request in paused]] = 0
        owners[[request.slot for request in paused]] = [request.handle for request in paused]
        return confidence, owners

    def _reserve_decoding(self) -> list[_Request]:
        """Decoding requests with room for this round's rows; where pages run out the youngest requests give way."""
        kept: list[_Request] = []
        for request in self._requests(Phase.DECODING):
            while request.phase is Phase.DECODING and not self._reserve(request):
                self._preempt(self._requests(Phase.DECODING, Phase.PREFILL)[-1])
            if request.phase is Phase.DECODING:
                kept.append(request)
        return [request for request in kept if request.phase is Phase.DECODING]

    def _reserve(self, request: _Request) -> bool:
        limit = self.max_context + self.program.drafter.tree_nodes
        rows = rows_in_flight(request.unread, self._written)
        return request.lease.reserve(self._allocator, rows, limit, self._cache.evict)

    def _preempt(self, request: _Request) -> None:
        """Takes its pages; it starts again over prompt and answer so far. Rounds in flight no longer count for it."""
        self.preemptions += 1
        self._close(request)
        request.phase = Phase.WAITING
        request.epoch += 1
        request.unread = 0

    def _prefill_pieces(self) -> Iterator[_Piece]:
        """Up to `prefill_pieces` prompts in a chunk, oldest first: a request without pages holds up those behind it."""
        at = index = 0
        for request in self._requests(Phase.WAITING, Phase.PREFILL):
            if request.phase is Phase.WAITING and self._follows(request):
                continue
            if index == self._pieces or at == self._chunk:
                return
            if request.phase is Phase.WAITING and not self._open(request):
                return
            start = request.lease.committed
            count = min(self._chunk - at, len(request.text) - start)
            yield _Piece(index, request, request.epoch, start, count, start + count == len(request.text), at)
            at, index = at + count, index + 1

    def _follows(self, request: _Request) -> bool:
        """Whether another request runs the same text just now: its pages will be in the cache (n > 1)."""
        return self._shares_pages(request) and any(
            other.text == request.tokens and self._shares_pages(other) for other in self._requests(Phase.PREFILL)
        )

    def _open(self, request: _Request) -> bool:
        """Pages for the whole text of a request, those of a known prefix first."""
        request.text = request.tokens
        request.prompt_logprobs.clear()
        if self._shares_pages(request):
            request.lease = self._cache.open(request.text)
        limit = self.max_context + self.program.drafter.tree_nodes
        rows = len(request.text) - request.lease.committed + rows_in_flight(self._lag, self._written)
        if request.lease.reserve(self._allocator, rows, limit, self._cache.evict):
            request.phase = Phase.PREFILL
            self.prefix_hits += request.lease.committed > 0
            self.prefix_rows += request.lease.committed
            return True
        request.lease.release(self._allocator)
        return False

    def _inputs(
        self,
        shape: Shape,
        decoding: list[_Request],
        drafters: list[_Request],
        pieces: list[_Piece],
        budget: int,
    ) -> RoundInput:
        slots = shape.slots
        zeros = lambda dtype=np.int32: np.zeros(slots, dtype)  # noqa: E731
        alive, pinned, logprobs = zeros(bool), zeros(bool), zeros(bool)
        rules = _no_rules(slots) if self.program.rules else None
        limits, proposals, samples, top_k = zeros(), zeros(), zeros(), zeros()
        temperature, min_p, top_p = zeros(np.float32), zeros(np.float32), np.ones(slots, np.float32)
        seeds = np.zeros((slots, 2), np.uint32)
        table = np.zeros((slots, self.program.pages_per_slot), np.int32)
        for request in decoding + [piece.request for piece in pieces]:
            slot, params = request.slot, request.params
            table[slot] = request.lease.table_row(table.shape[1])
            # The last token of a round has no row in it, and a tree's nodes beyond its depth never become history.
            room = request.lease.allocated + 1 - (self._written - self._rows_each)
            limits[slot] = min(self.max_context, room)
            pinned[slot] = _pinned(request)
            seeds[slot] = request.seed & 0xFFFFFFFF, request.seed >> 32
            samples[slot] = request.sample
            temperature[slot], top_p[slot], min_p[slot] = params.temperature, params.top_p, params.min_p
            top_k[slot] = min(params.top_k, self.vocab_size)
            logprobs[slot] = params.logprobs is not None
            if rules is not None and request.rules is not None:
                for field in dataclasses.fields(Rules):
                    getattr(rules, field.name)[slot] = getattr(request.rules, field.name)
        for request in decoding:
            alive[request.slot] = True
        for request in drafters:
            proposals[request.slot] = self._rows_each - 1
        observed = None if self._planner is None else self._observed.confidence(np.arange(slots))
        inputs = RoundInput(
            alive, table, limits, proposals, pinned, np.int32(budget), seeds, samples,
            SlotSampling(temperature, top_k, top_p, min_p), logprobs, observed, rules,
            self._prefill_rows(pieces) if shape.prefill else None,
        )  # fmt: skip
        return jax.device_put(inputs, self._device)

    def _prefill_rows(self, pieces: list[_Piece]) -> PrefillRows:
        tokens, following = np.zeros(self._chunk, np.int32), np.zeros(self._chunk, np.int32)
        answers = np.zeros(self._chunk, bool)
        slots = np.full(self._pieces, self.num_slots, np.int32)
        starts, counts = np.zeros(self._pieces, np.int32), np.zeros(self._pieces, np.int32)
        finals, fresh = np.zeros(self._pieces, bool), np.zeros(self._pieces, bool)
        for piece in pieces:
            request, end = piece.request, piece.start + piece.count
            behind = request.text[piece.start + 1 : end + 1]
            rows = slice(piece.at, piece.at + piece.count)
            tokens[rows] = request.text[piece.start : end]
            following[piece.at : piece.at + len(behind)] = behind
            answers[rows] = np.arange(piece.start, end) >= len(request.prompt)
            slots[piece.index], starts[piece.index], counts[piece.index] = request.slot, piece.start, piece.count
            finals[piece.index], fresh[piece.index] = piece.final, piece.start == 0
        return PrefillRows(tokens, following, slots, starts, counts, finals, fresh, answers)

    # -- its results --------------------------------------------------------------------------------------------------

    def _host(self, value: Any) -> Any:
        """The one way from the device to the host."""
        self.reads += 1
        return jax.device_get(value)

    def _read(self, flight: _Flight) -> None:
        output = flight.output
        tokens, counts, verified, first = self._host((output.tokens, output.counts, output.verified, output.first))
        self._time(flight, int(counts.sum()))
        members = [piece.request for piece in flight.pieces] + [request for request, _ in flight.rows]
        if any(request.params.logprobs is not None for request in members):
            said = self._host((output.logprobs, output.first_logprobs, output.prompt_logprobs))
            round_logprobs, first_logprobs, prompt_logprobs = said
        else:
            round_logprobs = first_logprobs = prompt_logprobs = None
        for piece in flight.pieces:
            request = piece.request
            if request.epoch != piece.epoch or request.phase is Phase.ENDED:
                continue
            if request.params.prompt_logprobs and not request.emitted:
                request.prompt_logprobs += _prompt_logprobs(piece, prompt_logprobs)
            if piece.final:
                new = [int(first[piece.index])]
                said = _token_logprobs(request, first_logprobs, slice(piece.index, piece.index + 1), new)
                prompt, request.prompt_logprobs = tuple(request.prompt_logprobs), []
                self._emit(request, new, said, from_round=False, prompt_logprobs=prompt)
        finished: list[tuple[_Request, int, int]] = []
        for request, epoch in flight.rows:
            if request.epoch != epoch or request.phase is Phase.ENDED:
                continue
            request.unread -= 1
            count = int(counts[request.slot])
            request.lease.commit(count)
            finished.append((request, int(verified[request.slot]), max(count - 1, 0)))
            new = tokens[request.slot, :count].tolist()
            said = _token_logprobs(request, round_logprobs, request.slot, new)
            self._emit(request, new, said, accepted=max(count - 1, 0), proposed=int(verified[request.slot]))
        self._note(flight, finished)

    def _time(self, flight: _Flight, tokens: int) -> None:
        """Tells the switch what the round brought and took: since it began, or since the one before it was read."""
        now = self._clock()
        seconds, self._last_read = now - max(flight.began, self._last_read), now
        if self._switch is not None and flight.rows and flight.as_switched and not flight.pieces:
            self._switch.observe(len(flight.rows), bool(flight.drafters), tokens, seconds)

    def _note(self, flight: _Flight, finished: list[tuple[_Request, int, int]]) -> None:
        """What a round says about its requests' drafts: how many were verified, and accepted."""
        if self._planner is not None and flight.drafters and finished:
            columns = zip(*((request.slot, kept, stood) for request, kept, stood in finished), strict=True)
            self._observed.observe(*(np.array(column) for column in columns))
        if self._switch is None:
            return
        break_even = self._switch.break_even(len(flight.rows))
        for request, _, accepted in finished:
            if request.handle in flight.drafters or not request.switch.drafting:
                request.switch.observe(accepted, break_even)

    def _emit(self, request: _Request, tokens: list[int], logprobs: list[TokenLogprob], **about: Any) -> None:
        """Trims at the answer's end, reports, and frees the slot of a finished request."""
        within = len(tokens) if request.constraint is None else request.constraint.advance(tokens)
        kept = request.ending.push(tokens[:within])
        whole = len(kept.tokens) == within  # the limit did not come before the grammar's end
        if whole and request.constraint is not None and request.constraint.finished:
            held = request.ending.stop() if kept.reason is None else ""
            kept = dataclasses.replace(kept, text=kept.text + held, reason="stop", by_id=False)
        request.emitted += kept.tokens
        said = tuple(logprobs[: len(kept.tokens)])
        event = Event(
            request.handle, kept.tokens, kept.reason, text=kept.text, by_id=kept.by_id, logprobs=said, **about
        )
        self._pending.append(event)
        if kept.reason is not None:
            self._end(request)

    def _end(self, request: _Request) -> None:
        self._close(request)
        request.phase = Phase.ENDED
        self._slots[request.slot] = None

    def _close(self, request: _Request) -> None:
        """Gives the pages back; the full ones stay known to the prefix cache until they are evicted."""
        if self._shares_pages(request):
            self._cache.close(request.tokens, request.lease)
        else:
            request.lease.release(self._allocator)

    def _shares_pages(self, request: _Request) -> bool:
        """Whether a cached prefix may stand for its rows: not where each of the prompt's rows has something to say."""
        return self._share and request.rules is None and not request.params.prompt_logprobs

    def _row_grid(self, slots: int) -> tuple[int, ...]:
        """Row buckets of R slots when drafting."""
        full = slots * self._rows_each
        return tuple(sorted({max(slots, int(full * share)) for share in self._shares} | {full}))


def _slot_buckets(num_slots: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Powers of four up to all slots, or what is asked for and all slots."""
    wanted = asked or [4**power for power in range(num_slots.bit_length()) if 4**power < num_slots]
    for size in wanted:
        if not 1 <= size <= num_slots:
            raise ConfigError(problem("engine.slot_buckets", size, f"sizes from 1 to num_slots = {num_slots}"))
    return tuple(sorted({*wanted, num_slots}))


def _pinned(request: _Request) -> bool:
    """An explicit seed promises ids that do not depend on the load: every proposal is verified."""
    return request.params.seed is not None and request.params.temperature > 0


def _token_logprobs(request: _Request, values: Any, where: Any, tokens: list[int]) -> list[TokenLogprob]:
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


def _prompt_logprobs(piece: _Piece, values: Any) -> list[TokenLogprob]:
    """Of the tokens behind the piece's rows, as far as they are the prompt's."""
    following = piece.request.prompt[piece.start + 1 : piece.start + piece.count + 1]
    return _token_logprobs(piece.request, values, slice(piece.at, piece.at + len(following)), following)


def _no_rules(slots: int) -> Rules:
    rows: Any = {name: np.repeat(value, slots, 0) for name, value in rule_rows(LogitRules()).items()}
    return Rules(**rows)
