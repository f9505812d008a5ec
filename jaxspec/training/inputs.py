"""What training and capture both begin with: the drafter, its examples, and which part of the target runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.config import TrainConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import stack_layers
from jaxspec.training import memory
from jaxspec.training.build import fresh_drafter, warm_start, with_objective
from jaxspec.training.data import Examples, load_examples
from jaxspec.training.state import Placement

__all__ = ["load_data", "load_draft", "load_stacked", "needed_target", "stacked", "tables_alone"]


def load_stacked(config: TrainConfig, placement: Placement) -> Target:
    """The target, its layers stacked, each tensor put where the mesh wants it as soon as it is read. Raises
    ConfigError, CheckpointError and HubError."""
    spread = placement.shard if placement.mesh.size > 1 else None
    section = config.target
    with memory.while_loading(config):
        return load_target(
            section.source, section.dtype, quantization=section.quantization, lora=section.lora, shardings=spread,
            stacked=True,
        )  # fmt: skip


def stacked(target: Target) -> Target:
    """The same target with its layers stacked; one copy of the weights, if the caller keeps no other."""
    if not isinstance(target.params["model"]["layers"], list):
        return target
    return dataclasses.replace(target, params=stack_layers(target.params))


def load_draft(config: TrainConfig, target: Target, say: Callable[[str], None]) -> Draft:
    """The drafter that a run trains, fresh (no parameters yet) or from `drafter.source`. Raises ConfigError and
    CheckpointError, also for taps that the target does not have."""
    if config.drafter.source is None:
        draft = Draft(fresh_drafter(config, target.config), None)
    else:
        draft = load_drafter(config.drafter.source, target, "float32")
        draft = warm_start(config, draft)
        draft = dataclasses.replace(draft, drafter=with_objective(draft.drafter, config.objective))
        say(f"drafter: weights and architecture from {draft.source}, training from its parameters")
    target.model.check_taps(draft.drafter.taps)
    return draft


def load_data(config: TrainConfig, target: Target) -> Examples:
    """The examples of `data.path` as the target reads them. Raises DataError."""
    data, directory = config.data, target.directory
    return load_examples(
        data.path,
        tokenizer=None if directory is None else lambda: load_tokenizer(directory),
        template=data.template,
        max_length=data.max_length,
        min_loss_tokens=data.min_loss_tokens,
        max_empty_fraction=data.max_empty_fraction,
        vocab_size=target.config.vocab_size,
    )


def needed_target(target: Target, drafter: Any, whole: bool = False) -> tuple[Decoder, Any]:
    """The part of the target that gives a drafter's features, and its parameters (layers listed or stacked)."""
    if drafter.needs_teacher or whole:
        return target.model, target.params
    return target.model.truncated(target.params, drafter.taps)


def tables_alone(params: Any) -> Any:
    """Embedding and head out of a target's parameters: all that a drafter shares with it."""
    kept = {"model": {"embed_tokens": params["model"]["embed_tokens"]}}
    return kept | {name: params[name] for name in ("lm_head",) if name in params}
