"""One round, propose -> plan -> verify -> accept -> commit, and the prefill that starts a request.

Both are pure functions of (weights, state, inputs) with donated state. Static choices live in `Program`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxspec.decoding.acceptance import Acceptance, accept
from jaxspec.decoding.plan import confident_nodes, verify_lengths
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.decoding.trees import accept_tree, compact, tree_layout
from jaxspec.drafters.base import Drafter, Proposal, Rows, Shared, Slots, first_proposals
from jaxspec.drafters.draws import Purpose, inverse_cdf, round_keys, uniforms
from jaxspec.errors import ConfigError
from jaxspec.models.attention import PagedCausal
from jaxspec.models.cache import KVPool, init_pool
from jaxspec.models.decoder import Decoder
from jaxspec.models.layout import RaggedLayout, keep_rows, ragged_layout, uniform_layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of the pair; `shared` refers to the target's tables unless the drafter's checkpoint has its own."""

    target: Any
    draft: Any
    shared: Shared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Requests on the slots. Target and drafter hold exactly `positions` committed rows; the anchor has none yet."""

    anchors: Int[Array, "R"]
    positions: Int[Array, "R"]
    live: Bool[Array, "R"]
    generations: Int[Array, "R"]
    keys: Key[Array, "R"]
    samples: Int[Array, "R"]
    sampling: SlotSampling
    page_table: Int[Array, "R P"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a round reads and replaces."""

    slots: SlotState
    target: Any  # one KVPool a layer, or one array of all
    draft: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundOutput:
    """New tokens of each slot: the first `counts` of `tokens` (0 for a slot that is not live), of which all but the
    last were proposals. `generations` tells whose they are."""

    tokens: Int[Array, "R m1"]
    counts: Int[Array, "R"]
    verified: Int[Array, "R"]
    generations: Int[Array, "R"]
    trace: dict[str, Any]  # empty unless the program records


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillInput:
    """A chunk of one request's prompt: C rows of which `count` are real, starting at `start`."""

    tokens: Int[Array, "C"]
    next_tokens: Int[Array, "C"]
    start: Int[Array, ""]
    count: Int[Array, ""]
    slot: Int[Array, ""]
    final: Bool[Array, ""]
    generation: Int[Array, ""]
    seed: UInt32[Array, "2"]  # low and high word
    sample: Int[Array, ""]
    sampling: SlotSampling  # one row


@dataclasses.dataclass(frozen=True)
class Program:
    """Static half of the loop: models and modes. Hashable; holds no arrays."""

    decoder: Decoder
    drafter: Drafter
    max_context: int
    num_slots: int
    page_size: int
    acceptance: str = "ratio"
    confidence_threshold: float = 0.0
    num_proposals: int | None = None  # None: as many as the drafter gives
    stacked: bool = False  # target layers as one dict of arrays (a trainer's form), so its pools are one array too
    record: bool = False
    attention: str = "reference"  # of the target over its pages; see `pallas_kernels.verify_attention`

    @property
    def pages_per_slot(self) -> int:
        """Pages that hold max_context rows, and behind them the nodes of a tree."""
        return -(-(self.max_context + self.drafter.tree_nodes) // self.page_size)

    def init_state(self, dtype: Any, fill: float = 0.0) -> DecodeState:
        """All slots empty. Page 0 is the trash page; slot i owns the i-th run of pages after it.

        `fill` poisons the unwritten cache (tests): nothing unwritten may ever be read.
        """
        slots, pages = self.num_slots, self.pages_per_slot
        zeros = lambda dtype=jnp.int32: jnp.zeros(slots, dtype)  # noqa: E731
        state = SlotState(
            anchors=zeros(),
            positions=zeros(),
            live=zeros(bool),
            generations=zeros(),
            keys=jax.random.split(jax.random.key(0), slots),
            samples=zeros(),
            sampling=SlotSampling.zeros(slots),
            page_table=1 + jnp.arange(slots * pages, dtype=jnp.int32).reshape(slots, pages),
        )
        return DecodeState(state, *self.init_pools(1 + slots * pages, dtype, fill))

    def init_pools(self, num_pages: int, dtype: Any, fill: float = 0.0) -> tuple[Any, Any]:
        """The target's pools and the drafter's state over as many pages."""
        config = self.decoder.config
        pools = [
            init_pool(num_pages, self.page_size, config.num_kv_heads, config.head_dim, dtype)
            for _ in range(config.num_layers)
        ]
        target = jnp.stack(pools) if self.stacked else pools
        draft = self.drafter.init_state(num_pages, self.page_size, dtype, self.num_slots)
        poison = lambda tree: jax.tree.map(lambda x: _filled(x, fill), tree) if fill != 0 else tree  # noqa: E731
        return poison(target), poison(draft)

    # -- the five functions -------------------------------------------------------------------------------------------

    def propose(self, weights: Weights, state: DecodeState, keys: Key[Array, "R"]) -> Proposal:
        """The drafter's guess for every slot. Raises ConfigError for a threshold that no confidence goes with."""
        slots = state.slots
        view = Slots(slots.anchors, slots.positions, slots.page_table, slots.live)
        proposal = self.drafter.propose(weights.draft, weights.shared, state.draft, view, keys, slots.sampling)
        if self.confidence_threshold > 0:
            proposal = self._confident(proposal)
        return proposal if self.num_proposals is None else first_proposals(proposal, self.num_proposals)

    def _confident(self, proposal: Proposal) -> Proposal:
        """A tree loses its doubtful branches here, once for all who read it; a chain is cut by the plan."""
        if proposal.confidence is None:
            raise ConfigError(
                f"engine.confidence_threshold: found {self.confidence_threshold:g}, expected 0: the "
                f"{self.drafter.method} drafter gives no confidence (engine.survival_confidence adds one to methods "
                "that have it)"
            )
        if proposal.tree is None:
            return proposal
        tree = confident_nodes(proposal.tree, proposal.confidence, self.confidence_threshold)
        return dataclasses.replace(proposal, tree=tree)

    def plan(self, state: DecodeState, proposal: Proposal, limits: Int[Array, "R"] | None = None) -> Int[Array, "R"]:
        """Proposals of each slot that the target will look at; of a tree, the levels. `limits` are the slots' own,
        where they are not max_context."""
        limit = self.max_context if limits is None else limits
        if proposal.tree is not None:
            levels = jnp.max(jnp.where(proposal.tree.valid, proposal.tree.depths, 0), axis=1)
            return verify_lengths(state.slots.positions, levels, limit)
        m = proposal.tokens.shape[1]
        return verify_lengths(state.slots.positions, m, limit, proposal.confidence, self.confidence_threshold)

    def verify(
        self, weights: Weights, state: DecodeState, proposal: Proposal, lengths: Int[Array, "R"]
    ) -> tuple[Float[Array, "R m1 V"], Float[Array, "M TH"], list[KVPool], RaggedLayout]:
        """One target forward over anchor and kept proposals: logits, features, pools with their K/V, and the layout."""
        flat, layout = self.verify_rows(state, proposal, lengths)
        out = self.decoder.forward(
            weights.target, flat, layout.positions, PagedCausal(layout, self.attention), state.target, self.drafter.taps
        )
        logits = self.decoder.logits(weights.target, out.hidden)
        return logits.reshape(lengths.shape[0], layout.max_rows, -1), out.features, out.caches, layout

    def verify_rows(
        self, state: DecodeState, proposal: Proposal, lengths: Int[Array, "R"], rows: int | None = None
    ) -> tuple[Int[Array, "M"], RaggedLayout]:
        """Anchors and kept proposals as rows of the target: their ids, and their layout. `rows` packs the segments of
        chains without gaps into that many."""
        slots = state.slots
        tokens = jnp.concatenate([slots.anchors[:, None], proposal.tokens], axis=1)
        kept = jnp.where(slots.live, lengths + 1, 0)
        if proposal.tree is not None:
            layout = tree_layout(slots.positions, slots.live, proposal.tree, slots.page_table)
        elif rows is None:
            layout = uniform_layout(slots.positions, kept, slots.page_table, tokens.shape[1])
        else:
            layout = ragged_layout(slots.positions, kept, slots.page_table, rows, tokens.shape[1])
        return jnp.where(layout.valid, layout.rows_of(tokens), 0), layout

    def accept(
        self,
        state: DecodeState,
        proposal: Proposal,
        logits: Float[Array, "R m1 V"],
        lengths: Int[Array, "R"],
        keys: Key[Array, "R"],
    ) -> Acceptance:
        """Who stays, and the last token."""
        positions = state.slots.positions[:, None] + 1 + jnp.arange(logits.shape[1])
        # a chain tests its proposals; a tree may draw at every row, its leaves included
        u = uniforms(keys, positions[:, :-1] if proposal.tree is None else positions, Purpose.ACCEPT)
        u_last = uniforms(keys, positions[:, :1], Purpose.TARGET)[:, 0]
        if proposal.tree is not None:
            mode = self.drafter.tree_acceptance
            return accept_tree(logits, proposal.tokens, proposal.tree, state.slots.sampling, u, u_last, lengths, mode)
        return accept(logits, proposal, state.slots.sampling, u, u_last, lengths, self.acceptance)

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
        """Anchor and accepted rows become history; the last token becomes the anchor. Rejected rows' K/V stay where
        they are, beyond the new length, and are overwritten before anybody may see them."""
        slots = state.slots
        tokens = jnp.concatenate([slots.anchors[:, None], proposal.tokens], axis=1)
        following = accepted.tokens(proposal)
        counts = jnp.where(slots.live, accepted.accepted + 1, 0)
        if accepted.path is None:
            layout = keep_rows(layout, counts)
        else:
            path = jnp.pad(accepted.path, ((0, 0), (1, 0)))
            features = features[(layout.starts[:, None] + path).reshape(-1)]
            tokens = jnp.take_along_axis(tokens, path, axis=1)
            layout = uniform_layout(slots.positions, counts, slots.page_table, path.shape[1])
            target = self._compact(target, path, layout)
        rows = Rows(features, layout.rows_of(tokens), layout.rows_of(following))
        draft = self.drafter.commit(weights.draft, weights.shared, state.draft, rows, layout)
        moved = dataclasses.replace(
            slots,
            anchors=jnp.where(slots.live, accepted.token, slots.anchors).astype(jnp.int32),
            positions=slots.positions + counts,
        )
        return DecodeState(moved, target, draft)

    # -- the two programs that are compiled ---------------------------------------------------------------------------

    def round(self, weights: Weights, state: DecodeState, alive: Bool[Array, "R"]) -> tuple[DecodeState, RoundOutput]:
        """One round for every live slot. `alive` is the host's word on who still decodes."""
        slots = dataclasses.replace(
            state.slots, live=state.slots.live & alive & (state.slots.positions < self.max_context - 1)
        )
        state = dataclasses.replace(state, slots=slots)
        keys = round_keys(slots.keys, slots.samples, slots.positions)
        proposal = self.propose(weights, state, keys)
        lengths = self.plan(state, proposal)
        logits, features, target, layout = self.verify(weights, state, proposal, lengths)
        accepted = self.accept(state, proposal, logits, lengths, keys)
        output = RoundOutput(
            tokens=accepted.tokens(proposal),
            counts=jnp.where(slots.live, accepted.accepted + 1, 0),
            verified=jnp.where(slots.live, lengths, 0),
            generations=slots.generations,
            trace=self._trace(proposal, logits, accepted) if self.record else {},
        )
        return self.commit(weights, state, proposal, accepted, features, target, layout), output

    def prefill(self, weights: Weights, state: DecodeState, chunk: PrefillInput) -> tuple[DecodeState, Int[Array, ""]]:
        """Runs a chunk of a prompt through the target and into the drafter's context. The final chunk draws the first
        token and makes the slot live; its token is meaningless before that."""
        slots, slot = state.slots, chunk.slot
        table = jax.lax.dynamic_index_in_dim(slots.page_table, slot)
        layout = uniform_layout(chunk.start[None], chunk.count[None], table, chunk.tokens.shape[0])
        out = self.decoder.forward(
            weights.target,
            chunk.tokens,
            layout.positions,
            PagedCausal(layout, self.attention),
            state.target,
            self.drafter.taps,
        )
        end = chunk.start + chunk.count
        last = jax.lax.dynamic_index_in_dim(out.hidden, chunk.count - 1)
        probs = chunk.sampling.probabilities(self.decoder.logits(weights.target, last))
        key = jax.random.fold_in(jax.random.key(chunk.seed[0]), chunk.seed[1])
        u = uniforms(round_keys(key[None], chunk.sample[None], end[None] - 1), end[None, None], Purpose.TARGET)[:, 0]
        token = inverse_cdf(probs, u)[0]
        # What follows the prompt's last row is known only now.
        newest = chunk.final & (jnp.arange(chunk.tokens.shape[0]) == chunk.count - 1)
        rows = Rows(out.features, chunk.tokens, jnp.where(newest, token, chunk.next_tokens))
        layout = dataclasses.replace(layout, owners=slot[None])
        draft = self.drafter.commit(weights.draft, weights.shared, state.draft, rows, layout)
        put = lambda old, new: old.at[slot].set(new)  # noqa: E731
        started = SlotState(
            anchors=put(slots.anchors, token),
            positions=put(slots.positions, end),
            live=put(slots.live, chunk.final),
            generations=put(slots.generations, chunk.generation),
            keys=put(slots.keys, key),
            samples=put(slots.samples, chunk.sample),
            sampling=jax.tree.map(lambda old, new: put(old, new[0]), slots.sampling, chunk.sampling),
            page_table=slots.page_table,
        )
        return DecodeState(started, out.caches, draft), token

    def _compact(self, pools: Any, path: Int[Array, "R D1"], layout: RaggedLayout) -> Any:
        """Moves the accepted path's K/V behind the anchor in every layer's pool."""
        if self.stacked:
            return jax.vmap(lambda pool: compact(pool, path, layout))(pools)
        return [compact(pool, path, layout) for pool in pools]

    def _trace(self, proposal: Proposal, logits: Float[Array, "R m1 V"], accepted: Acceptance) -> dict[str, Any]:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tree: dict[str, Any] = {} if accepted.path is None else {"path": accepted.path}
        if proposal.tree is not None:
            tree |= {name: getattr(proposal.tree, name) for name in ("parents", "depths", "valid")}
        return {"proposal": proposal.tokens, "posterior": best, **tree, **(proposal.trace or {})}


def _filled(x: Array, fill: float) -> Array:
    """`fill` everywhere; in integers, which hold no NaN, an id that no vocabulary has."""
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.full_like(x, jnp.iinfo(x.dtype).max if integer else fill)
