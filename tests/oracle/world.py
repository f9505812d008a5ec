"""A world whose tokens only the features tell: row t holds the code of token t + lag; no token tells of another.

The decoder here keeps the `Decoder` interface but looks its next token up in a table, so the served answer is known,
and a drafter can be right only by reading the right feature at the right distance.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.decoding.counters import TauCounter
from jaxspec.decoding.generate import Completion, count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Batch, Shared
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash, DFlashObjective
from jaxspec.drafters.dspark import DSpark, DSparkObjective
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderOutput

VOCAB, HIDDEN, LENGTH = 17, 24, 40
MASK_ID = VOCAB - 1
PROPOSALS = 4

MODEL = ModelConfig.from_hf({
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rope_theta": 20.0,
})  # fmt: skip


def _tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))[0]
    codes = np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))[0][: VOCAB - 1]
    embedding = 0.5 * rng.normal(size=(VOCAB, HIDDEN)) + 1.0  # a shared direction: what a query can be made of
    return {"embedding": embedding, "head": rotation[:VOCAB], "codes": codes + 0.3}


TABLES = {name: jnp.asarray(value, jnp.float32) for name, value in _tables().items()}
SHARED = Shared(TABLES["embedding"], TABLES["head"])


def features_of(tokens: Any, lag: int) -> Any:
    """[..., S + lag] tokens -> [..., S, H]: the code of the token `lag` further on."""
    return TABLES["codes"][tokens[..., lag:]]


@dataclasses.dataclass(frozen=True)
class TableDecoder:
    """params hold a "table" of [P] tokens. The token at position t + 1 is table[t + 1], whatever the token at t."""

    lag: int
    config: ModelConfig = MODEL

    def embedding(self, params: Any) -> Any:
        return TABLES["embedding"]

    def head(self, params: Any) -> Any:
        return TABLES["head"]

    def check_taps(self, taps: Any) -> None:
        assert taps == (0,)

    def logits(self, params: Any, hidden: Any) -> Any:
        return hidden @ TABLES["head"].T

    def forward(self, params, tokens, positions, attention, caches=None, taps=()) -> DecoderOutput:
        table = params["table"]
        hidden = 20.0 * TABLES["head"][table[positions + 1]]
        return DecoderOutput(hidden, TABLES["codes"][table[positions + self.lag]], caches)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a runner wants of a target."""

    model: TableDecoder
    params: Any


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What a runner wants of a drafter."""

    drafter: Any
    params: Any
    embedding: Any = None
    head: Any = None


def random_tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, VOCAB - 1, shape).astype(np.int32)


def target(lag: int, seed: int = 77) -> Loaded:
    table = random_tokens(np.random.default_rng(seed), MODEL.max_position + lag + PROPOSALS + 2)
    return Loaded(TableDecoder(lag), {"table": jnp.asarray(table), "model": {"layers": []}})


def make(method: str, proposals: int = PROPOSALS) -> Any:
    """The real module, one layer, `proposals` tokens a block."""
    size = proposals + (method == "dflash")
    config = fresh_config(MODEL, num_layers=1, block_size=size, mask_token_id=MASK_ID, target_layer_ids=(0,))
    if method == "dflash":
        return DFlash(config, DFlashObjective(gamma=None))
    return DSpark(
        config, MarkovConfig(2, "vanilla", True, True), objective_config=DSparkObjective(gamma=None, ce_alpha=1.0)
    )


def batch(rng: np.random.Generator, lag: int, shift: int = 0, size: int = 12, anchors: int = 8) -> Batch:
    """Fresh random sequences. `shift` moves the features along the sequence: the fault that B51 is about."""
    tokens = random_tokens(rng, size, LENGTH + lag + 1)
    features = features_of(tokens, lag)[:, : LENGTH + 1]
    features = jnp.roll(features, shift, axis=1)[:, 1:LENGTH] if shift else features[:, 1:LENGTH]
    ids = tokens[:, 1:LENGTH]
    drawn = np.sort(
        np.stack([rng.choice(np.arange(lag, LENGTH - 8), anchors, replace=False) for _ in range(size)]), axis=1
    )
    return of_tokens(tokens[:, 1 : LENGTH + 1], ids.shape[1], features, drawn)


def of_tokens(tokens: Any, length: int, features: Any, anchors: Any) -> Batch:
    """`tokens` has one token more than the sequence: the teacher's last answer."""
    return Batch(
        input_ids=jnp.asarray(tokens[:, :length]),
        loss_mask=jnp.ones((len(tokens), length), bool),
        features=jnp.asarray(features),
        anchors=jnp.asarray(anchors, jnp.int32),
        keep=jnp.ones(np.shape(anchors), bool),
        teacher_hidden=20.0 * TABLES["head"][tokens[:, 1 : length + 1]],
    )


def serve(
    drafter: Any, params: Any, lag: int, prompts: Any = (6, 9, 13), new_tokens: int = 24, loaded: Loaded | None = None
) -> tuple[list[Completion], TauCounter, list[int]]:
    """Completions, tau and the table of a world that training never saw; the text is the target's, whatever the drafter
    says."""
    loaded = target(lag) if loaded is None else loaded
    runner = SlotRunner(
        loaded, Drafted(drafter, params), num_slots=2, max_context=48, prefill_chunk=4, page_size=4,
        cache_fill=float("nan"),
    )  # fmt: skip
    table = np.asarray(loaded.params["table"]).tolist()
    lasting = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    answers = generate(runner, [table[:length] for length in prompts], lasting)
    for answer in answers:
        start = len(answer.prompt_ids)
        assert list(answer.tokens) == table[start : start + new_tokens]
    return answers, count(answers, drafter.num_proposals), table


def acceptance(counter: TauCounter) -> float:
    """Share of the proposals that were accepted."""
    return sum(counter.accepted_at) / sum(counter.offered_at)


@functools.cache
def _step(drafter: Any, optimizer: Any, leak: bool) -> Any:
    """`leak` only keeps a program traced under a patched mask from being used for the honest one."""

    def step(params: Any, state: Any, data: Batch) -> Any:
        grads = jax.grad(lambda p: drafter.objective(drafter.loss(p, SHARED, data, jax.random.key(0))))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


@functools.cache
def _accuracy(drafter: Any, leak: bool) -> Any:
    return jax.jit(lambda p, data: drafter.loss(p, SHARED, data, jax.random.key(0))["metric/accuracy"])


OPTIMIZER = optax.adam(optax.cosine_decay_schedule(1e-2, 300, 0.1))


def accuracy(drafter: Any, params: Any, data: Batch, leak: bool = False) -> float:
    hits, count = _accuracy(drafter, leak)(params, data)
    return float(hits) / float(count)


def train(
    drafter: Any, lag: int, shift: int = 0, steps: int = 300, leak: bool = False, seed: int = 5
) -> tuple[Any, float]:
    """Weights and the accuracy of training on a fresh batch; stops early at 100 % on two of them."""
    rng = np.random.default_rng(seed)
    params = drafter.init(jax.random.key(seed))
    state, step = OPTIMIZER.init(params), _step(drafter, OPTIMIZER, leak)
    for index in range(steps):
        params, state = step(params, state, batch(rng, lag, shift))
        if index % 50 == 49 and all(accuracy(drafter, params, batch(rng, lag, shift), leak) == 1.0 for _ in range(2)):
            break
    return params, accuracy(drafter, params, batch(rng, lag, shift), leak)


def predictions(drafter: Any, params: Any, data: Batch) -> tuple[Any, Any]:
    """Labels [B, N, m] and the logits of training for them."""

    def run(params: Any) -> tuple[Any, Any]:
        trace = drafter.trace(params, SHARED, data)
        if drafter.method == "dflash":
            return trace["target_ids"][:, :, 1:], trace["base_logits"][:, :, 1:]
        return trace["target_ids"], trace["draft_logits"]

    return jax.jit(run)(params)
