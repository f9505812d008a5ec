"""The debug build of the round: every gather and scatter in bounds, every id in range, and the loop's invariants.

JAX clamps or wraps an index that is out of range, so a fault here does not crash: it answers for somebody else. The
debug build runs the very same functions under checkify and stops with an InvariantError instead. It costs time and
memory, and a runner that raised is done for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.decoding.acceptance import Acceptance
from jaxspec.decoding.round import DecodeState, PrefillInput, Program, RoundOutput, Weights
from jaxspec.drafters.base import Drafter, DraftSampling, Proposal, Rows, Shared, Slots
from jaxspec.errors import InvariantError
from jaxspec.models.cache import TRASH_PAGE, KVPool
from jaxspec.models.decoder import Tap
from jaxspec.models.layout import RaggedLayout

Checked = Callable[..., tuple[checkify.Error, Any]]


def checked(function: Callable[..., Any]) -> Checked:
    """`function` with index checks and this module's own; it returns (error, out)."""
    return checkify.checkify(function, errors=checkify.index_checks | checkify.user_checks)


def throw(error: checkify.Error) -> None:
    """Raises InvariantError if the checked call found anything."""
    message = error.get()
    if message:
        raise InvariantError(f"debug build: {message}")


def check_lengths(slot: int, positions: int, prompt_tokens: int, emitted: int) -> None:
    """The target's K/V hold every committed token but the anchor. Raises InvariantError."""
    if positions != prompt_tokens + emitted - 1:
        raise InvariantError(
            f"debug build: slot {slot}: the target's K/V hold {positions} rows, expected {prompt_tokens + emitted - 1}: "
            f"{prompt_tokens} tokens of prompt and {emitted} of answer, less the anchor"
        )


def check_ids(name: str, ids: Int[Array, "*n"], vocab: int) -> None:
    """Padding included: an id that is not used must still be a real one."""
    wrong = (ids < 0) | (ids >= vocab)
    first = ids.reshape(-1)[jnp.argmax(wrong.reshape(-1))] if ids.size else jnp.int32(0)
    checkify.check(~jnp.any(wrong), f"{name}: found id {{found}}, expected 0 <= id < vocab_size = {vocab}", found=first)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedState:
    """A drafter's state, and which cache slots were committed to it."""

    inner: Any
    written: Bool[Array, "pages page"]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A drafter whose commits are recorded: they must come in order, without holes, and only of committed rows."""

    inner: Drafter
    vocab: int

    @property
    def method(self) -> str:
        """The inner drafter's."""
        return self.inner.method

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The inner drafter's."""
        return self.inner.taps

    @property
    def num_proposals(self) -> int:
        """The inner drafter's."""
        return self.inner.num_proposals

    @property
    def tree_nodes(self) -> int:
        """The inner drafter's."""
        return self.inner.tree_nodes

    @property
    def tree_acceptance(self) -> str:
        """The inner drafter's."""
        return self.inner.tree_acceptance

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> WatchedState:
        """Nothing committed yet."""
        inner = self.inner.init_state(num_pages, page_size, dtype, num_slots)
        return WatchedState(inner, jnp.zeros((num_pages, page_size), bool))

    def commit(
        self, params: Any, shared: Shared, state: WatchedState, rows: Rows, layout: RaggedLayout
    ) -> WatchedState:
        """Checks ids and order, then commits. A segment that begins at slot 0 is a new request and clears its pages."""
        check_ids("commit: tokens", rows.tokens, self.vocab)
        check_ids("commit: next tokens", rows.next_tokens, self.vocab)
        first = layout.slots[jnp.clip(layout.starts, 0, layout.slots.shape[0] - 1)]
        anew = (layout.lengths > 0) & (first == 0)
        pages = jnp.where(anew[:, None], layout.page_table, TRASH_PAGE)
        written = state.written.at[pages].set(False)
        held = context_lengths(written, layout.page_table)
        checkify.check(
            jnp.all((layout.lengths == 0) | (first == held)),
            "commit: rows begin at slots {first}, expected the drafter's context lengths {held}",
            first=first,
            held=held,
        )
        page_size = written.shape[1]
        page = jnp.where(layout.valid, layout.page_table[layout.requests, layout.slots // page_size], TRASH_PAGE)
        written = written.at[page, layout.slots % page_size].set(True)
        inner = self.inner.commit(params, shared, state.inner, rows, layout)
        return WatchedState(inner, written.at[TRASH_PAGE].set(False))

    def propose(
        self,
        params: Any,
        shared: Shared,
        state: WatchedState,
        slots: Slots,
        keys: Key[Array, "R"],
        sampling: DraftSampling,
    ) -> Proposal:
        """Checks what is fed and what comes back, and that the context is the target's history, no row more or less."""
        check_ids("propose: anchors", slots.anchors, self.vocab)
        held = context_lengths(state.written, slots.page_table)
        checkify.check(
            jnp.all(~slots.live | (held == slots.positions)),
            "propose: the drafter's context holds {held} rows, expected the target's {positions}",
            held=held,
            positions=slots.positions,
        )
        proposal = self.inner.propose(params, shared, state.inner, slots, keys, sampling)
        check_ids("propose: proposed tokens", proposal.tokens, self.vocab)
        return proposal


def context_lengths(written: Bool[Array, "pages page"], page_table: Int[Array, "R P"]) -> Int[Array, "R"]:
    """Rows of each request's context; -1 where they have a hole."""
    rows = written[page_table].reshape(page_table.shape[0], -1)
    count = jnp.sum(rows, axis=1)
    whole = jnp.all(rows == (jnp.arange(rows.shape[1]) < count[:, None]), axis=1)
    return jnp.where(whole, count, -1)


@dataclasses.dataclass(frozen=True)
class DebugProgram(Program):
    """The round and the prefill with their invariants checked; `drafter` is a `Watched` one."""

    def init_state(self, dtype: Any, fill: float = 0.0) -> DecodeState:
        """As in the served build; `fill` does not touch the record of what was written."""
        state = super().init_state(dtype, fill)
        return dataclasses.replace(
            state, draft=dataclasses.replace(state.draft, written=jnp.zeros_like(state.draft.written))
        )

    def verify(
        self, weights: Weights, state: DecodeState, proposal: Proposal, lengths: Int[Array, "R"]
    ) -> tuple[Float[Array, "R m1 V"], Float[Array, "M TH"], list[KVPool], RaggedLayout]:
        """Rows stand in their own pages, below the limit."""
        out = super().verify(weights, state, proposal, lengths)
        self._check_layout(out[-1])
        return out

    def commit(
        self,
        weights: Weights,
        state: DecodeState,
        proposal: Proposal,
        accepted: Acceptance,
        features: Float[Array, "M TH"],
        target: list[KVPool],
        layout: RaggedLayout,
    ) -> DecodeState:
        """r + 1 feature rows reach the drafter, and both histories grow by as many."""
        check_ids("accept: last tokens", accepted.token, self.decoder.config.vocab_size)
        after = super().commit(weights, state, proposal, accepted, features, target, layout)
        slots = state.slots
        grown = context_lengths(after.draft.written, slots.page_table) - slots.positions
        checkify.check(
            jnp.all(~slots.live | (grown == accepted.accepted + 1)),
            "commit: {grown} feature rows, expected r + 1 with r = {accepted}",
            grown=grown,
            accepted=accepted.accepted,
        )
        checkify.check(
            jnp.all(after.slots.positions < self.max_context),
            "commit: positions {positions}, expected all below the limit",
            positions=after.slots.positions,
        )
        return after

    def round(self, weights: Weights, state: DecodeState, alive: Bool[Array, "R"]) -> tuple[DecodeState, RoundOutput]:
        """See `Program.round`."""
        self._check_pages(state)
        return super().round(weights, state, alive)

    def prefill(self, weights: Weights, state: DecodeState, chunk: PrefillInput) -> tuple[DecodeState, Int[Array, ""]]:
        """See `Program.prefill`."""
        self._check_pages(state)
        check_ids("prefill: tokens", chunk.tokens, self.decoder.config.vocab_size)
        end = chunk.start + chunk.count
        checkify.check(
            (chunk.slot >= 0) & (chunk.slot < self.num_slots) & (chunk.start >= 0) & (end <= self.max_context),
            "prefill: rows {start} to {end} of slot {slot}, expected them inside the context of a slot",
            start=chunk.start,
            end=end,
            slot=chunk.slot,
        )
        return super().prefill(weights, state, chunk)

    def _check_layout(self, layout: RaggedLayout) -> None:
        checkify.check(
            jnp.all(
                ~layout.valid | ((layout.slots >= 0) & (layout.slots < self.max_context + self.drafter.tree_nodes))
            ),
            "verify: rows at slots {slots}, expected all below the limit",
            slots=layout.slots,
        )

    def _check_pages(self, state: DecodeState) -> None:
        table = state.slots.page_table
        owned = jnp.sort(table.reshape(-1))
        checkify.check(
            jnp.all(table != TRASH_PAGE) & jnp.all(owned[1:] != owned[:-1]),
            "page table: found {table}, expected distinct pages and none of them the trash page 0",
            table=table,
        )
