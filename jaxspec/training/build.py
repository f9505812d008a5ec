"""The drafter that a training config describes, fresh or from a checkpoint's weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.checkpoints.drafter import Draft
from jaxspec.config import ObjectiveSection, TrainConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.block_config import BlockConfig, build_target_layer_ids, fresh_config
from jaxspec.drafters.dflare import NUM_TAPS, DFlare
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dflash2 import DFlash2, from_dflash
from jaxspec.drafters.dspark import DSpark, DSparkObjective, with_fresh_heads
from jaxspec.drafters.eagle import Eagle, EagleObjective
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Objective
from jaxspec.drafters.eagle_config import EagleConfig, default_layer_ids, fresh_model
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.drafters.selector import SelectorConfig
from jaxspec.drafters.vocabulary import count_supervised
from jaxspec.errors import ConfigError, problem
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import FINAL
from jaxspec.training.data import Examples

__all__ = ["check_method", "fresh_drafter", "initial_params", "warm_start", "with_objective"]

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
    if section.method in ("eagle", "eagle3"):
        return with_objective(_eagle(config, target), config.objective)
    mask = section.mask_token_id
    if mask is None:
        mask = _MASK_IDS.get((target.family, target.vocab_size))
    block = fresh_config(
        target,
        num_layers=section.num_layers,
        block_size=section.block_size,
        mask_token_id=mask,
        target_layer_ids=section.target_layer_ids or _default_taps(section.method, target),
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads,
        head_dim=section.head_dim,
        intermediate_size=section.intermediate_size,
        layer_types=section.layer_types,
        sliding_window=section.sliding_window,
        is_causal=section.is_causal,
    )
    if section.method != "dspark":
        return with_objective(_of_dflash_family(config, block), config.objective)
    # the objective comes with the drafter, since a default one may name a head that this drafter lacks
    return DSpark(
        block,
        heads=_heads(config),
        sample_from_anchor=section.sample_from_anchor,
        objective_config=_dspark(DSparkObjective(), config.objective),
    )


def _eagle(config: TrainConfig, target: ModelConfig) -> Eagle | Eagle3:
    section = config.drafter
    names = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    model = fresh_model(target, **{name: getattr(section, name) for name in names})
    shape = EagleConfig(model, (FINAL,), model.vocab_size, target.num_layers, target.hidden_size)
    if section.method == "eagle":
        return Eagle(shape)
    size = section.draft_vocab_size or model.vocab_size
    taps = section.target_layer_ids or default_layer_ids(target.num_layers)
    return Eagle3(
        dataclasses.replace(shape, taps=tuple(taps), draft_vocab=size),
        maps=("d2t", "t2d") if size < model.vocab_size else (),
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
    )


def _default_taps(method: str, target: ModelConfig) -> tuple[int, ...] | None:
    """DFlare reads more target layers than it has layers of its own; the others read one for each layer (None)."""
    if method != "dflare":
        return None
    return build_target_layer_ids(target.num_layers, min(NUM_TAPS, max(1, target.num_layers - 3)))


def _of_dflash_family(config: TrainConfig, block: BlockConfig) -> DFlash:
    if config.drafter.method == "dflash2":
        return DFlash2(block, conv=_conv(config), selector=_selector(config))
    return DFlare(block) if config.drafter.method == "dflare" else DFlash(block)


def _conv(config: TrainConfig) -> ConvConfig:
    return ConvConfig(config.drafter.conv_kernel_size, config.drafter.conv_group_size)


def _selector(config: TrainConfig) -> SelectorConfig:
    return SelectorConfig(config.drafter.selector_rank, config.drafter.selector_top_k)


def _heads(config: TrainConfig) -> MarkovConfig:
    section = config.drafter
    return MarkovConfig(
        section.markov_rank, section.markov_head_type, section.confidence_head, section.confidence_head_with_markov
    )


def _dspark(base: DSparkObjective, section: ObjectiveSection) -> DSparkObjective:
    names = ("gamma", "ce_alpha", "l1_alpha", "confidence_alpha", "chunk_blocks")
    return dataclasses.replace(base, **{name: getattr(section, name) for name in names})


def with_objective(drafter: Any, section: ObjectiveSection) -> Drafter:
    """The same drafter, trained with the objective of a config."""
    if isinstance(drafter, (Eagle, Eagle3)):
        return dataclasses.replace(drafter, objective_config=_eagle_objective(drafter.objective_config, section))
    if isinstance(drafter, DSpark):
        return dataclasses.replace(drafter, objective_config=_dspark(drafter.objective_config, section))
    base = drafter.objective_config
    names = [field.name for field in dataclasses.fields(base) if field.name in type(section).model_fields]
    changed = dataclasses.replace(base, **{name: getattr(section, name) for name in names})
    return dataclasses.replace(drafter, objective_config=changed)


def _eagle_objective(base: EagleObjective | Eagle3Objective, section: ObjectiveSection) -> Any:
    if isinstance(base, Eagle3Objective):
        names = ("ttt_length", "step_decay", "lk", "kl_scale", "kl_decay", "keep_products")
        given = {name: getattr(section, name) for name in names}
    else:
        given = {
            "feature_alpha": section.feature_alpha,
            "token_alpha": section.ce_alpha,
            "noise": section.feature_noise,
        }
    return dataclasses.replace(base, chunk_rows=section.chunk_blocks, **given)


def check_method(config: TrainConfig, drafter: Drafter) -> None:
    """The weights that a run starts from must be of the configured method. Raises ConfigError."""
    if drafter.method != config.drafter.method:
        raise ConfigError(
            problem("drafter.method", config.drafter.method, f"{drafter.method}, which drafter.source holds")
        )


def warm_start(config: TrainConfig, draft: Draft) -> Draft:
    """The draft of `drafter.source`, as the configured method trains it: a DFlash 2 may start from a DFlash, with
    convolutions and selector that change nothing at first, and a DSpark from a DFlash or a DSpark without heads, with
    heads that change nothing at first. Raises ConfigError for any other pair of methods."""
    key = jax.random.fold_in(jax.random.key(config.run.seed), _INIT)
    drafter: Drafter
    if (config.drafter.method, draft.drafter.method) == ("dflash2", "dflash"):
        drafter, params = from_dflash(draft.drafter, draft.params, key, _conv(config), _selector(config))
    elif config.drafter.method == "dspark" and _lacks_heads(draft.drafter, _heads(config)):
        _check_anchor_row(config, draft.drafter)
        drafter, params = with_fresh_heads(draft.drafter, draft.params, key, _heads(config))
    else:
        check_method(config, draft.drafter)
        return draft
    return dataclasses.replace(draft, drafter=drafter, params=params, config_raw={}, layout=None)


def _lacks_heads(drafter: Any, wanted: MarkovConfig) -> bool:
    none = not getattr(drafter, "heads", None) or not (drafter.heads.rank or drafter.heads.confidence)
    return drafter.method in ("dflash", "dspark") and none and bool(wanted.rank or wanted.confidence)


def _check_anchor_row(config: TrainConfig, drafter: Any) -> None:
    predicts, asked = getattr(drafter, "sample_from_anchor", False), config.drafter.sample_from_anchor
    if predicts != asked:
        found, expected = (str(value).lower() for value in (asked, predicts))
        raise ConfigError(
            problem(
                "drafter.sample_from_anchor", f"found {found}", f"{expected}, as drafter.source was trained to predict"
            )
        )


def initial_params(drafter: Any, key: jax.Array, dtype: Any, examples: Examples | None = None) -> Any:
    """Fresh parameters of a run's key; a reduced vocabulary is made of the data's supervised tokens."""
    params = drafter.init(jax.random.fold_in(key, _INIT), dtype)
    if examples is None or not hasattr(drafter, "with_vocabulary"):
        return params
    counts = count_supervised([(examples.tokens, examples.loss_mask)], drafter.config.model.vocab_size)
    return drafter.with_vocabulary(params, counts)
