"""What the EAGLE drafters share: one layer over (feature t, token t + 1), its own K/V, and a state that feeds itself.

A committed row t holds the target's feature of t and the token at t + 1, at RoPE position t: the extend pass. Its last
row's state already predicts the token behind the anchor, so the first proposal costs nothing; every later one runs the
layer on (state, proposed token) one position further. Proposed rows never enter the pool: a commit runs them again with
the target's features.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.drafters.base import Batch, Dense, DraftSampling, Point, PrefixUse, Proposal, Rows, Shared, Slots, Sparse
from jaxspec.drafters.confidence import survival
from jaxspec.drafters.draft_tree import DraftTree
from jaxspec.drafters.draws import Purpose, inverse_cdf, uniforms
from jaxspec.drafters.eagle_config import EagleConfig
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from jaxspec.models.attention import Attention, PagedCausal
from jaxspec.models.cache import KVPool, gather, init_pool
from jaxspec.models.decoder import SelfAttention, Tap
from jaxspec.models.layout import RaggedLayout
from jaxspec.models.rope import rotary
from jaxspec.parallel.rules import anywhere
from pallas_kernels.softmax import masked_softmax, mix, scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """K/V of the committed rows, and each slot's state behind its last one."""

    pool: KVPool
    hidden: Float[Array, "slots H"]


class WideAttention(SelfAttention):
    """Attention whose projections read `inputs` columns and whose output is H wide."""

    def __init__(self, config: Any, inputs: int):
        super().__init__(config)
        bias, dim = config.qkv_bias, config.head_dim
        self.q_proj = ly.Linear(inputs, config.num_heads * dim, bias)
        self.k_proj = ly.Linear(inputs, config.num_kv_heads * dim, bias)
        self.v_proj = ly.Linear(inputs, config.num_kv_heads * dim, bias)


@dataclasses.dataclass
class Scratch:
    """Attention of proposed rows: the committed context, and those of the rows proposed so far that `visible` names."""

    context: tuple[Array, Array]
    committed: Bool[Array, "R L"]
    visible: Bool[Array, "R f n"]
    rows: list[tuple[Array, Array]]

    def __call__(self, q: Array, k: Array, v: Array, cache: Any, window: Any) -> tuple[Array, Any]:
        self.rows.append((k, v))
        keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(*self.rows, strict=True))
        committed = jnp.broadcast_to(self.committed[:, None], (*self.visible.shape[:2], self.committed.shape[1]))
        mask = jnp.concatenate([committed, self.visible], axis=-1)[:, None, None]
        raw = jnp.concatenate([scores(q, self.context[0]), scores(q, keys)], axis=-1)
        weights = masked_softmax(raw, mask)
        length = self.committed.shape[1]
        out = mix(weights[..., :length], self.context[1]) + mix(weights[..., length:], values)
        return out.astype(q.dtype), cache


@dataclasses.dataclass(frozen=True)
class RecurrentDrafter(abc.ABC):
    """State, commit and proposals. A method adds `fuse` (features to states), `layer` and `draft_logits`.

    `tree` None proposes a chain of `chain_length` tokens, whose q is the softmax each was drawn from
    (`draft_sampling` "argmax": a point). A tree's tokens are chosen, never drawn, so that it needs no q.
    """

    config: EagleConfig
    tree: DraftTree | None = None
    chain_length: int = 7
    draft_sampling: str = "sample"
    survival_confidence: bool = False  # a slot carries the mass of its mode as its confidence, a node its own

    def __post_init__(self) -> None:
        if self.chain_length < 1:
            raise ConfigError(f"chain_length: found {self.chain_length}, expected at least 1")
        if self.draft_sampling not in ("argmax", "sample"):
            raise ConfigError(f"draft_sampling: found {self.draft_sampling!r}, expected argmax or sample")
        if self.tree is not None and self.tree.widest > self.config.draft_vocab:
            raise ConfigError(
                f"tree: a row has up to {self.tree.widest} children, expected at most the {self.config.draft_vocab} "
                "tokens of the draft vocabulary"
            )

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Target features, in order."""
        return self.config.taps

    @property
    def num_proposals(self) -> int:
        """m: length of the chain, or depth of the tree."""
        return self.chain_length if self.tree is None else self.tree.depth

    @property
    def tree_nodes(self) -> int:
        """Nodes of the tree; 0 for a chain."""
        return 0 if self.tree is None else self.tree.nodes

    @property
    def tree_acceptance(self) -> str:
        """The nodes were chosen, not drawn: multi-round rejection."""
        return "rejection"

    # -- what a method adds -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fuse(self, params: ly.Params, features: Float[Array, "*rows TH"]) -> Float[Array, "*rows H"]:
        """The state that the target's features stand for."""
        ...

    @abc.abstractmethod
    def layer(
        self,
        params: ly.Params,
        shared: Shared,
        states: Float[Array, "*rows H"],
        tokens: Int[Array, "*rows"],
        positions: Int[Array, "*rows"],
        attention: Attention,
        cache: Any = None,
    ) -> tuple[Float[Array, "*rows H"], Any]:
        """The next states: state of t and token of t + 1 in, state of t + 1 out."""
        ...

    @abc.abstractmethod
    def draft_logits(
        self, params: ly.Params, shared: Shared, states: Float[Array, "*rows H"]
    ) -> Float[Array, "*rows Vd"]:
        """Float32 logits over the draft vocabulary."""
        ...

    def draft_ids(self, params: ly.Params) -> Int[Array, "Vd"] | None:
        """Target id of each draft id; None where the draft vocabulary is the target's."""
        return None

    # -- serving ------------------------------------------------------------------------------------------------------

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> RecurrentState:
        """Empty pool and states."""
        model = self.config.model
        pool = init_pool(num_pages, page_size, model.num_kv_heads, model.head_dim, dtype)
        return RecurrentState(pool, jnp.zeros((num_slots, model.hidden_size), dtype))

    def prefix_use(self, num_pages: int, page_size: int, num_slots: int) -> PrefixUse:
        """Row t is made of the state of t and the token of t + 1."""
        return PrefixUse(lookahead=1)

    def extend(
        self, params: ly.Params, shared: Shared, pool: KVPool, rows: Rows, layout: RaggedLayout
    ) -> tuple[Float[Array, "M H"], KVPool]:
        """States of committed rows, and the pool with their K/V."""
        states = self.fuse(params, rows.features)
        return self.layer(params, shared, states, rows.next_tokens, layout.positions, PagedCausal(layout), pool)

    def commit(
        self, params: ly.Params, shared: Shared, state: RecurrentState, rows: Rows, layout: RaggedLayout
    ) -> RecurrentState:
        """The extend pass; each request's last state is kept, a request without rows keeps its own."""
        states, pool = self.extend(params, shared, state.pool, rows, layout)
        last = states[jnp.clip(layout.starts + layout.lengths - 1, 0, states.shape[0] - 1)]
        owners = jnp.arange(layout.starts.shape[0]) if layout.owners is None else layout.owners
        kept = jnp.where((layout.lengths > 0)[:, None], last.astype(state.hidden.dtype), state.hidden[owners])
        return RecurrentState(pool, state.hidden.at[owners].set(kept))

    def propose(
        self,
        params: ly.Params,
        shared: Shared,
        state: RecurrentState,
        slots: Slots,
        keys: Key[Array, "R"],
        sampling: DraftSampling,
    ) -> Proposal:
        """A chain, or a tree."""
        dtype = params["fc"]["weight"].dtype
        keys_values = gather(state.pool, slots.page_table, slots.positions)
        context = (keys_values[0].astype(dtype), keys_values[1].astype(dtype))
        committed = jnp.arange(context[0].shape[1]) < slots.positions[:, None]
        rows: list[tuple[Array, Array]] = []
        ids = self.draft_ids(params)

        def run(states: Array, tokens: Array, depth: int, visible: Array) -> Array:
            """Rows at `depth` below the anchor stand at the anchor's position and on: a row holds its next token."""
            positions = jnp.broadcast_to(slots.positions[:, None] + depth - 1, tokens.shape)
            attention = Scratch(context, committed, visible, rows)
            return self.layer(params, shared, states, tokens, positions, attention)[0]

        hidden = state.hidden[: slots.anchors.shape[0]].astype(dtype)
        first = self.draft_logits(params, shared, hidden)
        if self.tree is None:
            return self._chain(params, shared, hidden, first, run, ids, slots, keys, sampling)

        def forward(states: Array, tokens: Array, depth: int, visible: Array) -> tuple[Array, Array]:
            states = run(states, tokens if ids is None else ids[tokens], depth, visible)
            return jax.nn.log_softmax(self.draft_logits(params, shared, states), axis=-1), states

        grown = self.tree.grow(jax.nn.log_softmax(first, axis=-1), hidden, forward)
        tokens = grown.tokens if ids is None else ids[grown.tokens]
        trace = {"draft_first_logits": first}
        trace |= {f"draft_states_{depth}": states for depth, states in enumerate(grown.states, 1)}
        confidence = jnp.exp(grown.log_probs) if self.survival_confidence else None
        return Proposal(tokens, Point(tokens, self.config.model.vocab_size), confidence, grown.tree, trace)

    def _chain(
        self, params: Any, shared: Shared, hidden: Array, logits: Array, run: Any, ids: Array | None, slots: Slots,
        keys: Array, sampling: DraftSampling,
    ) -> Proposal:  # fmt: skip
        vocab, drawing = self.config.model.vocab_size, self.draft_sampling == "sample"
        u = uniforms(keys, slots.positions[:, None] + 1 + jnp.arange(self.chain_length), Purpose.DRAFT)
        sampled, trace = jnp.any(~sampling.greedy), {"draft_first_logits": logits}
        states = hidden[:, None]
        tokens: list[Array] = []
        probs: list[Array] = []
        modes: list[Array] = []
        for slot in range(self.chain_length):
            if slot:
                visible = jnp.ones((logits.shape[0], 1, slot), bool)
                states = run(states, tokens[-1][:, None], slot, visible)
                logits = self.draft_logits(params, shared, states[:, 0])
            token = jnp.argmax(logits, axis=-1)
            if self.survival_confidence:
                modes.append(survival(logits[:, None], sampling)[:, 0])
            if drawing:
                # All-greedy rounds never read q, so the softmax over the vocabulary is skipped.
                probs.append(jax.lax.cond(anywhere(sampled), sampling.draft_probs, jnp.zeros_like, logits))
                token = jnp.where(sampling.greedy, token, inverse_cdf(probs[-1], u[:, slot]))
            tokens.append((token if ids is None else ids[token]).astype(jnp.int32))
        proposed = jnp.stack(tokens, axis=1)
        confidence = jnp.stack(modes, axis=1) if modes else None
        if not drawing:
            return Proposal(proposed, Point(proposed, vocab), confidence, trace=trace)
        drawn = jnp.stack(probs, axis=1)
        if ids is None:
            return Proposal(proposed, Dense(drawn), confidence, trace=trace)
        return Proposal(proposed, Sparse(jnp.broadcast_to(ids, drawn.shape), drawn, vocab), confidence, trace=trace)

    # -- helpers of the methods ---------------------------------------------------------------------------------------

    def rotary(self, positions: Int[Array, "*rows"]) -> tuple[Array, Array]:
        """cos and sin of the layer's heads."""
        return rotary(self.config.model.rope, self.config.model.head_dim, positions)

    def embed(self, params: ly.Params, shared: Shared, tokens: Int[Array, "*rows"], dtype: Any) -> Array:
        """Rows of the input embedding: the checkpoint's own where its width is not the target's, frozen either way."""
        table = params["embed_tokens"]["weight"] if "embed_tokens" in params else shared.embedding
        return ly.embed(jax.lax.stop_gradient(table), tokens).astype(dtype)


def shift(rows: Array, by: int | Int[Array, ""], length: int | None = None) -> Array:
    """rows[:, by : by + length] of a sequence that goes on with zeros; `by` may be traced, up to the padding."""
    length = rows.shape[1] if length is None else length
    if isinstance(by, int):
        kept = rows[:, by : by + length]
        return jnp.pad(kept, [(0, 0), (0, length - kept.shape[1])] + [(0, 0)] * (rows.ndim - 2))
    return jax.lax.dynamic_slice_in_dim(rows, by, length, axis=1)


def supervised_rows(batch: Batch, drop_last: bool) -> Bool[Array, "B S"]:
    """The loss mask; `drop_last` takes each sequence's last supervised row out: its teacher may stand on padding."""
    if not drop_last:
        return batch.loss_mask
    later = jnp.cumsum(jnp.flip(batch.loss_mask, axis=1).astype(jnp.int32), axis=1)
    return batch.loss_mask & (jnp.flip(later, axis=1) > 1)
