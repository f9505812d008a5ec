"""Method defaults and contradictions: what one key says about another.

`fill_*` run before validation, on the raw mapping, and write in what the method publishes, so that a resolved config
holds every value and loads back to itself. `check_*` run on the validated sections.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.config import eagle_rules, feature_rules, presets
from jaxspec.config.schema import contradiction
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.config.serve import EngineSection, ServeConfig
    from jaxspec.config.train import DrafterSection, RunSection, TrainConfig

# DFlash paper, appendix on training: gamma by block size. DSpark: DeepSpec's training defaults.
_DFLASH_GAMMA = ((16, 7.0), (10, 5.0), (0, 4.0))
_DSPARK_GAMMA = 4.0
_DFLARE_GAMMA_PER_EPOCH = 0.5
_NO_HEADS = {"markov_rank": 0, "confidence_head": False, "sample_from_anchor": False}
_DRAFTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16, **_NO_HEADS},
    "dflash2": {
        "block_size": 16,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        **_NO_HEADS,
    },
    "dflare": {"block_size": 16, "num_layers": 7, **_NO_HEADS},
    "dspark": {"block_size": 7, "markov_rank": 256, "confidence_head": True, "sample_from_anchor": True},
    **{method: {**sizes, **_NO_HEADS} for method, sizes in eagle_rules.DRAFTER_DEFAULTS.items()},
}
_OBJECTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": {"ce_alpha": 1.0, "l1_alpha": 0.0},
    "dflash2": {"ce_alpha": 1.0, "l1_alpha": 0.0, "selector_alpha": 1.0},
    "dflare": {"ce_alpha": 1.0, "l1_alpha": 0.0},
    "dspark": {"ce_alpha": 0.1, "l1_alpha": 0.9},
    **eagle_rules.OBJECTIVE_DEFAULTS,
}
RUN_FOLDERS = ("best", "checkpoints", "tensorboard")  # in a run's directory
_DFLASH_FAMILY = ("dflash", "dflash2", "dflare")
# keys that belong to one method: anywhere else only their neutral value (0, false) makes sense
_ONLY_DFLASH2 = {
    "drafter": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "objective": ("selector_alpha", "selector_warmup_ratio", "selector_ramp_ratio", "selector_stop_gradient"),
}


def fill_drafter(data: Any) -> Any:
    """Adds the method's defaults for keys that are absent or null."""
    if not isinstance(data, Mapping) or data.get("method") not in _DRAFTER_DEFAULTS:
        return data
    filled = dict(data)
    for name, value in _DRAFTER_DEFAULTS[filled["method"]].items():
        if filled.get(name) is None:
            filled[name] = value
    if filled.get("confidence_head_with_markov") is None:
        filled["confidence_head_with_markov"] = bool(filled["confidence_head"]) and bool(filled["markov_rank"])
    return filled


def fill_train(data: Any) -> Any:
    """Adds absent optional sections, the preset and the objective's defaults, which depend on the drafter."""
    if not isinstance(data, Mapping):
        return data
    filled = {"objective": {}, "features": {}, "optimizer": {}, "mesh": {}, **presets.fill(data)}
    drafter, objective = fill_drafter(filled.get("drafter")), filled["objective"]
    if not isinstance(drafter, Mapping) or not isinstance(objective, Mapping):
        return filled
    method = drafter.get("method")
    if method not in _OBJECTIVE_DEFAULTS:
        return filled
    defaults = dict(_OBJECTIVE_DEFAULTS[method])
    defaults["confidence_alpha"] = 1.0 if drafter.get("confidence_head") is True else 0.0
    block = drafter.get("block_size")
    if method == "dspark":
        defaults["gamma"] = _DSPARK_GAMMA
    elif method in _DFLASH_FAMILY and isinstance(block, int):
        defaults["gamma"] = next(gamma for least, gamma in _DFLASH_GAMMA if block >= least or least == 0)
    filled["objective"] = {**defaults, **objective}  # an explicit `gamma: null` stays: no decay
    if method == "dflare":
        decays = filled["objective"]["gamma"] is not None and objective.get("loss_type") in (None, "weighted_ce")
        filled["objective"].setdefault("gamma_per_epoch", _DFLARE_GAMMA_PER_EPOCH if decays else 0.0)
        if isinstance(filled.get("data"), Mapping):
            filled["data"] = {"anchor_rule": "legacy", **filled["data"]}
    return filled


def check_drafter(drafter: DrafterSection) -> None:
    """Keys of the drafter that contradict each other. Raises ConfigError naming both."""
    if drafter.method in _DFLASH_FAMILY:
        _check_dflash(drafter)
    _check_only_dflash2(drafter.method, "drafter", drafter)
    eagle_rules.check_drafter(drafter)
    if drafter.method in eagle_rules.EAGLE:
        _check_attention(drafter)
        return
    if drafter.block_size < 2 and not drafter.sample_from_anchor:
        raise contradiction(
            "drafter.block_size",
            "drafter.sample_from_anchor",
            f"a block of {drafter.block_size} row without a predicting anchor proposes nothing",
            "set drafter.block_size to at least 2",
        )
    if drafter.markov_rank == 0 and drafter.markov_head_type != "vanilla":
        raise contradiction(
            "drafter.markov_head_type",
            "drafter.markov_rank",
            f"{drafter.markov_head_type} describes a head that rank 0 leaves out",
            "set drafter.markov_rank > 0 or leave drafter.markov_head_type out",
        )
    if drafter.confidence_head_with_markov and not drafter.confidence_head:
        raise contradiction(
            "drafter.confidence_head_with_markov",
            "drafter.confidence_head",
            "there is no confidence head to widen",
            "set drafter.confidence_head=true or leave confidence_head_with_markov out",
        )
    if drafter.confidence_head_with_markov and drafter.markov_rank == 0:
        raise contradiction(
            "drafter.confidence_head_with_markov",
            "drafter.markov_rank",
            "rank 0 has no Markov embedding to read",
            "set drafter.markov_rank > 0 or drafter.confidence_head_with_markov=false",
        )
    _check_attention(drafter)


def _check_dflash(drafter: DrafterSection) -> None:
    if drafter.block_size < 2:
        raise contradiction(
            "drafter.method",
            "drafter.block_size",
            f"{drafter.method} discards the anchor row, so a block of {drafter.block_size} proposes nothing",
            "set drafter.block_size to at least 2",
        )
    for name in ("markov_rank", "confidence_head", "confidence_head_with_markov", "sample_from_anchor"):
        value = getattr(drafter, name)
        if value:
            raise contradiction(
                "drafter.method",
                f"drafter.{name}",
                f"{drafter.method} has none of it but {name} is {str(value).lower()}",
                f"set drafter.method=dspark or leave drafter.{name} out",
            )
    if drafter.markov_head_type != "vanilla":
        raise contradiction(
            "drafter.method",
            "drafter.markov_head_type",
            f"{drafter.method} has no Markov head",
            "set drafter.method=dspark or leave drafter.markov_head_type out",
        )


def _check_only_dflash2(method: str, section: str, values: Any) -> None:
    """Keys of the convolutions, the selector and its loss: nothing elsewhere, sizes of at least 1 in dflash2."""
    for name in _ONLY_DFLASH2[section]:
        value = getattr(values, name)
        if method != "dflash2" and value:
            raise contradiction(
                "drafter.method",
                f"{section}.{name}",
                f"{method} has neither convolutions nor a selector",
                f"set drafter.method=dflash2 or leave {section}.{name} out",
            )
        if method == "dflash2" and section == "drafter" and value < 1:
            raise contradiction(
                "drafter.method",
                f"drafter.{name}",
                f"dflash2 needs it but {name} is {value}",
                f"set drafter.{name} to at least 1, or drafter.method=dflash",
            )
    if section == "drafter" and method == "dflash2" and values.conv_kernel_size > values.block_size:
        raise contradiction(
            "drafter.conv_kernel_size",
            "drafter.block_size",
            f"{values.conv_kernel_size} taps reach out of a block of {values.block_size} rows",
            "lower drafter.conv_kernel_size",
        )


def _check_attention(drafter: DrafterSection) -> None:
    if drafter.layer_types is not None and len(drafter.layer_types) != drafter.num_layers:
        raise contradiction(
            "drafter.layer_types",
            "drafter.num_layers",
            f"{len(drafter.layer_types)} types for {drafter.num_layers} layers",
            "give one type per layer",
        )
    sliding = "sliding_attention" in (drafter.layer_types or ())
    if sliding and drafter.sliding_window is None:
        raise contradiction(
            "drafter.layer_types",
            "drafter.sliding_window",
            "there are sliding layers but the window is null",
            "set drafter.sliding_window",
        )
    if drafter.sliding_window is not None and not sliding:
        raise contradiction(
            "drafter.sliding_window",
            "drafter.layer_types",
            "a window is given but no layer is sliding_attention",
            "name the sliding layers in drafter.layer_types or leave the window out",
        )
    heads, kv_heads = drafter.num_heads, drafter.num_kv_heads
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise contradiction(
            "drafter.num_heads",
            "drafter.num_kv_heads",
            f"{heads} heads cannot be shared out over {kv_heads} key/value heads",
            "make num_heads a multiple of num_kv_heads",
        )
    if drafter.head_dim is not None and drafter.head_dim % 2:
        raise ConfigError(f"drafter.head_dim: found {drafter.head_dim}, expected an even number (rotary embedding)")
    ids = drafter.target_layer_ids
    if ids is not None and len(set(ids)) != len(ids):
        raise ConfigError(
            f"drafter.target_layer_ids: found {list(ids)}, expected each layer once; drop the repeated ids"
        )
    if ids is not None and min(ids) < -1:
        raise ConfigError(
            f"drafter.target_layer_ids: found {min(ids)}, expected layer ids from 0 (-1 is the embedding)"
        )


def _check_export(run: RunSection) -> None:
    """The export is a folder of its own: it may lie in the run's, but not where the run writes."""
    if run.export is None:
        return
    export, directory = (Path(os.path.abspath(place)) for place in (run.export, run.directory))
    inside = export.relative_to(directory).parts if export.is_relative_to(directory) else None
    if directory.is_relative_to(export) or (inside and inside[0] in RUN_FOLDERS):
        why = f"the run writes to {run.directory}, and the export to {run.export}"
        raise contradiction("run.export", "run.directory", why, "give the export a folder of its own")


def check_train(config: TrainConfig) -> None:
    """Contradictions between sections of a training config."""
    _check_objective(config)
    feature_rules.check_features(config)
    run, data = config.run, config.data
    if run.steps is None and run.epochs is None and run.seconds is None:
        raise ConfigError(
            "run.steps, run.epochs and run.seconds: all three are missing, expected at least one limit; "
            "set one, for example run.epochs=6"
        )
    _check_export(run)
    optimizer = config.optimizer
    if run.steps is None and run.epochs is None and (optimizer.schedule == "cosine" or optimizer.warmup_ratio > 0):
        raise contradiction(
            "optimizer.schedule (with optimizer.warmup_ratio)",
            "run.steps (or run.epochs)",
            "the schedule is a share of the steps and only run.seconds limits them",
            "set run.steps or run.epochs, or optimizer.schedule=constant with optimizer.warmup_ratio=0",
        )
    if run.eval_every and run.eval_prompts is None:
        raise contradiction(
            "run.eval_every",
            "run.eval_prompts",
            "evaluations are asked for but there are no prompts",
            "set run.eval_prompts to a JSONL of prompts or run.eval_every=0",
        )
    if run.export_weights == "best" and not run.eval_every:
        raise contradiction(
            "run.export_weights",
            "run.eval_every",
            "the best weights are found by evaluations and there are none",
            "set run.eval_every and run.eval_prompts, or run.export_weights=last",
        )
    if data.min_loss_tokens > data.max_length:
        raise contradiction(
            "data.min_loss_tokens",
            "data.max_length",
            f"no sequence of at most {data.max_length} tokens has {data.min_loss_tokens} supervised ones",
            "lower data.min_loss_tokens",
        )
    if data.anchor_rule == "legacy" and data.max_length < config.drafter.block_size:
        raise contradiction(
            "data.max_length",
            "drafter.block_size",
            "the legacy rule keeps blocks inside the sequence and none fits",
            "raise data.max_length",
        )


def _check_objective(config: TrainConfig) -> None:
    objective, drafter = config.objective, config.drafter
    method = drafter.method
    _check_only_dflash2(method, "objective", objective)
    eagle_rules.check_objective(method, objective)
    if method == "dflash2":
        _check_selector(config)
    if method in _DFLASH_FAMILY:
        for name, expected in (("ce_alpha", 1.0), ("l1_alpha", 0.0), ("confidence_alpha", 0.0)):
            if getattr(objective, name) != expected:
                raise contradiction(
                    "drafter.method",
                    f"objective.{name}",
                    f"{method} has no such term, so {name} can only be {expected}",
                    f"set drafter.method=dspark or leave objective.{name} out",
                )
    elif objective.gamma_per_epoch:
        raise contradiction(
            "drafter.method",
            "objective.gamma_per_epoch",
            "a decay that grows with the epochs is an option of dflash's loss",
            "leave objective.gamma_per_epoch out",
        )
    elif method == "dspark" and (objective.loss_type != "weighted_ce" or objective.lk is not None):
        name = "objective.lk" if objective.loss_type == "weighted_ce" else "objective.loss_type"
        raise contradiction(
            "drafter.method",
            name,
            "D-PACE and LK are options of dflash's loss",
            f"set drafter.method=dflash or leave {name} out",
        )
    if objective.confidence_alpha > 0 and not drafter.confidence_head:
        raise contradiction(
            "objective.confidence_alpha",
            "drafter.confidence_head",
            "there is no confidence head to train",
            "set drafter.confidence_head=true or objective.confidence_alpha=0",
        )
    if method == "dspark" and objective.ce_alpha == 0 and objective.l1_alpha == 0:
        raise contradiction(
            "objective.ce_alpha",
            "objective.l1_alpha",
            "both are 0, so nothing trains the proposals",
            "raise one of them",
        )
    if objective.gamma_per_epoch and (objective.gamma is None or objective.loss_type != "weighted_ce"):
        owner = "gamma" if objective.gamma is None else "loss_type"
        raise contradiction(
            "objective.gamma_per_epoch",
            f"objective.{owner}",
            "there is no decay that could grow",
            "set objective.gamma with loss_type=weighted_ce, or objective.gamma_per_epoch=0",
        )
    defaults = type(objective).model_fields
    for name, owner, on in (
        ("dpace_alpha", "loss_type", objective.loss_type != "weighted_ce"),
        ("dpace_normalizer", "loss_type", objective.loss_type != "weighted_ce"),
        ("kl_scale", "lk", objective.lk == "lambda"),
        ("kl_decay", "lk", objective.lk == "lambda"),
    ):
        if not on and getattr(objective, name) != defaults[name].default:
            wanted = "dpace" if owner == "loss_type" else "lambda"
            raise contradiction(
                f"objective.{name}",
                f"objective.{owner}",
                f"{name} does nothing with {owner}={getattr(objective, owner) or 'null'}",
                f"set objective.{owner}={wanted} or leave {name} out",
            )


def _check_selector(config: TrainConfig) -> None:
    """What selector_alpha = 0 switches off, and what its schedule needs."""
    objective, run = config.objective, config.run
    schedule = ("selector_warmup_ratio", "selector_ramp_ratio")
    if objective.selector_alpha == 0:
        for name in (*schedule, "selector_stop_gradient"):
            if getattr(objective, name):
                raise contradiction(
                    f"objective.{name}",
                    "objective.selector_alpha",
                    "a weight of 0 leaves the selector's loss out",
                    f"raise objective.selector_alpha or leave {name} out",
                )
        if config.optimizer.weight_decay:
            raise contradiction(
                "optimizer.weight_decay",
                "objective.selector_alpha",
                "a selector that nothing trains would only decay",
                "set optimizer.weight_decay=0 or raise objective.selector_alpha",
            )
    for name in schedule:
        if getattr(objective, name) and run.steps is None and run.epochs is None:
            raise contradiction(
                f"objective.{name}",
                "run.steps (or run.epochs)",
                "it is a share of the steps and only run.seconds limits them",
                f"set run.steps or run.epochs, or objective.{name}=0",
            )


def _check_budget(engine: EngineSection) -> None:
    """What makes sense with a cost table alone, and what does not with one."""
    if engine.cost_table is not None and engine.confidence_threshold:
        raise contradiction(
            "engine.cost_table",
            "engine.confidence_threshold",
            "both say how many proposals are verified",
            "leave engine.confidence_threshold out",
        )
    if engine.cost_table is None and (engine.min_verify_rows != 1 or engine.max_verify_rows is not None):
        name = "min_verify_rows" if engine.min_verify_rows != 1 else "max_verify_rows"
        raise contradiction(
            f"engine.{name}", "engine.cost_table", "there is no budget without a table", f"leave engine.{name} out"
        )
    if engine.max_verify_rows is not None and engine.min_verify_rows > engine.max_verify_rows:
        raise contradiction(
            "engine.min_verify_rows",
            "engine.max_verify_rows",
            f"nothing is at least {engine.min_verify_rows} and at most {engine.max_verify_rows}",
            "raise engine.max_verify_rows",
        )


def check_serve(config: ServeConfig) -> None:
    """Contradictions of a serving config."""
    engine = config.engine
    if engine.tree_nodes is not None and engine.num_proposals is not None:
        raise contradiction(
            "engine.tree_nodes",
            "engine.num_proposals",
            "the size of a tree is its node budget",
            "leave engine.num_proposals out",
        )
    if engine.tree_nodes is not None and engine.acceptance != "ratio":
        raise contradiction(
            "engine.tree_nodes",
            "engine.acceptance",
            "a tree has its own acceptance rule",
            "leave engine.acceptance out",
        )
    if engine.tree_nodes is not None and engine.cost_table is not None:
        raise contradiction(
            "engine.tree_nodes", "engine.cost_table", "a tree is verified whole", "leave engine.cost_table out"
        )
    for name in ("num_slots", "num_pages"):
        size = getattr(engine, name)
        if size is not None and size % config.mesh.data:
            raise contradiction(
                f"engine.{name}", "mesh.data", f"{size} is no multiple of {config.mesh.data}", f"change engine.{name}"
            )
    _check_budget(engine)
    if engine.grammar and not engine.rules:
        raise contradiction(
            "engine.grammar", "engine.rules", "masks are applied where the rules are", "set engine.rules to true"
        )
    most = engine.num_slots // config.mesh.data
    for size in engine.slot_buckets:
        if not 1 <= size <= most:
            where = "engine.num_slots" if config.mesh.data == 1 else "engine.num_slots / mesh.data"
            raise contradiction("engine.slot_buckets", where, f"{size} is not from 1 to {most}", "leave it out")
    for name in (
        *("num_proposals", "tree_nodes", "ngram_min", "ngram_max", "draft_sampling", "survival_confidence"),
        *("sts_temperatures", "confidence_threshold", "cost_table"),
    ):
        if config.drafter is None and getattr(engine, name):
            raise contradiction(
                f"engine.{name}", "drafter", "nothing is proposed without a drafter", f"leave engine.{name} out"
            )
    if engine.ngram_min is not None and engine.ngram_max is not None and engine.ngram_min > engine.ngram_max:
        raise contradiction(
            "engine.ngram_min",
            "engine.ngram_max",
            f"no suffix is at least {engine.ngram_min} and at most {engine.ngram_max} long",
            "raise engine.ngram_max",
        )
    if engine.prefill_chunk > engine.max_context:
        raise contradiction(
            "engine.prefill_chunk",
            "engine.max_context",
            f"a chunk of {engine.prefill_chunk} rows is longer than the context of {engine.max_context}",
            "lower engine.prefill_chunk",
        )
    if engine.page_size > engine.max_context:
        raise contradiction(
            "engine.page_size",
            "engine.max_context",
            f"one page of {engine.page_size} is longer than the context of {engine.max_context}",
            "lower engine.page_size",
        )
