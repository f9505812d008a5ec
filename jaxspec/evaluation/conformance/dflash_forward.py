"""Kind 2: DFlash's draft forward, at once and step by step over the committed context."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Rows, Shared, Slots
from jaxspec.drafters.dflash import DFlash
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import draft_of, shared_of, target_of
from jaxspec.evaluation.conformance.paged import PAGE, pages
from jaxspec.models.cache import gather
from jaxspec.models.layout import uniform_layout


def without_windows(drafter: DFlash) -> DFlash:
    """The drafter as the reference's inference code runs it: without an attention mask, so that its sliding layers see
    the whole context and the whole block. (This project serves them with the mask they were trained with.)"""
    config = drafter.config
    model = dataclasses.replace(config.model, layer_windows=(None,) * config.model.num_layers)
    return dataclasses.replace(drafter, config=dataclasses.replace(config, model=model, is_causal=None))


def draft_forward(case: Case) -> Tensors:
    """Features, projected context, one block a sequence without a past, then blocks over a growing context."""
    target, draft, shared = target_of(case), draft_of(case), shared_of(case)
    drafter, params = without_windows(draft.drafter), draft.params
    ids, starts = case.input("input_ids").astype(np.int32), [int(start) for start in case.input("starts")]

    @jax.jit
    def project(target_params: Any, params: Any, ids: Array) -> tuple[Array, Array]:
        features = target.model.forward_sequences(target_params, ids, drafter.taps).features
        return features, drafter.project_context(params, features)

    found: Tensors = dict(
        zip(("features", "projected_context"), map(np.asarray, project(target.params, params, ids)), strict=True)
    )
    features = found["features"]
    context = DraftContext(drafter, params, shared, requests=ids.shape[0], room=max(starts))
    context.commit(features[:, : starts[-1]], ids, at=0)
    block = context.block(ids[:, starts[-1]], starts[-1])
    found["oneshot_hidden"], found["oneshot_logits"] = block["hidden"], block["logits"]

    context = DraftContext(drafter, params, shared, requests=1, room=max(starts))
    done = 0
    for step, start in enumerate(starts):
        context.commit(features[:1, done:start], ids[:1], at=done)
        block = context.block(ids[:1, start], start)
        rows = block.pop("positions")
        found[f"step{step}_position_ids"] = np.concatenate([np.arange(done, start), rows[0]])[None]
        found |= {f"step{step}_{name}": value for name, value in block.items()}
        done = start
    for layer, (keys, values) in enumerate(context.rows()):
        for name, cached in (("k", keys), ("v", values)):
            found[f"final_cache_{name}_{layer}"] = np.moveaxis(cached[:, :done], 1, 2)
    return found


class DraftContext:
    """The drafter's paged context of a few requests that grow together, written and read as the round does it."""

    def __init__(self, drafter: DFlash, params: Any, shared: Shared, requests: int, room: int):
        self._params, self._shared, self._requests, self._room = params, shared, requests, room
        self._table = table = pages(requests, room)
        self._state = jax.jit(lambda: drafter.init_state(int(table.max()) + 1, PAGE, params["fc"]["weight"].dtype))()

        def commit(
            params: Any, shared: Shared, state: Any, features: Array, tokens: Array, following: Array, at: Array
        ) -> Any:
            count = tokens.shape[1]
            layout = uniform_layout(jnp.full(requests, at), jnp.full(requests, count), jnp.asarray(table), count)
            rows = Rows(features.reshape(requests * count, -1), tokens.reshape(-1), following.reshape(-1))
            return drafter.commit(params, shared, state, rows, layout)

        def block(params: Any, shared: Shared, state: Any, anchors: Array, at: Array) -> dict[str, Array]:
            slots = Slots(anchors, jnp.full(requests, at), jnp.asarray(table), jnp.ones(requests, bool))
            keys = jax.random.split(jax.random.key(0), requests)
            hidden = drafter.block_hidden(params, shared, state, slots)
            return {
                "positions": slots.positions[:, None] + jnp.arange(drafter.config.block_size),
                "block_ids": drafter.block_ids(anchors),
                "hidden": hidden,
                "logits": drafter.block_logits(shared, hidden[:, 1:]),
                "tokens": drafter.propose(params, shared, state, slots, keys, SlotSampling.zeros(requests)).tokens,
            }

        self._commit, self._block = jax.jit(commit), jax.jit(block)

    def commit(self, features: np.ndarray, ids: np.ndarray, at: int) -> None:
        """Commits the next rows of every request: features [R, n, T x H] from position `at` on, ids [R, S] whole."""
        count = features.shape[1]
        if count:
            tokens, following = ids[:, at : at + count], ids[:, at + 1 : at + count + 1]
            self._state = self._commit(
                self._params, self._shared, self._state, features, tokens, following, np.int32(at)
            )

    def block(self, anchors: np.ndarray, at: int) -> Tensors:
        """One block a request at position `at`: positions and ids of its rows, hidden states, logits, greedy tokens."""
        out = self._block(self._params, self._shared, self._state, anchors, np.int32(at))
        return {name: np.asarray(value) for name, value in out.items()}

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """K and V of every layer, [R, room, kv heads, D]."""
        read = jax.jit(
            lambda state: [
                gather(pool, jnp.asarray(self._table), jnp.full(self._requests, self._room)) for pool in state
            ]
        )
        return [(np.asarray(keys), np.asarray(values)) for keys, values in read(self._state)]


KINDS = {"2.dflash_draft_forward": draft_forward}
