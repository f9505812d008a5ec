"""DSpark's heads: a low-rank Markov correction of the block's logits, and a confidence per slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly

KINDS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class MarkovConfig:
    """rank 0 = no correction; `confidence_with_markov` feeds W1[previous token] to the confidence head too."""

    rank: int = 256
    kind: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"markov_rank: found {self.rank}, expected 0 (off) or more")
        if self.kind not in KINDS:
            raise ConfigError(f"markov_head_type: found {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.confidence and self.confidence_with_markov and not self.rank:
            raise ConfigError(
                "confidence_head_with_markov: found true with markov_rank 0, expected false (there is no W1)"
            )


def abstract_params(config: MarkovConfig, vocab: int, hidden: int, dtype: Any) -> ly.Params:
    """`markov_head.*` and `confidence_head.*` tensors of the checkpoint."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    rank = config.rank
    params: ly.Params = {}
    if rank:
        head = {"markov_w1": {"weight": leaf(vocab, rank)}, "markov_w2": {"weight": leaf(vocab, rank)}}
        if config.kind == "gated":
            head["gate_proj"] = {"weight": leaf(rank, hidden + rank), "bias": leaf(rank)}
        if config.kind == "rnn":
            head["joint_proj"] = {"weight": leaf(3 * rank, 2 * rank + hidden), "bias": leaf(3 * rank)}
        params["markov_head"] = head
    if config.confidence:
        width = hidden + (rank if config.confidence_with_markov else 0)
        params["confidence_head"] = {"proj": {"weight": leaf(1, width), "bias": leaf(1)}}
    return params


def step(
    config: MarkovConfig,
    params: ly.Params,
    state: Float[Array, "*rows r"],
    hidden: Float[Array, "*rows H"],
    prev: Int[Array, "*rows"],
) -> tuple[Float[Array, "*rows r"], Float[Array, "*rows r"]]:
    """New state and the latent z whose product with W2 corrects the logits; `state` matters to the rnn head only."""
    head = params["markov_head"]
    previous = ly.embed(head["markov_w1"]["weight"], prev).astype(hidden.dtype)
    if config.kind == "vanilla":
        return state, previous
    if config.kind == "gated":
        gate = _affine(head["gate_proj"], jnp.concatenate([hidden, previous], axis=-1))
        return state, jax.nn.sigmoid(gate) * previous
    joint = _affine(head["joint_proj"], jnp.concatenate([state, previous, hidden], axis=-1))
    gate, candidate, output = jnp.split(joint, 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)


def latents(
    config: MarkovConfig, params: ly.Params, hidden: Float[Array, "*b m H"], prev: Int[Array, "*b m"]
) -> Float[Array, "*b m r"]:
    """z of every slot of a block whose previous tokens are known (teacher forcing)."""
    state = jnp.zeros((*prev.shape[:-1], config.rank), hidden.dtype)
    if config.kind != "rnn":
        return step(config, params, state[..., None, :], hidden, prev)[1]
    slots = (jnp.moveaxis(hidden, -2, 0), jnp.moveaxis(prev, -1, 0))
    _, z = jax.lax.scan(lambda s, xs: step(config, params, s, *xs), state, slots)
    return jnp.moveaxis(z, 0, -2)


def correction(params: ly.Params, z: Float[Array, "*rows r"]) -> Float[Array, "*rows V"]:
    """W2 z in float32."""
    return ly.unembed(z, params["markov_head"]["markov_w2"]["weight"])


def confidence_logits(
    config: MarkovConfig, params: ly.Params, hidden: Float[Array, "*rows H"], prev: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Raw float32 logit that the slot's token will be accepted. It looks at the previous token, never at its own."""
    parts = [hidden]
    if config.confidence_with_markov:
        parts.append(ly.embed(params["markov_head"]["markov_w1"]["weight"], prev).astype(hidden.dtype))
    return _affine(params["confidence_head"]["proj"], jnp.concatenate(parts, axis=-1).astype(jnp.float32))[..., 0]


def calibrate(
    logits: Float[Array, "*rows m"], temperatures: Float[Array, "m"] | None = None
) -> Float[Array, "*rows m"]:
    """Confidence: sigmoid of the raw logit over its slot's calibration temperature."""
    return jax.nn.sigmoid(logits if temperatures is None else logits / temperatures)


def _affine(params: ly.Params, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
    return ly.project(x, params["weight"]) + params["bias"].astype(x.dtype)
