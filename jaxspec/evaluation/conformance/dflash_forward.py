"""Kind 2: DFlash's draft forward, at once and step by step over the committed context."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Rows, Slots
from jaxspec.drafters.dflash import DFlash
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.evaluation.conformance.material import draft_of, shared_of, target_of
from jaxspec.evaluation.conformance.paged import PAGE, pages
from jaxspec.models.cache import gather
from jaxspec.models.layout import uniform_layout


def without_windows(drafter: DFlash) -> DFlash:
    """The drafter as the reference's inference code runs it: it passes no attention mask, so that its sliding layers see
    the whole context and the whole block. (This project serves them with the mask they were trained with.)"""
    config = drafter.config
    model = dataclasses.replace(config.model, layer_windows=(None,) * config.model.num_layers)
    return dataclasses.replace(drafter, config=dataclasses.replace(config, model=model, is_causal=None))


def draft_forward(case: Case) -> Tensors:
    """Features, projected context, one block a sequence without a past, then successive blocks over a growing context."""
    target, draft, shared = target_of(case), draft_of(case), shared_of(case)
    drafter, params = without_windows(draft.drafter), draft.params
    ids, starts = jnp.asarray(case.input("input_ids"), jnp.int32), [int(start) for start in case.input("starts")]
    features = target.model.forward_sequences(target.params, ids, drafter.taps).features
    found: Tensors = {"features": features, "projected_context": drafter.project_context(params, features)}
    context = DraftContext(drafter, params, shared, requests=ids.shape[0], room=max(starts))
    context.commit(features[:, : starts[-1]], ids, at=0)
    block = context.block(ids[:, starts[-1]], starts[-1])
    found["oneshot_hidden"], found["oneshot_logits"] = block["hidden"], block["logits"]

    context = DraftContext(drafter, params, shared, requests=1, room=max(starts))
    done = 0
    for step, start in enumerate(starts):
        rows = context.commit(features[:1, done:start], ids[:1], at=done)
        block = context.block(ids[:1, start], start)
        found[f"step{step}_position_ids"] = jnp.concatenate([rows, block.pop("positions")[0]])[None]
        found |= {f"step{step}_{name}": value for name, value in block.items()}
        done = start
    for layer, pool in enumerate(context.state):
        keys, values = gather(pool, context.table, jnp.full((1,), done))
        for name, cached in (("k", keys), ("v", values)):
            found[f"final_cache_{name}_{layer}"] = np.moveaxis(np.asarray(cached)[:, :done], 1, 2)
    return found


class DraftContext:
    """The drafter's paged context of a few requests that grow together, written and read as the round does it."""

    def __init__(self, drafter: DFlash, params, shared, requests: int, room: int):
        self._drafter, self._params, self._shared = drafter, params, shared
        # new functions, so that one context never runs what another one traced
        self._commit = jax.jit(lambda *inputs: drafter.commit(*inputs))
        self._hidden = jax.jit(lambda *inputs: drafter.block_hidden(*inputs))
        self._propose = jax.jit(lambda *inputs: drafter.propose(*inputs))
        self.table = pages(requests, room)
        self.state = drafter.init_state(int(self.table.max()) + 1, PAGE, params["fc"]["weight"].dtype)

    def commit(self, features: Array, ids: Array, at: int) -> Array:
        """Commits the next rows of every request ([R, n, T x H], from position `at` on); their positions."""
        requests, count = features.shape[:2]
        layout = uniform_layout(jnp.full((requests,), at), jnp.full((requests,), count), self.table, count)
        tokens, following = ids[:, at : at + count], ids[:, at + 1 : at + count + 1]
        rows = Rows(features.reshape(requests * count, -1), tokens.reshape(-1), following.reshape(-1))
        if count:
            self.state = self._commit(self._params, self._shared, self.state, rows, layout)
        return layout.positions[:count]

    def block(self, anchors: Array, start: int) -> dict[str, Array]:
        """One block a request at position `start`: positions and ids of its rows, hidden states, logits, greedy tokens."""
        drafter, size = self._drafter, self._drafter.config.block_size
        positions = jnp.full(anchors.shape, start)
        slots = Slots(anchors, positions, self.table, jnp.ones(anchors.shape, bool))
        hidden = self._hidden(self._params, self._shared, self.state, slots)
        keys = jax.random.split(jax.random.key(0), anchors.shape[0])
        proposal = self._propose(self._params, self._shared, self.state, slots, keys, SlotSampling.zeros(anchors.shape[0]))
        return {
            "positions": positions[:, None] + jnp.arange(size),
            "block_ids": drafter.block_ids(anchors),
            "hidden": hidden,
            "logits": drafter.block_logits(self._shared, hidden[:, 1:]),
            "tokens": proposal.tokens,
        }


KINDS = {"2.dflash_draft_forward": draft_forward}
