"""A fixed number of slots over the round: offline generation, the evaluation and the server all drive this object.

Two executables, prefill and round, are compiled ahead of time; requests come and go without another compilation.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxspec.decoding import debug as checks
from jaxspec.decoding.compilations import CompilationCounter
from jaxspec.decoding.fit import check_draft, check_options, check_proposals, check_sizes, shared_tables
from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.decoding.round import PrefillInput, Program, Weights
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.none import NoDrafter
from jaxspec.errors import RequestError
from jaxspec.models.decoder import Decoder


class TargetLike(Protocol):
    """A loaded target: its decoder and parameters (layers as a list)."""

    @property
    def model(self) -> Decoder: ...
    @property
    def params(self) -> Any: ...


class DraftLike(Protocol):
    """A loaded drafter; `embedding` and `head` are its checkpoint's own tables, or None to share the target's."""

    @property
    def drafter(self) -> Drafter: ...
    @property
    def params(self) -> Any: ...
    @property
    def embedding(self) -> Any: ...
    @property
    def head(self) -> Any: ...


class Event(NamedTuple):
    """What a round brought one request. The token that prefill drew comes alone, with `from_round` False."""

    handle: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None  # "stop" | "length"
    from_round: bool = True
    accepted: int = 0  # r: proposals that the round committed, before any trimming
    proposed: int = 0  # proposals that the target looked at
    text: str = ""  # where the engine knows a tokenizer and the request has stop strings
    by_id: bool = False  # the last token is a stop or end-of-sequence id
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's second token and on, with the first token


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log probability of an id under the raw logits, its rank (1 is the best), and the best ids with theirs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class RoundTrace:
    """A recorded round of one request: the whole proposal, and what the target said at each verified row."""

    handle: int
    accepted: int
    verified: int
    arrays: dict[str, np.ndarray]


@dataclasses.dataclass
class _Request:
    handle: int
    params: SamplingParams
    prompt_tokens: int
    stops: frozenset[int]
    emitted: list[int]


class SlotCounts:
    """What a holder of slots says of itself."""

    program: Any
    _slots: list[Any]
    _pending: collections.deque[Event]

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.program.max_context

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


class SlotRunner(SlotCounts):
    """`num_slots` requests side by side, each up to `max_context` tokens of prompt and answer.

    Not thread-safe: one thread owns it. Every device value is reached through the two executables and `np.asarray`.
    Construction raises ConfigError for an option out of range and for a drafter that was made for another target.
    `debug` runs the same programs with their indices, ids and invariants checked (`jaxspec.decoding.debug`).
    """

    def __init__(
        self,
        target: TargetLike,
        draft: DraftLike | None = None,
        *,
        num_slots: int = 8,
        max_context: int = 2048,
        prefill_chunk: int = 64,
        page_size: int = 16,
        acceptance: str = "ratio",
        confidence_threshold: float = 0.0,
        num_proposals: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        observe: Callable[[RoundTrace], None] | None = None,
        cache_fill: float = 0.0,
        debug: bool = False,
    ):
        sizes = {
            "num_slots": num_slots,
            "max_context": max_context,
            "prefill_chunk": prefill_chunk,
            "page_size": page_size,
        }
        check_sizes(sizes)
        decoder = target.model
        max_context = min(max_context, decoder.config.max_position)
        drafter = draft.drafter if draft is not None else NoDrafter(decoder.config.vocab_size)
        decoder.check_taps(drafter.taps)
        eos = tuple(decoder.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        check_options(acceptance, confidence_threshold, eos, decoder.config.vocab_size)
        if draft is not None:
            check_draft(draft, decoder.config, decoder.embedding(target.params).shape[-1])
        check_proposals(drafter, num_proposals, acceptance)
        shared = shared_tables(target, draft)
        build = checks.DebugProgram if debug else Program
        watched: Any = checks.Watched(drafter, decoder.config.vocab_size) if debug else drafter
        self.program = build(
            decoder,
            watched,
            max_context,
            num_slots,
            page_size,
            acceptance=acceptance,
            confidence_threshold=confidence_threshold,
            num_proposals=num_proposals,
            stacked=not isinstance(target.params["model"]["layers"], list),
            record=observe is not None,
        )
        self.weights = Weights(target.params, draft.params if draft is not None else {}, shared)
        self.prefill_chunk = prefill_chunk
        self._eos = frozenset(eos)
        self._observe = observe
        self._debug = debug
        self._place = _whole(shared.embedding)
        dtype = shared.embedding.dtype
        begin = jax.jit(lambda: self.program.init_state(dtype, cache_fill), out_shardings=self._place)
        self._state = begin()
        self._slots: list[_Request | None] = [None] * num_slots
        self._pending: collections.deque[Event] = collections.deque()
        self._handles = 0
        self._round: Any = None
        self._prefill: Any = None
        self._compilations = CompilationCounter()

    # -- start-up -----------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[str, float], None] | None = None) -> list[tuple[str, float]]:
        """Compiles both executables; returns their names and seconds. Called by the first `admit` if it was not
        before.
        """
        if self._round is not None:
            return []
        times = []
        for name, build in (("prefill", self._compile_prefill), ("round", self._compile_round)):
            started = time.perf_counter()
            build()
            times.append((name, time.perf_counter() - started))
            if progress is not None:
                progress(*times[-1])
        self._run_empty()
        self._compilations.reset()
        return times

    def _compile_prefill(self) -> None:
        step = self._jit(self.program.prefill)
        example = self._chunk([0], 0, 1, 0, False, SamplingParams(), 0, (0, 0))
        self._prefill = step.lower(self.weights, self._state, example).compile()

    def _compile_round(self) -> None:
        step = self._jit(self.program.round)
        self._round = step.lower(self.weights, self._state, self._alive()).compile()

    def _jit(self, function: Callable[..., Any]) -> Any:
        out = self._place if isinstance(self._place, jax.sharding.NamedSharding) else None  # the next call's input
        return jax.jit(checks.checked(function) if self._debug else function, donate_argnums=1, out_shardings=out)

    def _run(self, executable: Any, inputs: Any) -> Any:
        """Replaces the state (the old one was donated) and returns the call's output."""
        out = executable(self.weights, self._state, inputs)
        error, (self._state, output) = out if self._debug else (None, out)
        if error is not None:
            checks.throw(error)
        return output

    def _run_empty(self) -> None:
        """An empty chunk and a round over no request: whatever is set up lazily is set up here, not under a user."""
        token = self._run(self._prefill, self._chunk([0], 0, 0, 0, False, SamplingParams(), 0, (0, 0)))
        jax.block_until_ready((token, self._run(self._round, self._alive())))

    @property
    def compile_count(self) -> int:
        """Backend compilations of this process since warm-up; 0 unless something went wrong."""
        return self._compilations.count

    def replace_draft(self, params: Any) -> None:
        """Other weights for the same drafter (an evaluation inside a training run)."""
        self.weights = dataclasses.replace(self.weights, draft=params)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_proposals(self) -> int:
        """m, as served."""
        return self.program.num_proposals or self.program.drafter.num_proposals

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError if this request can never be served."""
        params.validate(self.vocab_size)
        if not params.plain:
            raise RequestError(
                "sampling: found penalties, bias, min tokens, stop strings or log probabilities, expected none of them "
                "outside the serving engine"
            )
        validate_prompt(prompt, self.vocab_size, self.max_context)

    def admit(self, prompt: Sequence[int], params: SamplingParams, sample: int = 0) -> int:
        """Prefills a request into a free slot and returns its handle; its first token is in the next `step`.

        `sample` numbers the answers to one request, so that they differ under one seed. Raises RequestError for a
        request that does not fit, and when no slot is free.
        """
        self.check(prompt, params)
        if not self.free_slots:
            raise RequestError(
                f"slots: all {self.num_slots} are taken, expected a free one; wait for a request to finish"
            )
        self.warm_up()
        self._handles += 1
        handle = self._handles
        if params.max_new_tokens == 0:
            self._pending.append(Event(handle, (), "length", from_round=False))
            return handle
        slot = self._slots.index(None)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        words = (seed & 0xFFFFFFFF, seed >> 32)
        token = None
        for start in range(0, len(prompt), self.prefill_chunk):
            piece = list(prompt[start : start + self.prefill_chunk + 1])
            count = min(len(prompt) - start, self.prefill_chunk)
            final = start + count == len(prompt)
            chunk = self._chunk(piece, start, count, slot, final, params, handle, words, sample)
            token = self._run(self._prefill, chunk)
        request = _Request(handle, params, len(prompt), self._stops(params), [])
        self._slots[slot] = request
        self._emit(slot, [int(np.asarray(token))], from_round=False)
        return handle

    def step(self) -> list[Event]:
        """One round for all requests. Returns the events since the last step, first tokens first."""
        if any(self._slots):
            self._read(self._run(self._round, self._alive()))
        events = list(self._pending)
        self._pending.clear()
        return events

    def cancel(self, handle: int) -> None:
        """Frees the request's slot; nothing more is reported of it. Unknown or finished handles are ignored."""
        for slot, request in enumerate(self._slots):
            if request is not None and request.handle == handle:
                self._slots[slot] = None
        self._pending = collections.deque(event for event in self._pending if event.handle != handle)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self, output: Any) -> None:
        out = jax.tree.map(np.asarray, output)
        for slot, request in enumerate(self._slots):
            if request is None or out.generations[slot] != _generation(request.handle):
                continue
            count = int(out.counts[slot])
            if self._observe is not None and count:
                arrays = {name: values[slot] for name, values in out.trace.items()}
                self._observe(RoundTrace(request.handle, count - 1, int(out.verified[slot]), arrays))
            accepted, proposed = max(count - 1, 0), int(out.verified[slot])
            self._emit(slot, out.tokens[slot, :count].tolist(), accepted=accepted, proposed=proposed)

        if self._debug:
            self._check_lengths()

    def _check_lengths(self) -> None:
        positions = np.asarray(self._state.slots.positions)
        for slot, request in enumerate(self._slots):
            if request is not None:
                checks.check_lengths(slot, int(positions[slot]), request.prompt_tokens, len(request.emitted))

    def _emit(self, slot: int, tokens: list[int], **about: Any) -> None:
        """Trims at the first stop token or limit, reports, and frees the slot of a finished request."""
        request = self._slots[slot]
        assert request is not None
        room = min(request.params.max_new_tokens, self.max_context - request.prompt_tokens) - len(request.emitted)
        kept: list[int] = []
        reason = None
        for token in tokens[:room]:
            kept.append(token)
            if token in request.stops:
                reason = "stop"
                break
        if reason is None and len(kept) == room:
            reason = "length"
        request.emitted += kept
        if reason is not None:
            self._slots[slot] = None
        self._pending.append(Event(request.handle, tuple(kept), reason, **about))

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)

    def _alive(self) -> jax.Array:
        return self._put(np.array([request is not None for request in self._slots], bool))

    def _chunk(
        self,
        piece: list[int],
        start: int,
        count: int,
        slot: int,
        final: bool,
        params: SamplingParams,
        handle: int,
        seed: tuple[int, int],
        sample: int = 0,
    ) -> PrefillInput:
        """`piece` holds the chunk's tokens and, where there is one, the token after them."""
        rows = np.zeros(self.prefill_chunk + 1, np.int32)
        rows[: len(piece)] = piece
        number = lambda value, dtype=np.int32: np.array(value, dtype)  # noqa: E731
        row = lambda value, dtype=np.float32: np.array([value], dtype)  # noqa: E731
        chunk = PrefillInput(
            tokens=rows[:-1],
            next_tokens=rows[1:],
            start=number(start),
            count=number(count),
            slot=number(slot),
            final=number(final, bool),
            generation=number(_generation(handle)),
            seed=number(seed, np.uint32),
            sample=number(sample),
            sampling=SlotSampling(
                row(params.temperature),
                row(min(params.top_k, self.vocab_size), np.int32),
                row(params.top_p),
                row(params.min_p),
            ),
        )
        return jax.tree.map(self._put, chunk)

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, self._place)


def _whole(table: jax.Array) -> jax.sharding.Sharding:
    """Where what is not split lies: the device of the weights, or each device of the mesh that they are spread over."""
    if isinstance(table.sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(table.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.sharding.SingleDeviceSharding(next(iter(table.devices())))


def _generation(handle: int) -> int:
    """Handles never repeat; their low 31 bits fit the device's int32."""
    return handle & 0x7FFFFFFF
