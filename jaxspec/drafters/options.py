"""What a server may ask of a drafter beyond its checkpoint: how much it proposes, and in which way.

One place turns the keys of `engine` into the drafter that is served, so that a key which means nothing to a method is
an error that says so, whoever gave it: a config, the command line or the Python API.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.drafters.base import Drafter
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draft_tree import DynamicTree
from jaxspec.drafters.recurrent import RecurrentDrafter
from jaxspec.errors import ConfigError, problem


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """Keys of `engine` that a drafter answers to; None (False) leaves its own choice."""

    num_proposals: int | None = None
    draft_sampling: str | None = None
    tree_nodes: int | None = None
    ngram_min: int | None = None
    ngram_max: int | None = None
    survival_confidence: bool = False


# method -> key of `engine` -> field, for methods whose size is not fixed by a checkpoint
_SIZED = ("ngram", "small_model")
_FIELDS = {"ngram_min": "min_ngram", "ngram_max": "max_ngram", "draft_sampling": "draft_sampling"}
_EXPECTED = {
    "draft_sampling": "null: a {method} drafter has one way to draw",
    "tree_nodes": "null: a {method} drafter proposes a chain",
    "ngram_min": "null: a {method} drafter looks up no n-grams",
    "ngram_max": "null: a {method} drafter looks up no n-grams",
    "survival_confidence": "false: a {method} drafter has no such confidence",
}


def configured(drafter: Any, options: DraftOptions) -> tuple[Drafter, int | None]:
    """The drafter with the options applied, and what is left for the engine to cut: its `num_proposals`.

    Raises ConfigError naming the key that this method does not have.
    """
    fields = {field.name for field in dataclasses.fields(drafter) if field.init}  # a drafter is a dataclass
    changes: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        value = getattr(options, key)
        if value is not None:
            changes[_field(drafter, fields, key, field, value)] = value
    if "min_ngram" in changes and options.ngram_max is None:
        changes["max_ngram"] = max(drafter.max_ngram, changes["min_ngram"])
    if options.survival_confidence:
        name = "survival_confidence"
        changes[_field(drafter, fields, name, name, True)] = True
    rest = options.num_proposals
    if rest is not None and drafter.method in _SIZED:
        changes["num_proposals"], rest = rest, None
    if changes:
        drafter = dataclasses.replace(drafter, **changes)
    if options.tree_nodes is not None:
        drafter = _tree(drafter, options)
    return drafter, rest


def _field(drafter: Any, fields: set[str], key: str, field: str, value: Any) -> str:
    if field not in fields:
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ConfigError(problem(f"engine.{key}", f"found {shown}", _EXPECTED[key].format(method=drafter.method)))
    return field


def _tree(drafter: Any, options: DraftOptions) -> Any:
    """DDTree over a block with independent rows, or another size for a drafter that proposes trees by itself."""
    assert options.tree_nodes is not None
    if isinstance(drafter, DFlash) and drafter.method in ("dflash", "dflare"):
        if options.draft_sampling == "sample":
            raise ConfigError(
                "engine.draft_sampling and engine.tree_nodes contradict each other: a tree's nodes are the best ones, "
                "not drawn; set one"
            )
        return DDTree(drafter, options.tree_nodes)
    if isinstance(drafter, RecurrentDrafter):
        narrow = min(DynamicTree.top_k, drafter.config.draft_vocab)
        tree = DynamicTree(top_k=narrow, nodes=1) if drafter.tree is None else drafter.tree
        if not isinstance(tree, DynamicTree):
            raise ConfigError(problem("engine.tree_nodes", f"found {options.tree_nodes}", "null: its tree is fixed"))
        return dataclasses.replace(drafter, tree=dataclasses.replace(tree, nodes=options.tree_nodes))
    expected = _EXPECTED["tree_nodes"].format(method=drafter.method)
    raise ConfigError(problem("engine.tree_nodes", f"found {options.tree_nodes}", expected))
