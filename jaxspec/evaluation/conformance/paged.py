"""One request's target over the paged cache, driven as the round drives it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.checkpoints.target import Target
from jaxspec.models.attention import PagedCausal
from jaxspec.models.cache import init_pool
from jaxspec.models.layout import uniform_layout

PAGE = 16


def pages(requests: int, room: int) -> Int[Array, "R P"]:
    """Page table that gives each request pages for `room` slots; page 0 stays the trash page."""
    each = -(-room // PAGE)
    return jnp.arange(1, requests * each + 1, dtype=jnp.int32).reshape(requests, each)


class PagedTarget:
    """A target and its K/V pools. Running rows at an earlier position again overwrites them: that is how a round cuts."""

    def __init__(self, target: Target, room: int):
        self._target = target
        self._table = pages(1, room)
        config = target.model.config
        count = int(self._table.max()) + 1
        dtype = target.model.embedding(target.params).dtype
        self._pools = [
            init_pool(count, PAGE, config.num_kv_heads, config.head_dim, dtype) for _ in range(config.num_layers)
        ]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._target.model.config.vocab_size

    def run(self, tokens: Int[Array, "M"], at: int) -> Float[Array, "M V"]:
        """Logits of rows at positions at, at + 1, …, after they wrote their K/V."""
        model, rows = self._target.model, tokens.shape[0]

        def forward(params, pools, tokens, first):
            layout = uniform_layout(first, jnp.full((1,), rows, jnp.int32), self._table, rows)
            out = model.forward(params, tokens, layout.positions, PagedCausal(layout), pools)
            return model.logits(params, out.hidden), out.caches

        logits, self._pools = jax.jit(forward)(self._target.params, self._pools, tokens, jnp.full((1,), at, jnp.int32))
        return logits
