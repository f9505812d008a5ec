"""Continuous batching over the ragged round: requests with their own lengths, pages and budgets, fixed executables.

Round n + 1 is dispatched before round n is read. The host trims at stop tokens and limits when it reads, one round
late; what an ended or preempted request still gets from a round in flight is dropped.
"""

from __future__ import annotations

import collections
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxspec.decoding.compilations import CompilationCounter
from jaxspec.decoding.fast import Fast, with_attention
from jaxspec.decoding.fit import check_draft, check_options, check_proposals, check_sizes, shared_tables
from jaxspec.decoding.plan import Schedule
from jaxspec.decoding.ragged import EngineState, Masks, RaggedOutput, RaggedProgram, Results
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.round import Weights
from jaxspec.decoding.runner import DraftLike, Event, SlotCounts, TargetLike, TokenLogprob
from jaxspec.drafters.base import PrefixUse
from jaxspec.drafters.none import NoDrafter
from jaxspec.errors import ConfigError, RequestError, problem
from jaxspec.models.packed import pack
from jaxspec.serving.adaptive import PrefillSpeed
from jaxspec.serving.buckets import bucket_for, slot_grid
from jaxspec.serving.cost import CostTable
from jaxspec.serving.drafting import Drafted, Drafting
from jaxspec.serving.executables import Executables, every_shape
from jaxspec.serving.grammar import Grammar, GrammarCompiler, check_grammars
from jaxspec.serving.pages import check_pages
from jaxspec.serving.request_pages import RequestPages
from jaxspec.serving.requests import (
    Chosen,
    Flight,
    Metrics,
    Phase,
    Piece,
    Request,
    Shape,
    prompt_logprobs,
    read_logprobs,
    token_logprobs,
)
from jaxspec.serving.round_inputs import Home, Resident, RoundInputs
from jaxspec.serving.scheduler import shares, urgency
from jaxspec.serving.terms import Terms
from jaxspec.serving.text import Codec


class Engine(SlotCounts):
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
        attention: str = "auto",
        pack_weights: bool | None = None,
        bare_rounds: bool | None = None,
        program: Callable[..., RaggedProgram] = RaggedProgram,
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
        shared = shared_tables(target, draft)
        home, fast = self._place(shared.embedding, attention, pack_weights, bare_rounds)
        self._bare = fast.bare
        proposals = drafter.num_proposals if num_proposals is None else num_proposals
        scheduled = cost_table is not None and proposals > 0
        limits = Schedule(proposals, min_verify_rows, max_verify_rows or 0) if scheduled else None
        self.program = program(
            decoder, with_attention(drafter, fast.attention), max_context, num_slots, page_size,
            acceptance=acceptance, confidence_threshold=confidence_threshold, num_proposals=num_proposals,
            schedule=limits, rules=rules, max_logprobs=max_logprobs, attention=fast.attention,
        )  # fmt: skip
        if grammars is not None:
            check_grammars(rules)
        whole = 1 + num_slots * self.program.pages_per_slot
        num_pages = whole if num_pages is None else num_pages
        asked = getattr(drafter, "prefix_use", None)
        prefix = PrefixUse() if asked is None else asked(num_pages, page_size, num_slots)
        least = 1 + self.program.pages_per_slot if prefix.in_pages else whole
        check_pages(num_pages, least, max_context)
        params = pack(target.params, decoder.config) if fast.packed else target.params
        self.weights = Weights(params, draft.params if draft is not None else {}, shared)
        self._slot_buckets = slot_grid(num_slots, slot_buckets)
        written = max(proposals, drafter.tree_nodes) + 1
        self._inputs = RoundInputs(self.program, prefill_chunk, prefill_pieces, proposals + 1, written, home)
        self.lag = int(overlap)
        self._pages = RequestPages(
            num_pages, page_size, limit=max_context + drafter.tree_nodes, written=written, lag=self.lag,
            prefix=prefix if prefix_cache else PrefixUse(in_pages=False),
        )  # fmt: skip
        self.drafting = Drafting(
            num_slots, proposals, table=cost_table, schedule=limits, shares=row_shares, align=align,
            pause=pause_drafting, clock=clock, read=self._host,
        )  # fmt: skip
        grid = self.drafting.row_grid if proposals else lambda slots: ()
        shapes = every_shape(self._slot_buckets, prefill_chunk, grid, fast.bare)
        self.executables = Executables(self.program, shapes, self._inputs, grammars is not None, fast.recycle)
        self._clock, self._prefill_speed = clock, PrefillSpeed(prefill_chunk)
        self._terms = Terms(self.program, frozenset(eos), codec, grammars)
        self._slots: list[Request | None] = [None] * num_slots
        self._flights: collections.deque[Flight] = collections.deque()
        self._pending: collections.deque[Event] = collections.deque()
        self._handles = itertools.count(1)
        self._compilations = CompilationCounter()
        self.reads = 0
        self.preemptions = self.rounds = self.drafted_rounds = self.rows = 0
        self._start(lambda: self.program.init_engine_state(num_pages, shared.embedding.dtype, cache_fill))

    def _place(self, embedding: Any, *asked: Any) -> tuple[Home, Fast]:
        """Decides where rounds run: where the target is."""
        self._device = next(iter(embedding.devices()))
        return Resident(self._device), Fast.on(self._device, *asked)

    def _start(self, state: Callable[[], EngineState]) -> None:
        with jax.default_device(self._device):
            self._state = jax.jit(state)()

    # -- start-up -----------------------------------------------------------------------------------------------------

    @property
    def num_executables(self) -> int:
        """Programs that `warm_up` compiles."""
        return self.executables.count

    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """Compiles every executable, several at a time; returns their names and seconds. The first `admit` calls it
        too. What `progress` raises ends it."""
        if self.executables.ready:
            return []
        times = self.executables.compile(self.weights, self._state, self.drafting.observed, progress)
        self.drafting.confident = self.executables.confident
        for shape in self.executables.shapes:  # lazy set-ups happen here, not under a user
            inputs = self._inputs.round(shape, observed=self.drafting.observed(shape.slots))
            for _ in range(2):  # the second makes a CUDA graph
                self._results(self._run(shape, inputs), shape.slots)
            if self._terms.grammars is not None and not shape.bare:
                self._run_masked(shape, inputs, Chosen([], []))
        jax.block_until_ready(self._state)
        self._compilations.reset()
        self.reads = 0
        return times

    def _run(self, shape: Shape, inputs: Any) -> Any:
        self._state, output = self.executables.run(shape, self.weights, self._state, inputs)
        return output

    def _run_masked(self, shape: Shape, inputs: Any, chosen: Chosen) -> Any:
        """The round in two halves; the masks are built while the target runs."""
        self._state, pending = self.executables.first_half(shape)(self.weights, self._state, inputs)
        masks = self._masks_of(shape, chosen, (pending.proposal.tokens, pending.proposal.tree))
        finish = self.executables.second_half(shape)
        self._state, output = finish(self.weights, self._state, pending, inputs, masks)
        return output

    def _masks_of(self, shape: Shape, chosen: Chosen, drafts: tuple[Any, Any]) -> Masks:
        """`drafts` are proposals and, where there is one, their tree. Before it the rounds in flight are read, since a
        matcher moves by emitted tokens."""
        while self._flights:
            self._read(self._flights.popleft())
        constrained = [request for request in chosen.decoding if request.constraint is not None]
        known = self._host(drafts) if constrained else (None, None)
        return self._inputs.masks(shape, constrained, chosen.pieces, *known)

    @property
    def compile_count(self) -> int:
        """Backend compilations of this process since warm-up; 0 unless something went wrong."""
        return self._compilations.count

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_proposals(self) -> int:
        """m, as served."""
        return self._inputs.rows_each - 1

    @property
    def held_pages(self) -> int:
        """Pages that requests or the prefix cache hold."""
        return self._pages.held

    def metrics(self) -> Metrics:
        """For operators."""
        return Metrics(
            self.executables.count, self.compile_count, self._pages.capacity, self.held_pages, self.preemptions,
            self._pages.hits, self._pages.hit_rows, self.rounds, self.drafted_rounds, self.rows,
        )  # fmt: skip

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None = None) -> None:
        """Raises RequestError if this request can never be served."""
        self._terms.check(prompt, params, grammar)

    def fits(self, prompt: Sequence[int], params: SamplingParams) -> bool:
        """Whether a request would find a slot and pages now, beside those that wait for theirs."""
        return self.free_slots > 0 and self._pages.fits(prompt, params, self._requests(Phase.WAITING))

    def seconds_to_first_token(self, prompt: Sequence[int], params: SamplingParams) -> float:
        """What a request needs at least, if it begins now: by the fastest rounds so far, 0 before the first."""
        return self._prefill_speed.seconds(len(prompt) - self._pages.known_rows(prompt, params))

    def admit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sample: int = 0,
        grammar: Grammar | None = None,
        priority: int = 0,
    ) -> int:
        """Gives a request a slot and returns its handle; its prompt runs in the next rounds.

        `sample` numbers the answers to one request, so that they differ under one seed. `priority`: where pages run
        out, lower ones give way, then younger ones; `AGING_SECONDS` on a slot are worth one step. Raises RequestError
        for a request that does not fit, and when no slot is free.
        """
        self.check(prompt, params, grammar)
        if not self.free_slots:
            raise RequestError(
                f"slots: all {self.num_slots} are taken, expected a free one; wait for a request to finish"
            )
        constraint = self._terms.constraint(grammar)
        self.warm_up()
        handle = next(self._handles)
        if params.max_new_tokens == 0:
            self._pending.append(Event(handle, (), "length", from_round=False))
            return handle
        slot = self._slots.index(None)
        self.drafting.reset(slot)
        self._slots[slot] = Request(
            handle,
            slot,
            [int(token) for token in prompt],
            params,
            sample,
            secrets.randbits(63) if params.seed is None else params.seed,
            self._terms.ending(prompt, params),
            self._terms.rules(params),
            self._pages.lease(),
            priority,
            self._clock(),
            constraint=constraint,
        )
        return handle

    def step(self) -> list[Event]:
        """Dispatches a round and reads the one before it (the same one without overlap). Returns the events since the
        last step."""
        return self._collect(self._dispatch())

    def _collect(self, dispatched: bool) -> list[Event]:
        if len(self._flights) > (self.lag if dispatched else 0):
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
        self._pages.drop_prefixes()

    # -- a round ------------------------------------------------------------------------------------------------------

    def _requests(self, *phases: Phase) -> list[Request]:
        """Requests on the slots, the most urgent first."""
        found = [request for request in self._slots if request is not None and (not phases or request.phase in phases)]
        now = self._clock()
        return sorted(found, key=lambda one: (urgency(one.priority, one.arrived, now), one.handle))

    def _dispatch(self) -> bool:
        """Starts a round for whoever has pages for it; False if there is nobody."""
        chosen = self._choose()
        if not chosen.requests:
            return False
        slots = bucket_for(chosen.slots, self._slot_buckets)
        prefill = self._inputs.chunk if chosen.pieces else 0
        drafted = self.drafting.decide(chosen.decoding, slots, prefill)
        bare = self._bare and chosen.bare
        shape = Shape(slots, drafted.rows if drafted.drafters else slots, bool(drafted.drafters), prefill, bare)
        inputs = self._inputs.of(shape, chosen, drafted, self.drafting.observed(slots))
        began = self._clock()
        if chosen.constrained:
            output = self._run_masked(shape, inputs, chosen)
        else:
            output = self._run(shape, inputs)
        self._launched(shape, chosen, drafted, output, began)
        return True

    def _choose(self) -> Chosen:
        """Who takes part in the next round, with pages for it."""
        before = self.preemptions
        decoding = self._reserve_decoding()
        # Pages just taken from a request are not given back to it in the same breath.
        return Chosen(decoding, list(self._prefill_pieces()) if self.preemptions == before else [])

    def _launched(self, shape: Shape, chosen: Chosen, drafted: Drafted, output: Any, began: float) -> None:
        """Books a round that was dispatched."""
        decoding, drafters = chosen.decoding, drafted.drafters
        if drafters:
            self.drafting.publish(output.confidence, decoding)
        for piece in chosen.pieces:
            piece.request.lease.commit(piece.count)
            if piece.final:
                piece.request.phase = Phase.DECODING
                self._pages.publish(piece.request)
        for request in decoding:
            request.unread += 1
        rows_read = [(request, request.epoch) for request in decoding]
        proposing = frozenset(request.handle for request in drafters)
        as_switched = drafted.as_switched and shape.drafting == bool(drafters)
        self._flights.append(Flight(output, shape.slots, rows_read, chosen.pieces, proposing, began, as_switched))
        self.rounds += 1
        self.drafted_rounds += shape.drafting
        nodes = self.program.drafter.tree_nodes
        self.rows += (shape.slots * (nodes + 1) if nodes and drafters else shape.rows) + shape.prefill

    def _reserve_decoding(self) -> list[Request]:
        """Decoding requests with room for this round's rows; where pages run out the least urgent requests give way."""
        kept: list[Request] = []
        for request in self._requests(Phase.DECODING):
            while request.phase is Phase.DECODING and not self._pages.reserve(request):
                self._preempt(self._requests(Phase.DECODING, Phase.PREFILL)[-1])
            if request.phase is Phase.DECODING:
                kept.append(request)
        return [request for request in kept if request.phase is Phase.DECODING]

    def _preempt(self, request: Request) -> None:
        """Takes its pages; it starts again over prompt and answer so far. Rounds in flight no longer count for it."""
        self.preemptions += 1
        self._pages.close(request)
        request.phase = Phase.WAITING
        request.epoch += 1
        request.unread = 0

    def _prefill_pieces(self) -> Iterator[Piece]:
        """Even shares of a chunk for the most urgent prompts, up to `prefill_pieces` of them."""
        chosen: list[Request] = []
        blocked = False
        for request in self._requests(Phase.WAITING, Phase.PREFILL):
            if len(chosen) == min(self._inputs.pieces, self._inputs.chunk):
                break
            if request.phase is Phase.WAITING:
                # One without pages holds up those behind it that have none either: what becomes free is kept for it.
                if blocked or self._follows(request):
                    continue
                if not self._open(request):
                    blocked = True
                    continue
            chosen.append(request)
        at = 0
        given = shares([len(one.text) - one.lease.committed for one in chosen], self._inputs.chunk)
        for index, (request, count) in enumerate(zip(chosen, given, strict=True)):
            start = request.lease.committed
            yield Piece(index, request, request.epoch, start, count, start + count == len(request.text), at)
            at += count

    def _follows(self, request: Request) -> bool:
        """Whether another request runs the same text just now: its pages will be in the cache (n > 1)."""
        return self._pages.shares(request.params) and any(
            other.text == request.history and self._pages.shares(other.params)
            for other in self._requests(Phase.PREFILL)
        )

    def _open(self, request: Request) -> bool:
        """Begins a request's prompt, if there are pages for all of it."""
        request.text = request.history
        request.prompt_logprobs.clear()
        opened = self._pages.open(request)
        if opened:
            request.phase = Phase.PREFILL
        return opened

    # -- its results --------------------------------------------------------------------------------------------------

    def _host(self, value: Any) -> Any:
        """The one way from the device to the host."""
        self.reads += 1
        return jax.device_get(value)

    def _results(self, output: RaggedOutput, slots: int) -> Results:
        results = Results.read(self._host(output.words), slots, self._inputs.rows_each)
        self.executables.give_back(output)
        return results

    def _read(self, flight: Flight) -> None:
        results = self._results(flight.output, flight.slots)
        seconds = self.drafting.time(flight, int(results.counts.sum()))
        if flight.pieces:
            self._prefill_speed.observe(seconds)
        round_logprobs, first_logprobs, of_prompts = read_logprobs(flight, self._host)
        for piece in flight.pieces:
            request = piece.request
            if request.epoch != piece.epoch or request.phase is Phase.ENDED:
                continue
            if request.params.prompt_logprobs and not request.emitted:
                request.prompt_logprobs += prompt_logprobs(piece, of_prompts)
            if piece.final and not request.emitted:
                new = [int(results.first[piece.index])]
                said = token_logprobs(request, first_logprobs, slice(piece.index, piece.index + 1), new)
                prompt, request.prompt_logprobs = tuple(request.prompt_logprobs), []
                self._emit(request, new, said, from_round=False, prompt_logprobs=prompt)
        finished: list[tuple[Request, int, int]] = []
        counts, proposed, tokens = (part.tolist() for part in (results.counts, results.verified, results.tokens))
        for request, epoch in flight.rows:
            if request.epoch != epoch or request.phase is Phase.ENDED:
                continue
            request.unread -= 1
            count, verified = counts[request.slot], proposed[request.slot]
            request.lease.commit(count)
            finished.append((request, verified, max(count - 1, 0)))
            new = tokens[request.slot][:count]
            said = token_logprobs(request, round_logprobs, request.slot, new)
            self._emit(request, new, said, accepted=max(count - 1, 0), proposed=verified)
        self.drafting.note(flight, finished)

    def _emit(self, request: Request, tokens: list[int], logprobs: list[TokenLogprob], **about: Any) -> None:
        """Trims at the answer's end, reports, and frees the slot of a finished request."""
        within = len(tokens) if request.constraint is None else request.constraint.advance(tokens)
        kept = request.ending.push(tokens[:within])
        whole = len(kept.tokens) == within  # the limit did not come before the grammar's end
        if whole and request.constraint is not None and request.constraint.finished:
            held = request.ending.stop() if kept.reason is None else ""
            kept = kept._replace(text=kept.text + held, reason="stop", by_id=False)
        request.emitted += kept.tokens
        said = tuple(logprobs[: len(kept.tokens)])
        event = Event(
            request.handle, kept.tokens, kept.reason, text=kept.text, by_id=kept.by_id, logprobs=said, **about
        )
        self._pending.append(event)
        if kept.reason is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._pages.close(request)
        request.phase = Phase.ENDED
        self._slots[request.slot] = None
