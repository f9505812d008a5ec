"""Tiny targets and EAGLE drafters for the tests of this folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.target import Target
from jaxspec.drafters.base import Batch
from jaxspec.drafters.draft_tree import DynamicTree, StaticTree
from jaxspec.drafters.eagle import Eagle, EagleObjective
from jaxspec.drafters.eagle3 import DEEPSPEC, Eagle3, Eagle3Objective
from jaxspec.drafters.eagle_config import EagleConfig, fresh_model
from jaxspec.models.decoder import FINAL
from tests.helpers import worlds

DRAFT_VOCAB = 20
DYNAMIC = DynamicTree(top_k=3, depth=3, nodes=9)
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def target(family: str = "qwen3", **changes: Any) -> Target:
    return worlds.tiny_target(family, **changes)


def eagle3(
    model: Target, tree: Any = None, *, reduced: bool = True, layout: str | None = None, **changes: Any
) -> Eagle3:
    """Two taps, q heads unlike the target's, half of the vocabulary."""
    shape = fresh_model(model.config, num_heads=4, num_kv_heads=1, head_dim=6, intermediate_size=40)
    size = DRAFT_VOCAB if reduced else shape.vocab_size
    if layout == DEEPSPEC:
        shape = dataclasses.replace(shape, family="qwen3", qk_norm=True)
        changes |= {"layout": layout, "own_head": False}
    config = EagleConfig(shape, (0, 1), size, model.config.num_layers, model.config.hidden_size)
    options = {"chain_length": 4, "objective_config": Eagle3Objective(ttt_length=4, chunk_rows=0), **changes}
    return Eagle3(config, tree, maps=("d2t", "t2d") if reduced else (), **options)


def eagle(model: Target, tree: Any = DYNAMIC, **changes: Any) -> Eagle:
    shape = fresh_model(model.config, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=40)
    config = EagleConfig(shape, (FINAL,), shape.vocab_size, model.config.num_layers, model.config.hidden_size)
    options = {"chain_length": 4, "objective_config": EagleObjective(noise=0.0, chunk_rows=0), **changes}
    return Eagle(config, tree, **options)


def params_of(drafter: Any, seed: int = 1) -> Any:
    """Random weights, loud enough that every input matters; the maps take every third id."""
    params = drafter.init(jax.random.key(seed), jnp.float32)
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, params)
    if getattr(drafter, "maps", ()):
        counts = np.zeros(drafter.config.model.vocab_size)
        counts[::3] = 1
        params = drafter.with_vocabulary(params, counts)
    return params


def draft(drafter: Any, seed: int = 1) -> Draft:
    return Draft(drafter, params_of(drafter, seed))


def batch(model: Target, size: int = 2, length: int = 12, seed: int = 0, taps: Any = (0, 1), mask: Any = None) -> Batch:
    """Random sequences with the target's own features and final states."""
    ids = jnp.asarray(np.random.default_rng(seed).integers(0, model.config.vocab_size, (size, length)), jnp.int32)
    out = jax.jit(lambda p, x: model.model.forward_sequences(p, x, taps))(model.params, ids)
    mask = np.ones((size, length), bool) if mask is None else np.broadcast_to(mask, (size, length))
    return Batch(
        input_ids=ids,
        loss_mask=jnp.asarray(mask),
        features=out.features,
        anchors=jnp.zeros((size, 0), jnp.int32),
        keep=jnp.zeros((size, 0), bool),
        teacher_hidden=out.hidden,
    )
