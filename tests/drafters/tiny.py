"""Tiny targets, drafters and batches for the tests of this folder: they compile in about a second."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Batch, Shared, Slots
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark, DSparkObjective
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.models.config import ModelConfig

VOCAB, HIDDEN, MASK_ID = 24, 16, 23

TARGET_HF: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "rope_theta": 100.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "pad_token_id": 3,
}
TARGET = ModelConfig.from_hf(TARGET_HF)


def block_config(**changes: Any) -> Any:
    """A block of 4 rows over taps 1 and 3; as many layers as `layer_types` names, else one."""
    layers = len(changes.get("layer_types") or (None,))
    options = {"num_layers": layers, "block_size": 4, "mask_token_id": MASK_ID, "target_layer_ids": (1, 3), **changes}
    return fresh_config(TARGET, **options)


def dflash(objective: Any = None, draft_sampling: str = "argmax", **changes: Any) -> DFlash:
    """A DFlash drafter; `changes` go to the block."""
    extra = {} if objective is None else {"objective_config": objective}
    return DFlash(block_config(**changes), draft_sampling=draft_sampling, **extra)


def dspark(
    rank: int = 3,
    kind: str = "vanilla",
    confidence: bool = True,
    with_markov: bool | None = None,
    sample_from_anchor: bool = True,
    objective: DSparkObjective | None = None,
    layout: str = "DSparkDraftModel",
    **changes: Any,
) -> DSpark:
    """A DSpark drafter; `changes` go to the block."""
    with_markov = confidence and rank > 0 if with_markov is None else with_markov
    heads = MarkovConfig(rank, kind, confidence, with_markov)
    objective = objective or DSparkObjective(confidence_alpha=1.0 if confidence else 0.0)
    return DSpark(block_config(**changes), heads, sample_from_anchor, layout, objective)


def draft_hf(**changes: Any) -> dict[str, Any]:
    """config.json of a public DFlash draft of TARGET."""
    base = {
        **TARGET_HF,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 4,
        "num_target_layers": 5,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [1, 3]},
    }
    return {**base, **changes}


def random_params(drafter: Any, seed: int = 0, scale: float = 0.3) -> Any:
    """Weights large enough that a wrong mask or row shows in every output."""
    abstract = drafter.abstract_params(jnp.float32)
    leaves, tree = jax.tree.flatten(abstract)
    rng = np.random.default_rng(seed)
    drawn = [
        jnp.asarray(
            1 + 0.3 * rng.normal(size=leaf.shape) if leaf.ndim == 1 else scale * rng.normal(size=leaf.shape),
            jnp.float32,
        )
        for leaf in leaves
    ]
    return jax.tree.unflatten(tree, drawn)


def shared(seed: int = 1, vocab: int = VOCAB, hidden: int = HIDDEN) -> Shared:
    """Random embedding and head."""
    rng = np.random.default_rng(seed)
    table = lambda: jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32)  # noqa: E731
    return Shared(table(), table())


def batch(
    anchors: Any,
    length: int = 14,
    keep: Any = None,
    loss_mask: Any = None,
    seed: int = 2,
    taps: int = 2,
    teacher: bool = True,
) -> Batch:
    """Random tokens and features with the given anchors [B, N]."""
    anchors = np.atleast_2d(np.asarray(anchors, np.int32))
    rng = np.random.default_rng(seed)
    size = anchors.shape[0]
    mask = np.ones((size, length), bool) if loss_mask is None else np.atleast_2d(np.asarray(loss_mask, bool))
    return Batch(
        input_ids=jnp.asarray(rng.integers(4, MASK_ID, (size, length)), jnp.int32),
        loss_mask=jnp.asarray(mask),
        features=jnp.asarray(rng.normal(size=(size, length, taps * HIDDEN)), jnp.float32),
        anchors=jnp.asarray(anchors),
        keep=jnp.ones(anchors.shape, bool) if keep is None else jnp.asarray(np.atleast_2d(keep), bool),
        teacher_hidden=jnp.asarray(rng.normal(size=(size, length, HIDDEN)), jnp.float32) if teacher else None,
    )


def page_tables(requests: int, pages: int, seed: int = 3) -> jnp.ndarray:
    """Disjoint pages 1 … requests x pages in a shuffled order."""
    order = 1 + np.random.default_rng(seed).permutation(requests * pages)
    return jnp.asarray(order.reshape(requests, pages), jnp.int32)


def slots(anchors: Any, positions: Any, table: Any, live: Any = None) -> Slots:
    """Decoding requests."""
    anchors = jnp.asarray(anchors, jnp.int32)
    live = jnp.ones(anchors.shape, bool) if live is None else jnp.asarray(live, bool)
    return Slots(anchors, jnp.asarray(positions, jnp.int32), table, live)


def greedy(requests: int) -> SlotSampling:
    """All rows greedy."""
    return SlotSampling.zeros(requests)


def sampled(requests: int, temperature: float = 1.0) -> SlotSampling:
    """All rows sampled at one temperature."""
    ones = jnp.ones(requests, jnp.float32)
    return SlotSampling(temperature * ones, jnp.zeros(requests, jnp.int32), ones, 0 * ones)


def keys(requests: int, seed: int = 4) -> jax.Array:
    """One key a request."""
    return jax.random.split(jax.random.key(seed), requests)
