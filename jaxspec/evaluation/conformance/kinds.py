"""The table of case kinds. A kind is one function from a Case to the tensors it computes; adding one is a line here."""

from __future__ import annotations

from collections.abc import Callable

from jaxspec.evaluation.conformance import (
    acceptance,
    anchors,
    ddtree,
    dflash2,
    dflash2_modules,
    dflash_forward,
    dflash_training,
    dspark_sampling,
    dspark_training,
    eagle_inference,
    eagle_training,
    eagle_trees,
    generation,
    planner,
    target,
)
from jaxspec.evaluation.conformance.cases import Case, Tensors

Runner = Callable[[Case], Tensors]

KINDS: dict[str, Runner] = {
    **target.KINDS,
    **anchors.KINDS,
    **dflash_forward.KINDS,
    **dflash_training.KINDS,
    **dflash2.KINDS,
    **dflash2_modules.KINDS,
    **dspark_training.KINDS,
    **dspark_sampling.KINDS,
    **generation.KINDS,
    **acceptance.KINDS,
    **planner.KINDS,
    **eagle_training.KINDS,
    **eagle_inference.KINDS,
    **eagle_trees.KINDS,
    **ddtree.KINDS,
}


def run_kind(case: Case) -> Tensors:
    """Computes a case's tensors with the runner of its kind. KeyError for an unknown kind: callers ask KINDS first."""
    return KINDS[case.kind](case)
