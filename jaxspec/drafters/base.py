"""The drafter protocol: what a method must offer to be trained, evaluated and served by the same code."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.errors import ConfigError
from jaxspec.models.decoder import Tap
from jaxspec.models.layout import RaggedLayout

Terms = dict[str, tuple[Array, Array]]  # name -> (sum, weight), reduced over the global batch before dividing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """The target's input embedding and output head [V, H]: frozen, by reference."""

    embedding: Float[Array, "V H"]
    head: Float[Array, "V H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Point:
    """q of proposals that were chosen, not drawn (argmax): all mass on the proposed token, nothing stored."""

    tokens: Int[Array, "R m"]
    vocab: int = dataclasses.field(metadata={"static": True})

    def prob(self, tokens: Int[Array, "R m"]) -> Float[Array, "R m"]:
        """q of the given token at each slot."""
        return (tokens == self.tokens).astype(jnp.float32)

    def rows(self, slot: Int[Array, "R"]) -> Float[Array, "R V"]:
        """q's whole row at one slot per request; zero at slot m (there is no proposal)."""
        return jax.nn.one_hot(_pick(self.tokens, slot, fill=-1), self.vocab, dtype=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sparse:
    """q over K candidates a slot; ids outside them have probability 0."""

    ids: Int[Array, "R m K"]
    probs: Float[Array, "R m K"]
    vocab: int = dataclasses.field(metadata={"static": True})

    def prob(self, tokens: Int[Array, "R m"]) -> Float[Array, "R m"]:
        """q of the given token at each slot."""
        return jnp.sum(jnp.where(self.ids == tokens[..., None], self.probs, 0.0), axis=-1)

    def rows(self, slot: Int[Array, "R"]) -> Float[Array, "R V"]:
        """q's whole row at one slot per request, scattered into zeros; zero at slot m."""
        ids, probs = _pick(self.ids, slot, fill=0), _pick(self.probs, slot, fill=0.0)
        request = jnp.arange(ids.shape[0])[:, None]
        return jnp.zeros((ids.shape[0], self.vocab), jnp.float32).at[request, ids].add(probs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """q over the whole vocabulary."""

    probs: Float[Array, "R m V"]

    def prob(self, tokens: Int[Array, "R m"]) -> Float[Array, "R m"]:
        """q of the given token at each slot."""
        return jnp.take_along_axis(self.probs, tokens[..., None], axis=-1)[..., 0]

    def rows(self, slot: Int[Array, "R"]) -> Float[Array, "R V"]:
        """q's whole row at one slot per request; zero at slot m."""
        return _pick(self.probs, slot, fill=0.0)


def _pick(values: Array, slot: Int[Array, "R"], fill: Any) -> Array:
    """values[r, slot[r]], `fill` where slot = m."""
    count = values.shape[1]
    index = jnp.minimum(slot, count - 1).reshape(-1, *([1] * (values.ndim - 1)))
    picked = jnp.take_along_axis(values, index, axis=1)[:, 0]
    return jnp.where((slot < count).reshape(-1, *([1] * (picked.ndim - 1))), picked, fill)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Shape of n proposed nodes. Row 0 is the root (the anchor), node i is row i + 1; `parents` are rows, and a
    parent's row comes before its children's. Nodes that are not `valid` fill the fixed size up."""

    parents: Int[Array, "R n"]
    depths: Int[Array, "R n"]
    valid: Bool[Array, "R n"]
    max_depth: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """m guessed tokens a request (n nodes of a tree), the q each was drawn from, and, where the method has one, the
    confidence that slot k is accepted given that the slots before it were (a function of tokens before k only), or that
    a node is, given that its parent was."""

    tokens: Int[Array, "R m"]
    q: Point | Sparse | Dense
    confidence: Float[Array, "R m"] | None = None
    tree: Tree | None = None
    trace: dict[str, Array] | None = None  # block internals for inspection; unused, they cost nothing under jit


def first_proposals(proposal: Proposal, count: int) -> Proposal:
    """The proposal cut to its first `count` slots (a server may want shorter blocks than the drafter gives).

    Raises ConfigError for a tree: its nodes are no prefix.
    """
    if proposal.tree is not None:
        raise ConfigError("engine.num_proposals: expected null for a tree; its size is its budget engine.tree_nodes")
    if count >= proposal.tokens.shape[1]:
        return proposal
    short = jax.tree.map(lambda x: x[:, :count], dataclasses.replace(proposal, trace=None))
    return dataclasses.replace(short, trace=proposal.trace)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Committed rows: target features [M, T x H], the rows' tokens, and the token that followed each."""

    features: Float[Array, "M TH"]
    tokens: Int[Array, "M"]
    next_tokens: Int[Array, "M"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Decoding requests: anchor token, its absolute position s (= committed context length), pages, and who is live."""

    anchors: Int[Array, "R"]
    positions: Int[Array, "R"]
    page_table: Int[Array, "R P"]
    live: Bool[Array, "R"]


class DraftSampling(Protocol):
    """How the requests want tokens drawn."""

    @property
    def greedy(self) -> Bool[Array, "R"]:
        """Requests that take the argmax."""
        ...

    @property
    def temperature(self) -> Float[Array, "R"]:
        """Of the others; a greedy request's means nothing."""
        ...

    def draft_probs(self, logits: Float[Array, "R *slots V"]) -> Float[Array, "R *slots V"]:
        """The distribution that a drafter draws from (one-hot for greedy rows)."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Training batch. Anchors are sorted; dropped ones (keep False) carry position 0.

    `progress` is the share of the run's optimizer steps that are done, `epochs` how often the data was passed through
    before: objectives whose weights change over a run read them.
    """

    input_ids: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    features: Float[Array, "B S TH"]
    anchors: Int[Array, "B N"]
    keep: Bool[Array, "B N"]
    teacher_hidden: Float[Array, "B S H"] | None = None
    progress: Float[Array, ""] | None = None
    epochs: Int[Array, "B"] | None = None
    lengths: Int[Array, "B"] | None = None  # rows that are no padding; None where nothing but the loss mask tells


@dataclasses.dataclass(frozen=True)
class PrefixUse:
    """How far a prefix of known tokens stands for the drafter's context. `in_pages`: its rows lie in the pages of the
    target's (False: nothing may be skipped). `lookahead` is 1 where row t depends on token t + 1. `recomputed` rows at
    a prompt's end are run in any case."""

    in_pages: bool = True
    lookahead: int = 0
    recomputed: int = 1


class Drafter(Protocol):
    """A method: a frozen, hashable object without arrays. Every array comes in as an argument.

    One whose context is not a row in its own page for each token, of that token and those before it, also has
    `prefix_use(num_pages, page_size, num_slots) -> PrefixUse`.
    """

    @property
    def method(self) -> str: ...
    @property
    def taps(self) -> tuple[Tap, ...]:
        """Target features it reads, in order."""
        ...

    @property
    def num_proposals(self) -> int:
        """m."""
        ...

    @property
    def tree_nodes(self) -> int:
        """Nodes of its tree; 0 for a chain. For a tree m is the depth."""
        ...

    @property
    def tree_acceptance(self) -> str:
        """How a sampled request's tree is verified: "rejection" or "match" (decoding.trees)."""
        ...

    @property
    def needs_teacher(self) -> bool:
        """Whether training reads the target's final hidden state."""
        ...

    def abstract_params(self, dtype: Any) -> Any:
        """Names and shapes of the checkpoint's tensors."""
        ...

    def init(self, key: Key[Array, ""], dtype: Any) -> Any:
        """Fresh parameters."""
        ...

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> Any:
        """Empty state: pools of pages, and whatever it keeps a slot."""
        ...

    def commit(self, params: Any, shared: Shared, state: Any, rows: Rows, layout: RaggedLayout) -> Any:
        """Writes committed rows into the context: after prefill and after verification alike."""
        ...

    def propose(
        self, params: Any, shared: Shared, state: Any, slots: Slots, keys: Key[Array, "R"], sampling: DraftSampling
    ) -> Proposal:
        """Guesses m tokens a request."""
        ...

    def loss(self, params: Any, shared: Shared, batch: Batch, key: Key[Array, ""]) -> Terms:
        """Objective terms and metrics ("metric/...") as sums and weights."""
        ...

    def objective(self, terms: Terms) -> Float[Array, ""]:
        """The scalar to minimise, from globally reduced terms."""
        ...

    def to_hf(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        ...
