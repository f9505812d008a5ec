"""Token losses, position weights and the chunked projection that the training objectives are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.layers import unembed
from jaxspec.parallel.training import apart, batch_shards

DPACE = ("dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only")


def ratio(total: Float[Array, "*s"], weight: Float[Array, "*s"], eps: float = 0.0) -> Float[Array, "*s"]:
    """total / (weight + eps), 0 where nothing was weighed (an all-masked batch trains nothing and is never NaN)."""
    some = weight > 0
    return jnp.where(some, total / jnp.where(some, weight + eps, 1.0), 0.0)


def position_decay(count: int, gamma: float | None) -> Float[Array, "count"]:
    """exp(-k / gamma) for k = 0, 1, …; ones without a gamma."""
    return jnp.exp(-jnp.arange(count) / gamma) if gamma and gamma > 0 else jnp.ones(count)


def negative_log_likelihood(logits: Float[Array, "*t V"], labels: Int[Array, "*t"]) -> Float[Array, "*t"]:
    """-log softmax(logits)[label] in float32."""
    logits = logits.astype(jnp.float32)
    # a sum instead of a lookup: its gradient joins the softmax's, a lookup's is scattered into an array of its own
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(index == labels[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def dpace_weights(
    nll: Float[Array, "*b block"], mask: Float[Array, "*b block"], alpha: float, kind: str
) -> Float[Array, "*b block"]:
    """D-PACE position weights, detached: confidence of the prefix, value of what may follow, or their combination.

    s = (1 - alpha) p + alpha along the block (1 where unsupervised); prefix = running product of s; the full weight
    of a position is the sum of the masked prefixes from it on.
    """
    smoothed = jnp.where(mask > 0, (1 - alpha) * jnp.exp(-nll) + alpha, 1.0)
    prefix = jnp.cumprod(smoothed, axis=-1)
    if kind == "dpace-cumulative-confidence-only":
        return jax.lax.stop_gradient(prefix)
    suffix = jnp.flip(jnp.cumsum(jnp.flip(prefix * mask, -1), axis=-1), -1)
    if kind == "dpace":
        return jax.lax.stop_gradient(suffix)
    return jax.lax.stop_gradient(suffix / jnp.maximum(prefix, jnp.finfo(prefix.dtype).tiny))


def binary_cross_entropy(logits: Float[Array, "*t"], targets: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """BCE with logits, stable at both ends."""
    return jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def smooth_l1(error: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """Half the square up to 1, linear beyond (Huber, beta 1)."""
    size = jnp.abs(error)
    return jnp.where(size < 1, 0.5 * error * error, size - 0.5)


def weighted_sum(values: Float[Array, "*t"], weights: Float[Array, "*t"]) -> Float[Array, ""]:
    """Sum of weights * values; a zero weight drops its value even if it is not finite."""
    return jnp.sum(jnp.where(weights > 0, values * weights, 0.0))


def greedy_acceptance(
    correct: Float[Array, "B N m"], mask: Float[Array, "B N m"]
) -> dict[str, tuple[Float[Array, "..."], Float[Array, "..."]]]:
    """What greedy rounds at these anchors would accept where the text is the target's own greedy answer: slot k is
    reached where the slots before it are right, and accepted where it is right too (the server's conditional
    acceptance); and the mean tokens of such a round, the target's own included. An unsupervised slot ends its block.
    """
    stood = jnp.cumprod(correct * mask, axis=-1)
    before = jnp.concatenate([jnp.ones_like(stood[..., :1]), stood[..., :-1]], axis=-1)
    blocks = jnp.any(mask > 0, axis=-1).astype(jnp.float32)
    return {
        "metric/accepted_position": (jnp.sum(stood, (0, 1)), jnp.sum(before * mask, (0, 1))),
        "metric/accepted_tau": (jnp.sum((1 + jnp.sum(stood, axis=-1)) * blocks), jnp.sum(blocks)),
    }


def with_row_gradients(
    per_token: Callable[..., tuple[Array, Any]], hidden: Float[Array, "*t H"], *rest: Any
) -> tuple[Float[Array, "*t"], Any]:
    """`per_token(hidden, *rest)` = (a value of each row of `hidden` that depends on no other row, what is never
    differentiated). Where a gradient is asked for, that of every value by its row is computed beside the value, from
    the same logits; all that is kept of them are rows as wide as `hidden`. `rest` gets no gradient.
    """

    @jax.custom_vjp
    def run(hidden: Array, *rest: Any) -> tuple[Array, Any]:
        return per_token(hidden, *rest)

    def forward(hidden: Array, *rest: Any) -> tuple[tuple[Array, Any], Array]:
        values, pull, others = jax.vjp(lambda rows: per_token(rows, *rest), hidden, has_aux=True)
        return (values, others), pull(jnp.ones_like(values))[0]

    def backward(slopes: Array, gradients: tuple[Array, Any]) -> tuple[Any, ...]:
        own = gradients[0][..., None] * slopes.astype(jnp.float32)
        return own.astype(slopes.dtype), *[None for _ in rest]

    run.defvjp(forward, backward)
    return run(hidden, *rest)


def weighed_rows(
    compared: Callable[[Any, Any], Callable[[Array, Array], dict[str, Array]]],
    name: str,
    rows: Float[Array, "p n B C H"],
    weights: Float[Array, "p n B C"],
    head: Float[Array, "V H"],
    slices: Any,
    common: Any,
    trained: bool,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sum of weights * terms[name] over all rows, and the terms [p n B C], one slice p after the other and in it one
    step n after the other. Where a gradient is asked for, those by the rows and (`trained`) by the head are computed
    beside the sum from the same logits, and of those nothing is kept: a sum has one cotangent, which scales both.
    Devices that share the batch add up the head's once, behind the last slice.

    Args:
      compared: of (`common`, the leaves of `slices` of one p), the terms [B C] of (logits [B C V], n).
      slices: pytree [p ...]. Neither it nor `common`, `weights` or the terms get a gradient.
    """

    def one(head: Array, common: Any, xs: Any, slopes: bool) -> tuple[dict[str, Array], Array | None]:
        rows, weights, slice_ = xs
        terms_of = compared(common, slice_)

        def step(xs: tuple[Array, Array, Array]) -> tuple[dict[str, Array], Array | None]:
            index, rows, weight = xs

            def named(logits: Array) -> tuple[Array, dict[str, Array]]:
                terms = terms_of(logits, index)
                return weighted_sum(terms[name], weight), terms

            logits = unembed(rows, head)
            if not slopes:
                return terms_of(logits, index), None
            total, pull, terms = jax.vjp(named, logits, has_aux=True)
            return terms, pull(jnp.ones_like(total))[0].astype(rows.dtype)

        return jax.lax.map(step, (jnp.arange(rows.shape[0]), rows, weights))

    @jax.custom_vjp
    def run(rows: Array, head: Array, weights: Array, slices: Any, common: Any) -> tuple[Array, dict[str, Array]]:
        terms, _ = jax.lax.map(lambda xs: one(head, common, xs, False), (rows, weights, slices))
        return weighted_sum(terms[name], weights), terms

    def forward(rows: Array, head: Array, weights: Array, slices: Any, common: Any) -> Any:
        head_ = head.astype(rows.dtype)
        shards = batch_shards() if rows.shape[2] % batch_shards() == 0 else 1
        by_shard = lambda x: x.reshape(x.shape[0], shards, -1, *x.shape[2:])  # noqa: E731

        def add(by_head: Array | None, xs: Any) -> Any:
            terms, slopes = one(head_, common, xs, True)
            by_rows = jax.lax.dot_general(slopes, head_, (((3,), (0,)), ((), ())))
            if by_head is not None:
                every = ((0, 2, 3), (0, 2, 3)), ((1,), (1,))
                parts = by_shard(slopes), by_shard(xs[0])
                by_head = apart(by_head + jax.lax.dot_general(*parts, every, preferred_element_type=jnp.float32))
            return by_head, (terms, by_rows)

        start = apart(jnp.zeros((shards, *head.shape))) if trained else None
        by_head, (terms, by_rows) = jax.lax.scan(add, start, (rows, weights, slices))
        kept = by_rows, None if by_head is None else jnp.sum(by_head, axis=0).astype(head.dtype)
        return (weighted_sum(terms[name], weights), terms), kept

    def backward(kept: tuple[Array, Array | None], gradients: tuple[Array, Any]) -> tuple[Any, ...]:
        scaled = lambda x: None if x is None else (gradients[0] * x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
        return *map(scaled, kept), None, None, None

    run.defvjp(forward, backward)
    return run(rows, head, weights, slices, common)


def slice_width(chunk: int, batch: int, count: int) -> int:
    """Blocks (or rows) of each of `batch` sequences in a slice of about `chunk` of one device's; chunk <= 0: all."""
    return count if chunk <= 0 else max(1, min(count, chunk * batch_shards() // batch))


def in_chunks(per_token: Callable[..., Any], chunk: int, *blocks: Float[Array, "B N ..."], again: bool = True) -> Any:
    """Applies `per_token` to slices of about `chunk` blocks with rematerialisation, so that no [B x N x block x V]
    array exists; without (`again` False) where it keeps none itself. A slice takes as many blocks of every sequence, so
    that devices which share the batch share each slice; `chunk` counts those of one device.

    Every argument has leading axes [B, N]; so has every output. chunk <= 0 takes them all at once. The result does not
    depend on the chunk.
    """
    batch, count = blocks[0].shape[:2]
    each = slice_width(chunk, batch, count)
    rows = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])  # noqa: E731
    whole = lambda x: x.reshape(batch, x.shape[0] // batch, *x.shape[1:])  # noqa: E731
    if each >= count:
        return jax.tree.map(whole, per_token(*map(rows, blocks)))
    pieces = -(-count // each)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pieces * each - count)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, pieces, each, *x.shape[2:]), 1, 0)

    one = lambda xs: jax.tree.map(whole, per_token(*map(rows, xs)))  # noqa: E731
    one = jax.checkpoint(one) if again else one
    out = jax.lax.map(one, tuple(map(split, blocks)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, pieces * each, *x.shape[3:])[:, :count], out)


def contiguous(mask: Bool[Array, "*b block"]) -> Bool[Array, "*b block"]:
    """True up to the first hole (cumulative product along the block)."""
    return jnp.cumprod(mask.astype(jnp.int32), axis=-1).astype(bool)
