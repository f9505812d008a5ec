"""Targets and drafters of a case, loaded as `generate`, the trainer and the server load them, in float32."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.drafters.base import Shared
from jaxspec.errors import DataError, problem
from jaxspec.evaluation.conformance.cases import CASE_FILE, Case

DTYPE = "float32"


def target_of(case: Case) -> Target:
    """The case's target, read once for all cases that name the same folder."""
    return _target(_folder(case, "target_dir", case.target_dir))


def draft_of(case: Case) -> Draft:
    """The case's drafter beside its target."""
    return _draft(_folder(case, "draft_dir", case.draft_dir), _folder(case, "target_dir", case.target_dir))


def shared_of(case: Case) -> Shared:
    """Embedding and head, as the drafter gets them in training and serving."""
    return draft_of(case).shared(target_of(case))


def _folder(case: Case, field: str, folder: Path | None) -> Path:
    if folder is None:
        raise DataError(
            problem(f"{case.name}/{CASE_FILE}: {field}", "nothing", f"the checkpoint that kind {case.kind} needs")
        )
    return folder.resolve()


@functools.lru_cache(maxsize=4)
def _target(folder: Path) -> Target:
    return load_target(str(folder), dtype=DTYPE)


@functools.lru_cache(maxsize=2)
def _draft(folder: Path, target: Path) -> Draft:
    return load_drafter(str(folder), _target(target))
