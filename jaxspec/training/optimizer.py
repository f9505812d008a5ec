"""AdamW on float32 masters, clipping and learning-rate schedules as the published recipes have them.

The learning rate is a function of the run's own step counter, in optimizer steps, not of a counter inside the
optimizer: a skipped step or a restart cannot shift the schedule. Weight decay is decoupled (AdamW). Sources:
SpecForge, DeepSpec and AngelSlim trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.config import OptimizerSection
from jaxspec.errors import ConfigError, problem

__all__ = ["apply", "averaged", "build", "clip_by_global_norm", "schedule"]

_CLIP_EPS = 1e-6

Schedule = Callable[[jax.Array], jax.Array]


def schedule(config: OptimizerSection, total_steps: int | None) -> Schedule:
    """Learning rate of a 0-based optimizer step, float32.

    Warm-up covers warmup_ratio x total steps, rounded down: (step + warmup_offset) / warm of the peak. Then constant,
    or half a cosine from the peak at the end of the warm-up down to 0 at `total_steps`.

    Args:
      total_steps: None where the run is limited by time only.

    Raises:
      ConfigError: the schedule depends on a number of steps that the config does not give.
    """
    if total_steps is None:
        if config.schedule == "cosine" or config.warmup_ratio > 0:
            raise ConfigError(
                problem(
                    "run.steps",
                    "no run.steps and no run.epochs",
                    "one of them, since optimizer.schedule and warmup_ratio are shares of the steps",
                    "set run.steps (run.seconds may end the run earlier), or schedule=constant with warmup_ratio=0",
                )
            )
        return lambda step: jnp.full((), config.learning_rate, jnp.float32)
    warm = int(config.warmup_ratio * total_steps)

    def rate(step: jax.Array) -> jax.Array:
        now = step.astype(jnp.float32)
        rising = (now + config.warmup_offset) / max(warm, 1)
        done = jnp.clip((now - warm) / max(total_steps - warm, 1), 0.0, 1.0)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * done)) if config.schedule == "cosine" else jnp.ones_like(now)
        return jnp.float32(config.learning_rate) * jnp.where(step < warm, jnp.minimum(rising, 1.0), falling)

    return rate


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), the norm taken in float32 (torch's convention; optax's
    own has no epsilon)."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        coefficient = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + _CLIP_EPS))
        return jax.tree.map(lambda grad: grad * coefficient, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def build(config: OptimizerSection) -> optax.GradientTransformation:
    """Clip, Adam moments, decoupled decay. The learning rate is applied by `apply`."""
    return optax.chain(
        clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay),
    )


def apply(
    transformation: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, learning_rate: jax.Array
) -> tuple[Any, Any]:
    """New (params, opt_state). All leaves float32."""
    updates, opt_state = transformation.update(grads, opt_state, params)
    return jax.tree.map(lambda param, update: param - learning_rate * update, params, updates), opt_state


def averaged(ema: Any, params: Any, decay: float, step: jax.Array) -> Any:
    """The average after 0-based optimizer step `step` has given `params`: d x ema + (1 - d) x params, in float32.

    d is `decay`, at first min(decay, (1 + step) / (10 + step)), so that the random start is forgotten within tens of
    steps whatever the decay (the convention of TensorFlow's ExponentialMovingAverage with num_updates).
    """
    now = step.astype(jnp.float32)
    kept = jnp.minimum(jnp.float32(decay), (1.0 + now) / (10.0 + now))
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new, ema, params)
