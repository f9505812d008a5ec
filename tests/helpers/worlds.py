"""Worlds whose answers are known: a table target, a scripted drafter, and tiny real pairs.

The table target's logits are a lookup on (last token, position), so plain decoding is a walk through a table; its K/V
rows hold (token, position), so a cache can be read. Tokens come in lanes of LANE ids: an answer stays in the lane of
its prompt's last token, which lets every request have its own script, whatever slot it sits on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Dense, Point, Proposal, Rows, Slots, Tree
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draws import Purpose, inverse_cdf, uniforms
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.models.cache import init_pool, write_rows
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, DecoderOutput

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LANE = 8
MASK_ID = 60


# -- the table target -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TableDecoder:
    """`Decoder` with params {"table": [V, P, V], "embedding": [V, 3]}. hidden = (token, position, 0 unless the cache
    that was attended holds a NaN); every tap is that row."""

    config: ModelConfig

    def check_taps(self, taps: Sequence[Any]) -> None:
        pass

    def embedding(self, params: Any) -> jax.Array:
        return params["embedding"]

    def head(self, params: Any) -> jax.Array:
        return params["embedding"]

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        token, position = hidden[..., 0].astype(jnp.int32), hidden[..., 1].astype(jnp.int32)
        return params["table"][token, position] + hidden[..., 2:]

    def forward(
        self, params: Any, tokens: Any, positions: Any, attention: Any, caches: Any = None, taps: Any = ()
    ) -> DecoderOutput:
        row = jnp.stack([tokens, positions], axis=-1).astype(jnp.float32)
        out, cache = attention(row[:, None], row[:, None], row[:, None], caches[0] if caches else None, 0)
        hidden = jnp.concatenate([row, 0 * jnp.sum(out, axis=(1, 2))[:, None]], axis=-1)
        features = jnp.concatenate([hidden] * len(taps), axis=-1) if taps else hidden[:, :0]
        return DecoderOutput(hidden, features, [cache])


def table_target(table: np.ndarray, eos: Sequence[int] = ()) -> Target:
    """`table` [V, P, V] of logits."""
    vocab, positions, _ = table.shape
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": 2,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": positions,
            "eos_token_id": list(eos),
        }
    )
    params = {
        "table": jnp.asarray(table, jnp.float32),
        "embedding": jnp.zeros((vocab, 3)),
        "model": {"layers": []},  # the unrolled form, as the runner looks for it
    }
    return Target("table", TableDecoder(config), params)


def random_table(lanes: int, positions: int, seed: int, spread: float = 2.0) -> np.ndarray:
    """Random logits inside a token's lane, -1e9 outside."""
    vocab = lanes * LANE
    table = np.random.default_rng(seed).normal(size=(vocab, positions, vocab)) * spread
    lane = np.arange(vocab) // LANE
    return np.where((lane[:, None] == lane)[:, None, :], table, -1e9).astype(np.float32)


def spoken_table(answers: np.ndarray) -> np.ndarray:
    """Lane g says code answers[g, p] (below LANE) at position p, whatever came before."""
    lanes, positions = answers.shape
    vocab = lanes * LANE
    table = np.zeros((vocab, positions, vocab), np.float32)
    for token in range(vocab):
        lane = token // LANE
        following = np.minimum(np.arange(positions) + 1, positions - 1)
        table[token, np.arange(positions), lane * LANE + answers[lane, following]] = 5.0
    return table


def walk(table: np.ndarray, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy answer by hand: argmax, lowest id on ties."""
    token, answer = prompt[-1], []
    for step in range(count):
        token = int(np.argmax(table[token, len(prompt) - 1 + step]))
        answer.append(token)
    return answer


# -- the scripted drafter ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes params["tokens"][anchor, position] [m]. Point q, or with `dense` params["probs"][anchor, position]
    [m, V], from which sampled rows are drawn. Its context keeps (token, next token) as K and two feature columns as V.
    """

    vocab_size: int
    num_proposals: int
    dense: bool = False
    taps: tuple[int, ...] = (0,)
    method: str = "scripted"
    needs_teacher: bool = False
    tree_nodes: int = 0
    tree_acceptance: str = "rejection"

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> Any:
        return init_pool(num_pages, page_size, 1, 2, dtype)

    def commit(self, params: Any, shared: Any, state: Any, rows: Rows, layout: Any) -> Any:
        pair = jnp.stack([rows.tokens, rows.next_tokens], axis=-1).astype(jnp.float32)
        return write_rows(state, pair[:, None], rows.features[:, None, :2], layout)

    def propose(self, params: Any, shared: Any, state: Any, slots: Slots, keys: Any, sampling: Any) -> Proposal:
        tokens = params["tokens"][slots.anchors, slots.positions]
        confidence = params["confidence"][slots.anchors, slots.positions] if "confidence" in params else None
        if not self.dense:
            return Proposal(tokens, Point(tokens, self.vocab_size), confidence)
        probs = params["probs"][slots.anchors, slots.positions]
        positions = slots.positions[:, None] + 1 + jnp.arange(self.num_proposals)
        drawn = inverse_cdf(probs, uniforms(keys, positions, Purpose.DRAFT))
        return Proposal(jnp.where(sampling.greedy[:, None], tokens, drawn), Dense(probs), confidence)


def script(table: np.ndarray, m: int, accepted: Any) -> dict[str, jax.Array]:
    """Proposals of which a greedy target accepts exactly accepted[token, position] (broadcast): its own walk with a
    wrong token, of the same lane, behind the accepted ones."""
    vocab, positions, _ = table.shape
    best = np.argmax(table, axis=-1)
    token, position = np.meshgrid(np.arange(vocab), np.arange(positions), indexing="ij")
    steps = []
    for _ in range(m):
        token = best[token, np.minimum(position, positions - 1)]
        position = position + 1
        steps.append(token)
    tokens = np.stack(steps, axis=-1)
    wrong = tokens // LANE * LANE + (tokens + 1) % LANE
    accepted = np.broadcast_to(np.asarray(accepted), (vocab, positions))[..., None]
    return {"tokens": jnp.asarray(np.where(np.arange(m) == accepted, wrong, tokens), jnp.int32)}


def by_lane(values: Sequence[int]) -> np.ndarray:
    """[V, 1]: one number a lane, for `script`."""
    return np.repeat(np.asarray(values), LANE)[:, None]


def scripted(table: np.ndarray, m: int, params: dict[str, jax.Array]) -> Draft:
    """A draft of the scripted drafter; `params` as `script` makes them."""
    return Draft(ScriptedDrafter(table.shape[0], m, dense="probs" in params), params)


@dataclasses.dataclass(frozen=True)
class ScriptedTree:
    """The chain of `inner` as a tree of 2 m nodes: beside each of its tokens stands the one below it in its lane, which
    is the right one where `script` was wrong."""

    inner: ScriptedDrafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def tree_nodes(self) -> int:
        return 2 * self.inner.num_proposals

    def propose(self, *given: Any) -> Proposal:
        made = self.inner.propose(*given)
        requests, m = made.tokens.shape
        beside = jnp.minimum(made.tokens // LANE * LANE + (made.tokens - 1) % LANE, self.inner.vocab_size - 1)
        tokens = jnp.stack([made.tokens, beside], axis=-1).reshape(requests, -1)
        level = jnp.repeat(jnp.arange(m), 2)
        whole = lambda values: jnp.broadcast_to(values, tokens.shape)  # noqa: E731
        parents = jnp.where(level == 0, 0, 2 * level - 1)
        tree = Tree(whole(parents), whole(level + 1), jnp.ones(tokens.shape, bool), m)
        return Proposal(tokens, Point(tokens, self.inner.vocab_size), tree=tree)


@dataclasses.dataclass(frozen=True)
class Reciter:
    """Knows the answer to every slot's request, params["sequences"] [slots, P], and says it with one wrong token
    behind 0 to m right ones, as a hash of slot and position has it. It works on a vocabulary of any size.
    """

    vocab_size: int
    num_proposals: int
    taps: tuple[int, ...] = ()
    method: str = "reciter"
    needs_teacher: bool = False
    tree_nodes: int = 0
    tree_acceptance: str = "rejection"

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> Any:
        return ()

    def commit(self, params: Any, shared: Any, state: Any, rows: Rows, layout: Any) -> Any:
        return state

    def propose(self, params: Any, shared: Any, state: Any, slots: Slots, keys: Any, sampling: Any) -> Proposal:
        m, slot = self.num_proposals, jnp.arange(slots.anchors.shape[0])
        index = slots.positions[:, None] + 1 + jnp.arange(m)
        known = jnp.take_along_axis(params["sequences"], jnp.minimum(index, params["sequences"].shape[1] - 1), axis=1)
        mixed = (slots.positions + 1000 * slot).astype(jnp.uint32) * jnp.uint32(2654435761)
        right = ((mixed >> 13) ^ (7 * slots.positions + slot).astype(jnp.uint32)) % (m + 1)
        tokens = jnp.where(jnp.arange(m) == right[:, None], (known + 1) % self.vocab_size, known)
        return Proposal(tokens, Point(tokens, self.vocab_size))


def reciter(vocab: int, m: int, sequences: Sequence[Sequence[int]]) -> Draft:
    """A draft that recites prompt + answer of the request on each slot."""
    rows = np.zeros((len(sequences), max(map(len, sequences)) + m), np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return Draft(Reciter(vocab, m), {"sequences": jnp.asarray(rows)})


# -- tiny real pairs --------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 1000.0,
    "eos_token_id": 63,
}


def tiny_target(family: str = "qwen3", seed: int = 0, scale: float = 0.3, dtype: Any = jnp.float32) -> Target:
    """A random two-layer target."""
    model = Decoder(ModelConfig.from_hf({**TINY, "model_type": family}))
    return Target(f"tiny-{family}", model, model.init(jax.random.key(seed), dtype, scale))


def tiny_draft(target: Target, method: str = "dflash", seed: int = 1, **changes: Any) -> Draft:
    """A random drafter of one layer and a block of 5 rows: garbage, it agrees with the target by chance only."""
    config = fresh_config(
        target.model.config, num_layers=1, block_size=5, mask_token_id=MASK_ID, target_layer_ids=(0, 1)
    )
    drafter = DFlash(config, **changes) if method == "dflash" else DSpark(config, MarkovConfig(4), **changes)
    return Draft(drafter, loud(drafter.init(jax.random.key(seed), target.dtype)))


def loud(params: Any, factor: float = 10.0) -> Any:
    """The matrices scaled up, so that a row of the context, or a token of the block, decides the argmax."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, params)


def bigram_draft(target: Target, block_size: int = 5) -> Draft:
    """A DSpark whose Markov head is the target without its layers, head @ norm(embedding), and whose block is nearly
    mute: right wherever the target follows the last token alone."""
    model = target.model.config
    config = fresh_config(model, num_layers=1, block_size=block_size, mask_token_id=MASK_ID, target_layer_ids=(0, 1))
    drafter = DSpark(config, MarkovConfig(model.hidden_size))
    params = drafter.init(jax.random.key(5), target.dtype)
    params["markov_head"] = {"markov_w1": {"weight": target.embedding}, "markov_w2": {"weight": 50.0 * target.head}}
    return Draft(drafter, params)


def golden_pair(target: str, case: str, max_position: int = 1024) -> tuple[Target, Draft, list[list[int]]]:
    """A golden target, the draft that was overfitted to its answers, and the prompts it was overfitted on."""
    loaded = load_target(GOLDEN / "targets" / target, "float32")
    config = dataclasses.replace(loaded.model.config, max_position=max_position)
    loaded = dataclasses.replace(loaded, model=Decoder(config))
    inputs = load_file(GOLDEN / case / "inputs.safetensors")
    prompts = [inputs[name].reshape(-1).tolist() for name in sorted(inputs) if name.startswith("prompt_")]
    return loaded, load_drafter(GOLDEN / case / "draft", loaded), prompts


def garbage(draft: Draft, seed: int = 9) -> Draft:
    """The same drafter with fresh random weights."""
    return dataclasses.replace(draft, params=loud(draft.drafter.init(jax.random.key(seed), jnp.float32)))


# -- a runner's insides -----------------------------------------------------------------------------------------------


def swap(runner: SlotRunner, *, target: Any = None, draft: Any = None) -> None:
    """Other weights of the same shapes in a compiled runner, which must be idle."""
    assert runner.live == 0
    old = runner.weights
    runner.weights = dataclasses.replace(
        old, target=old.target if target is None else target, draft=old.draft if draft is None else draft
    )


def rows_of(runner: SlotRunner, pool: Any, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V rows [pages x page, kv heads, D] of a slot's pages."""
    table = np.asarray(runner._state.slots.page_table)[slot]
    rows = np.asarray(pool)[table].reshape(-1, *pool.shape[2:])
    return rows[:, 0::2], rows[:, 1::2]


def slot_of(runner: SlotRunner, handle: int) -> int:
    """Where a live request sits."""
    return next(i for i, request in enumerate(runner._slots) if request is not None and request.handle == handle)


def position_of(runner: SlotRunner, slot: int) -> int:
    """Committed rows of a slot."""
    return int(np.asarray(runner._state.slots.positions)[slot])
