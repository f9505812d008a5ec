"""The drafter that a training config describes, fresh or from a checkpoint's weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.config import ObjectiveSection, TrainConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash, DFlashObjective
from jaxspec.drafters.dspark import DSpark, DSparkObjective
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.errors import ConfigError, problem
from jaxspec.models.config import ModelConfig

__all__ = ["check_method", "fresh_drafter", "initial_params", "with_objective"]

# (family, vocabulary) -> an id that no text uses: Qwen3's reserved row as its public drafters have it; SmolLM2's
# `<empty_output>`
_MASK_IDS = {("qwen3", 151936): 151669, ("llama", 49152): 16}
_INIT = 2  # purpose folded into the run's key; the step uses 0 and 1


def fresh_drafter(config: TrainConfig, target: ModelConfig) -> Drafter:
    """The drafter of `config.drafter`, with the objective of `config.objective`.

    Raises:
      ConfigError: something does not fit the target, or no mask token is given and none is known.
    """
    section = config.drafter
    mask = section.mask_token_id
    if mask is None:
        mask = _MASK_IDS.get((target.family, target.vocab_size))
    block = fresh_config(
        target,
        num_layers=section.num_layers,
        block_size=section.block_size,
        mask_token_id=mask,
        target_layer_ids=section.target_layer_ids,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads,
        head_dim=section.head_dim,
        intermediate_size=section.intermediate_size,
        layer_types=section.layer_types,
        sliding_window=section.sliding_window,
        is_causal=section.is_causal,
    )
    if section.method == "dflash":
        return with_objective(DFlash(block), config.objective)
    heads = MarkovConfig(
        section.markov_rank, section.markov_head_type, section.confidence_head, section.confidence_head_with_markov
    )
    # the objective comes with the drafter, since a default one may name a head that this drafter lacks
    return DSpark(
        block,
        heads=heads,
        sample_from_anchor=section.sample_from_anchor,
        objective_config=_dspark(DSparkObjective(), config.objective),
    )


def _dspark(base: DSparkObjective, section: ObjectiveSection) -> DSparkObjective:
    names = ("gamma", "ce_alpha", "l1_alpha", "confidence_alpha", "chunk_blocks")
    return dataclasses.replace(base, **{name: getattr(section, name) for name in names})


def with_objective(drafter: Any, section: ObjectiveSection) -> Drafter:
    """The same drafter, trained with the objective of a config."""
    if isinstance(drafter, DSpark):
        return dataclasses.replace(drafter, objective_config=_dspark(drafter.objective_config, section))
    names = [field.name for field in dataclasses.fields(DFlashObjective)]
    return dataclasses.replace(
        drafter, objective_config=DFlashObjective(**{name: getattr(section, name) for name in names})
    )


def check_method(config: TrainConfig, drafter: Drafter) -> None:
    """The weights that a run starts from must be of the configured method. Raises ConfigError."""
    if drafter.method != config.drafter.method:
        raise ConfigError(
            problem("drafter.method", config.drafter.method, f"{drafter.method}, which drafter.source holds")
        )


def initial_params(drafter: Drafter, key: jax.Array, dtype: Any) -> Any:
    """Fresh parameters of a run's key."""
    return drafter.init(jax.random.fold_in(key, _INIT), dtype)
