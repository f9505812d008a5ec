"""One request's target over the paged cache, driven as the round drives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.checkpoints.target import Target
from jaxspec.models.attention import PagedCausal
from jaxspec.models.cache import KVPool, init_pool
from jaxspec.models.layout import uniform_layout

PAGE = 16


def pages(requests: int, room: int) -> np.ndarray:
    """Page table [R, P] that gives each request pages for `room` slots; page 0 stays the trash page."""
    each = -(-room // PAGE)
    return np.arange(1, requests * each + 1, dtype=np.int32).reshape(requests, each)


class PagedTarget:
    """A target and its K/V pools. Running rows at an earlier position overwrites them: that is how a round cuts."""

    def __init__(self, target: Target, room: int):
        model, config, table = target.model, target.config, pages(1, room)
        self._params = target.params
        count = int(table.max()) + 1

        def init() -> list[KVPool]:
            sizes = (count, PAGE, config.num_kv_heads, config.head_dim)
            return [init_pool(*sizes, target.dtype) for _ in range(config.num_layers)]

        def forward(params: Any, pools: list[KVPool], tokens: Array, at: Array) -> tuple[Array, list[KVPool]]:
            rows = tokens.shape[0]
            layout = uniform_layout(at[None], jnp.full(1, rows), jnp.asarray(table), rows)
            out = model.forward(params, tokens, layout.positions, PagedCausal(layout), pools)
            return model.logits(params, out.hidden), out.caches

        self._pools = jax.jit(init)()
        self._forward = jax.jit(forward)

    def run(self, tokens: np.ndarray, at: int) -> np.ndarray:
        """Logits [M, V] of rows at positions at, at + 1, …, after they wrote their K/V."""
        logits, self._pools = self._forward(self._params, self._pools, tokens, np.int32(at))
        return np.asarray(logits)
