"""The server's round: verification, plain decoding and prefill chunks in one target forward of a fixed size.

The host says who takes part, on which pages and with what budget; the device alone knows anchors and positions, so that
a round can be dispatched before the one before it was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxspec.decoding.logprobs import Logprobs, logprobs
from jaxspec.decoding.plan import Schedule, allocate
from jaxspec.decoding.processors import SlotRules, unpack_mask
from jaxspec.decoding.round import DecodeState, Program, SlotState, Weights
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Point, Proposal, Rows
from jaxspec.drafters.draws import Purpose, inverse_cdf, round_keys, uniforms
from jaxspec.models.attention import PagedParts
from jaxspec.models.decoder import DecoderOutput
from jaxspec.models.layout import RaggedLayout, ragged_layout
from jaxspec.parallel.rules import anywhere


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """What rounds hand on: the newest token of each slot, where it stands, and the pools."""

    anchors: Int[Array, "slots"]
    positions: Int[Array, "slots"]
    target: Any
    draft: Any
    history: SlotRules | None = None  # what penalties look at; its rules are the host's, one round after the other


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillRows:
    """Pieces of up to S prompts, one behind the other in C rows. A piece of 0 rows is padding and names no slot (an
    index behind the last)."""

    tokens: Int[Array, "C"]
    next_tokens: Int[Array, "C"]  # meaningless at a prompt's last row
    slots: Int[Array, "S"]
    starts: Int[Array, "S"]
    counts: Int[Array, "S"]
    final: Bool[Array, "S"]  # the prompt ends here: its first token is drawn
    forced: Int[Array, "S"]  # that token, where a preempted request has it already; -1 where it is drawn
    fresh: Bool[Array, "S"]  # the request's first piece: what was known of the slot's history is another's
    answers: Bool[Array, "C"]  # rows of the answer so far, which a preempted request runs again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """`SlotRules` without its history."""

    repetition: Float[Array, "R"]
    presence: Float[Array, "R"]
    frequency: Float[Array, "R"]
    min_tokens: Int[Array, "R"]
    bias_ids: Int[Array, "R B"]
    bias: Float[Array, "R B"]
    ends: Int[Array, "R E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundInput:
    """The host's part of a round, over the first R slots."""

    decoding: Bool[Array, "R"]
    page_table: Int[Array, "R P"]
    limits: Int[Array, "R"]  # rows at and past it have no page: never written
    proposals: Int[Array, "R"]  # most proposals that are verified
    pinned: Bool[Array, "R"]  # verified in full, whatever the budget
    budget: Int[Array, ""]  # proposals over all requests
    seeds: UInt32[Array, "R 2"]  # low and high word
    samples: Int[Array, "R"]
    sampling: SlotSampling
    logprobs: Bool[Array, "R"] | None  # whether the request wants them; None: nobody does
    confidence: Float[Array, "R m"] | None = None  # observed, for methods that have none (with a schedule)
    rules: Rules | None = None  # None: nobody has any, and no history is kept
    prefill: PrefillRows | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedOutput:
    """What a round says. Its `words` go to the host in one piece, for `read`."""

    words: Int[Array, "n"]
    confidence: Float[Array, "slots m"] | None  # None where the method has none, or nobody plans by it
    logprobs: Logprobs | None = None  # of the new tokens; zeros unless a request wants them
    first_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # row i of C: of the prompt's token behind it


@dataclasses.dataclass(frozen=True)
class Results:
    """New tokens of each request, the first `counts` of `tokens`, and the first token of each prompt that ended.

    A `counts` of 0 for a decoding request says that its pages have no room for another token.
    """

    tokens: Int[Any, "R m1"]
    counts: Int[Any, "R"]
    verified: Int[Any, "R"]  # proposals that the target looked at
    first: Int[Any, "S"]

    @staticmethod
    def size(requests: int, width: int, pieces: int) -> int:
        """Words of R requests, `width` = m + 1 and S pieces."""
        return requests * (width + 2) + pieces

    def pack(self) -> Int[Array, "n"]:
        """As one array."""
        parts = (self.tokens, self.counts, self.verified, self.first)
        return jnp.concatenate([part.astype(jnp.int32).reshape(-1) for part in parts])

    @classmethod
    def read(cls, words: np.ndarray, requests: int, width: int) -> Results:
        """What was packed of R requests and `width` = m + 1."""
        ends = np.cumsum([requests * width, requests, requests])
        tokens, counts, verified, first = np.split(words, ends)
        return cls(tokens.reshape(requests, width), counts, verified, first)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """A round between the target's forward and acceptance."""

    proposal: Proposal
    lengths: Int[Array, "R"]
    layout: RaggedLayout
    pieces: RaggedLayout | None
    hidden: Float[Array, "rows H"]  # verification's rows, and behind them prefill's
    features: Float[Array, "rows TH"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
    """Packed masks (`jaxspec.decoding.processors.unpack_mask`) of each row of a block, and of each prompt's end; all
    bits set where nothing is asked."""

    rows: Int[Array, "R m1 W"]
    first: Int[Array, "S W"]


@dataclasses.dataclass(frozen=True)
class RaggedProgram(Program):
    """`Program` for requests that come and go in one forward. `schedule` spreads a budget over proposals by their
    confidence; without it, or without a confidence, each request verifies its own `proposals`."""

    schedule: Schedule | None = None
    rules: bool = False  # penalties, bias and min tokens can be asked for
    max_logprobs: int | None = None  # ids beside the chosen one; None: log probabilities cannot be asked for

    def init_engine_state(self, num_pages: int, dtype: Any, fill: float = 0.0) -> EngineState:
        """All slots empty; pools of `num_pages` pages, the trash page among them."""
        target, draft = self.init_pools(num_pages, dtype, fill)
        zeros = jnp.zeros(self.num_slots, jnp.int32)
        history = SlotRules.empty(self.num_slots, self.decoder.config.vocab_size) if self.rules else None
        return EngineState(zeros, zeros, target, draft, history)

    def ragged_round(
        self, weights: Weights, state: EngineState, inputs: RoundInput, *, rows: int, drafting: bool
    ) -> tuple[EngineState, RaggedOutput]:
        """One round. `rows` (static) hold anchors and kept proposals: the host sees to it that they fit. Without
        `drafting` nothing is proposed, and the drafter's context still grows."""
        state, pending = self.begin(weights, state, inputs, rows=rows, drafting=drafting)
        return self.finish(weights, state, pending, inputs)

    def begin(
        self, weights: Weights, state: EngineState, inputs: RoundInput, *, rows: int, drafting: bool
    ) -> tuple[EngineState, Pending]:
        """The first half of a round, whose proposals a host may read while the target runs, to build its masks."""
        view = self._view(state, inputs)
        keys = round_keys(view.slots.keys, view.slots.samples, view.slots.positions)
        proposal = self.propose(weights, view, keys) if drafting else self._nothing(view)
        lengths = self._lengths(view, proposal, inputs)
        flat, layout = self.verify_rows(view, proposal, lengths, rows)
        pieces, out = self._forward(weights, state, inputs, flat, layout)
        state = dataclasses.replace(state, target=out.caches)
        proposal = dataclasses.replace(proposal, trace=None)
        return state, Pending(proposal, lengths, layout, pieces, out.hidden, out.features)

    def finish(
        self, weights: Weights, state: EngineState, pending: Pending, inputs: RoundInput, masks: Masks | None = None
    ) -> tuple[EngineState, RaggedOutput]:
        """The second half: acceptance, under a grammar's masks where there are any, and commit."""
        proposal, lengths, layout = pending.proposal, pending.lengths, pending.layout
        view = self._view(state, inputs)
        keys = round_keys(view.slots.keys, view.slots.samples, view.slots.positions)
        rows = layout.positions.shape[0]
        logits = self.decoder.logits(weights.target, pending.hidden[:rows])[layout.grid()[0]]
        rules = self._rules(state, inputs)
        processed = logits
        if rules is not None:
            before = layout.ancestors()[:, :, 1:] if layout.tree else None
            allowed = None if masks is None else unpack_mask(masks.rows[:, : logits.shape[1]], logits.shape[-1])
            processed = rules.apply(logits, proposal.tokens, view.slots.live, allowed, before)
        accepted = self.accept(view, proposal, processed, lengths, keys)
        counts = jnp.where(view.slots.live, accepted.accepted + 1, 0)
        tokens = accepted.tokens(proposal)
        after = self.commit(weights, view, proposal, accepted, pending.features[:rows], state.target, layout)
        requests, m = inputs.decoding.shape[0], self.proposals
        put = lambda whole, part: whole.at[:requests].set(part)  # noqa: E731
        if rules is not None:
            rules = rules.note_emitted(tokens, counts)
        state = EngineState(
            put(state.anchors, after.slots.anchors),
            put(state.positions, after.slots.positions),
            after.target,
            after.draft,
            state.history if rules is None else jax.tree.map(put, state.history, rules),
        )
        if accepted.path is not None:  # log probabilities follow the accepted path
            path = jnp.pad(accepted.path, ((0, 0), (1, 0)))
            logits = jnp.take_along_axis(logits, path[..., None], axis=1)
        wanted = None if inputs.logprobs is None else jnp.any(inputs.logprobs)
        values = self._logprobs(wanted, lambda: (logits, tokens), tokens.shape)
        start = Started(state, jnp.zeros(0, jnp.int32))
        if inputs.prefill is not None and pending.pieces is not None:
            start = self._start(weights, state, view, inputs, inputs.prefill, pending, masks)
        confidence = None if self.schedule is None else proposal.confidence
        if confidence is not None:
            confidence = jnp.pad(confidence.astype(jnp.float32), ((0, self.num_slots - requests), (0, 0)))
        results = Results(_widen(tokens, m + 1), counts, jnp.where(view.slots.live, lengths, 0), start.tokens)
        return start.state, RaggedOutput(
            words=results.pack(),
            confidence=confidence,
            logprobs=values,
            first_logprobs=start.logprobs,
            prompt_logprobs=start.prompt_logprobs,
        )

    @property
    def proposals(self) -> int:
        """m: the depth of a tree."""
        return self.drafter.num_proposals if self.num_proposals is None else self.num_proposals

    # -- inside -------------------------------------------------------------------------------------------------------

    def _view(self, state: EngineState, inputs: RoundInput) -> DecodeState:
        """The requests of this round as the five functions know them."""
        requests = inputs.decoding.shape[0]
        positions = state.positions[:requests]
        slots = SlotState(
            anchors=state.anchors[:requests],
            positions=positions,
            live=inputs.decoding & (positions < inputs.limits - 1),
            generations=jnp.zeros(requests, jnp.int32),
            keys=_request_keys(inputs.seeds),
            samples=inputs.samples,
            sampling=inputs.sampling,
            page_table=inputs.page_table,
        )
        return DecodeState(slots, state.target, state.draft)

    def _nothing(self, view: DecodeState) -> Proposal:
        empty = jnp.zeros((view.slots.anchors.shape[0], 0), jnp.int32)
        return Proposal(empty, Point(empty, self.decoder.config.vocab_size))

    def _lengths(self, view: DecodeState, proposal: Proposal, inputs: RoundInput) -> Int[Array, "R"]:
        """Proposals that are verified: what the request may have and its pages hold, by survival under a budget."""
        most = jnp.minimum(self.plan(view, proposal, inputs.limits), inputs.proposals)
        if self.schedule is None or not proposal.tokens.shape[1] or proposal.tree is not None:
            return most
        confidence = inputs.confidence if proposal.confidence is None else proposal.confidence
        assert confidence is not None
        rows = allocate(confidence, inputs.budget, self.schedule, view.slots.live, most, inputs.pinned)
        return jnp.maximum(rows - 1, 0)

    def _forward(
        self, weights: Weights, state: EngineState, inputs: RoundInput, flat: Int[Array, "M"], layout: RaggedLayout
    ) -> tuple[RaggedLayout | None, DecoderOutput]:
        """Verification and prefill through the target together."""
        prefill, pieces = inputs.prefill, None
        layouts: tuple[RaggedLayout, ...] = (layout,)
        positions = layout.positions
        if prefill is not None:
            size = prefill.tokens.shape[0]
            table = inputs.page_table.at[prefill.slots].get(mode="clip")
            pieces = ragged_layout(prefill.starts, prefill.counts, table, size, size)
            pieces = dataclasses.replace(pieces, owners=prefill.slots)
            flat = jnp.concatenate([flat, jnp.where(pieces.valid, prefill.tokens, 0)])
            layouts, positions = (layout, pieces), jnp.concatenate([positions, pieces.positions])
        attention = PagedParts(layouts, self.attention)
        out = self.decoder.forward(weights.target, flat, positions, attention, state.target, self.drafter.taps)
        return pieces, out

    def _start(
        self,
        weights: Weights,
        state: EngineState,
        view: DecodeState,
        inputs: RoundInput,
        prefill: PrefillRows,
        pending: Pending,
        masks: Masks | None,
    ) -> Started:
        """The prompts' rows enter the drafter's context; a prompt that ends gets its first token, as its anchor."""
        begin, pieces = pending.layout.positions.shape[0], pending.pieces
        assert pieces is not None
        hidden, features = pending.hidden[begin:], pending.features[begin:]
        end = prefill.starts + prefill.counts
        at = jnp.clip(pieces.starts + prefill.counts - 1, 0, prefill.tokens.shape[0] - 1)
        of = lambda x: x.at[prefill.slots].get(mode="clip")  # noqa: E731
        logits = self.decoder.logits(weights.target, hidden[at])
        ends = prefill.final & (prefill.counts > 0)
        processed, history = logits, state.history
        if history is not None and inputs.rules is not None:
            history = _note_prompt(history, prefill, pieces)
            rules = jax.tree.map(of, self._with(history, inputs))
            nothing = jnp.zeros((prefill.slots.shape[0], 0), jnp.int32)
            allowed = None if masks is None else unpack_mask(masks.first[:, None], logits.shape[-1])
            processed = rules.apply(logits[:, None], nothing, ends, allowed)[:, 0]
        probs = jax.tree.map(of, view.slots.sampling).probabilities(processed)
        keys = round_keys(of(view.slots.keys), of(view.slots.samples), end - 1)
        drawn = inverse_cdf(probs, uniforms(keys, end[:, None], Purpose.TARGET)[:, 0])
        first = jnp.where(prefill.forced >= 0, prefill.forced, drawn)
        row = jnp.arange(prefill.tokens.shape[0])
        newest = ends[pieces.requests] & (row == at[pieces.requests])
        following = jnp.where(newest, first[pieces.requests], prefill.next_tokens)
        draft = self.drafter.commit(
            weights.draft, weights.shared, state.draft, Rows(features, prefill.tokens, following), pieces
        )
        put = lambda whole, part: whole.at[prefill.slots].set(part, mode="drop")  # noqa: E731
        if history is not None and inputs.rules is not None:
            counts = history.counts.at[prefill.slots, first].add(ends.astype(jnp.int32), mode="drop")
            emitted = history.emitted.at[prefill.slots].add(ends.astype(jnp.int32), mode="drop")
            history = dataclasses.replace(history, counts=counts, emitted=emitted)
        wanted = None if inputs.logprobs is None else jnp.any(of(inputs.logprobs) & (prefill.counts > 0))
        rows_of_prompt = lambda: (self.decoder.logits(weights.target, hidden), following)  # noqa: E731
        return Started(
            EngineState(put(state.anchors, first), put(state.positions, end), state.target, draft, history),
            first,
            self._logprobs(wanted, lambda: (logits, first), first.shape),
            self._logprobs(wanted, rows_of_prompt, following.shape),
        )

    def _with(self, history: SlotRules, inputs: RoundInput) -> SlotRules:
        """The host's rules and the history of the first R slots."""
        assert inputs.rules is not None
        own = {field.name: getattr(inputs.rules, field.name) for field in dataclasses.fields(Rules)}
        seen = {name: getattr(history, name)[: inputs.decoding.shape[0]] for name in ("emitted", "counts", "prompt")}
        return SlotRules(**own, **seen)

    def _rules(self, state: EngineState, inputs: RoundInput) -> SlotRules | None:
        return None if state.history is None or inputs.rules is None else self._with(state.history, inputs)

    def _logprobs(
        self, wanted: Bool[Array, ""] | None, rows: Callable[[], tuple[Array, Array]], shape: tuple[int, ...]
    ) -> Logprobs | None:
        """Of raw logits and the tokens behind them, computed only if somebody wants them."""
        top = self.max_logprobs
        if top is None or wanted is None:
            return None

        def nothing() -> Logprobs:
            zeros = lambda dtype, *more: jnp.zeros((*shape, *more), dtype)  # noqa: E731
            return Logprobs(zeros(jnp.float32), zeros(jnp.int32), zeros(jnp.int32, top), zeros(jnp.float32, top))

        return jax.lax.cond(anywhere(wanted), lambda: logprobs(*rows(), top), nothing)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Started:
    """What a round's prefill brought."""

    state: EngineState
    tokens: Int[Array, "S"]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


def _note_prompt(history: SlotRules, prefill: PrefillRows, pieces: RaggedLayout) -> SlotRules:
    """The pieces' tokens become their slots' history; a fresh request's begins empty."""
    nobody = history.emitted.shape[0]
    anew = jnp.where(prefill.fresh & (prefill.counts > 0), prefill.slots, nobody)
    owner = jnp.where(pieces.valid, prefill.slots[pieces.requests], nobody)
    answers = prefill.answers.astype(jnp.int32)
    clear = lambda x: x.at[anew].set(jnp.zeros((), x.dtype), mode="drop")  # noqa: E731
    return dataclasses.replace(
        history,
        emitted=clear(history.emitted).at[owner].add(answers, mode="drop"),
        counts=clear(history.counts).at[owner, prefill.tokens].add(answers, mode="drop"),
        prompt=clear(history.prompt).at[owner, prefill.tokens].max(~prefill.answers, mode="drop"),
    )


def _request_keys(seeds: UInt32[Array, "R 2"]) -> Key[Array, "R"]:
    """A request's key from the two words of its seed."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed[0]), seed[1]))(seeds)


def _widen(values: Array, columns: int) -> Array:
    """Zeros appended up to `columns`."""
    return jnp.pad(values, ((0, 0), (0, columns - values.shape[1])))
