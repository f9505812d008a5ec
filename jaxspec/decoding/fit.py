"""What a runner is given, checked before anything is built: the options of the round, and a drafter of this target."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.decoding.acceptance import MODES
from jaxspec.drafters.base import Shared
from jaxspec.errors import ConfigError, problem
from jaxspec.models.config import ModelConfig

__all__ = ["check_draft", "check_options", "check_proposals", "check_sizes", "shared_tables"]


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises ConfigError for a size of `engine` that is no integer, or too small."""
    for name, value in sizes.items():
        least = 2 if name == "max_context" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"engine.{name}: found {value!r}, expected an integer of at least {least}")


def check_options(acceptance: Any, confidence_threshold: Any, eos_token_ids: Iterable[Any], vocab_size: int) -> None:
    """Raises ConfigError for an unknown acceptance, a threshold that is no probability, an id that is no token."""
    if acceptance not in MODES:
        raise ConfigError(problem("engine.acceptance", acceptance, f"one of {', '.join(MODES)}"))
    # a NaN compares false with everything, so it would never stop a proposal
    if not (isinstance(confidence_threshold, numbers.Real) and 0 <= float(confidence_threshold) <= 1):
        raise ConfigError(problem("engine.confidence_threshold", confidence_threshold, "a number from 0 to 1"))
    for token in eos_token_ids:
        whole = isinstance(token, numbers.Integral) and not isinstance(token, bool)
        if not (whole and 0 <= token < vocab_size):
            raise ConfigError(problem("eos_token_ids", token, f"token ids below vocab_size {vocab_size}"))


def check_proposals(drafter: Any, num_proposals: int | None, acceptance: str) -> None:
    """Raises ConfigError for more proposals than the drafter gives, and for what a tree does not know."""
    tree = getattr(drafter, "tree_nodes", 0)
    if tree and num_proposals is not None:
        raise ConfigError(
            f"engine.num_proposals: found {num_proposals}, expected null: the {drafter.method} drafter proposes a "
            "tree, whose size is its node budget; set engine.tree_nodes"
        )
    if tree and acceptance != "ratio":
        raise ConfigError(
            f"engine.acceptance: found {acceptance!r}, expected 'ratio': the {drafter.method} drafter proposes a "
            "tree, which has its own acceptance rule"
        )
    if num_proposals is not None and not 1 <= num_proposals <= drafter.num_proposals:
        raise ConfigError(
            f"engine.num_proposals: found {num_proposals}, expected 1 to {drafter.num_proposals}, what a block of "
            f"the {drafter.method} drafter gives"
        )


def check_draft(draft: Any, target: ModelConfig, width: int) -> None:
    """Raises ConfigError for a drafter that was made for another target; it would fail inside a compiled step, or
    accept nothing.

    Args:
      width: H of the target's embedding and head.
    """
    drafter = getattr(draft.drafter, "inner", draft.drafter)  # a tree around a block
    made_for = getattr(drafter, "config", None)
    sizes = [
        ("vocab_size", _vocab_size(drafter), target.vocab_size),
        ("target_hidden_size", getattr(made_for, "target_hidden_size", None), target.hidden_size),
        ("num_target_layers", getattr(made_for, "num_target_layers", None), target.num_layers),
    ]
    for name, found, expected in sizes:
        if found is not None and found != expected:
            raise ConfigError(
                f"drafter {drafter.method}: {name} {found}, expected the target's {expected}; use a drafter that was "
                "made for this target"
            )
    for name in ("embedding", "head"):
        table = getattr(draft, name)
        if table is not None and tuple(table.shape) != (target.vocab_size, width):
            raise ConfigError(
                f"drafter {drafter.method}: {name} of shape {tuple(table.shape)}, expected "
                f"{(target.vocab_size, width)}, as the target's"
            )


def _vocab_size(drafter: Any) -> int | None:
    """Of a block or EAGLE drafter, a small model, and one that only copies; None where the protocol does not say."""
    for path in ("config.model.vocab_size", "model.config.vocab_size", "vocab_size"):
        try:
            return operator.attrgetter(path)(drafter)
        except AttributeError:
            continue
    return None


def shared_tables(target: Any, draft: Any) -> Shared:
    """The target's embedding and head, or the drafter's checkpoint's own."""
    embedding, head = getattr(draft, "embedding", None), getattr(draft, "head", None)
    return Shared(
        target.model.embedding(target.params) if embedding is None else embedding,
        target.model.head(target.params) if head is None else head,
    )
