"""The two-way check between the tensors a model needs and those a checkpoint holds.

A tensor that is missing would silently keep its random start, one that is left over would silently do nothing: both
are errors, and one message lists all of them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping

from jaxspec.errors import CheckpointError

__all__ = ["IGNORABLE", "ignorable", "match"]

# Buffers that old exporters wrote and that follow from the config: patterns over whole names.
IGNORABLE = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")
_LISTED = 24


def ignorable(name: str, patterns: Iterable[str] = IGNORABLE) -> bool:
    """Whether a checkpoint's tensor carries no weight of the model's."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def match(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    where: str = "checkpoint",
    ignore: Iterable[str] = IGNORABLE,
) -> None:
    """Raise one CheckpointError that lists every missing, left-over and wrongly shaped tensor; return when there is
    none.

    Args:
      expected, found: tensor name -> shape.
      where: the folder, for the message.
      ignore: name patterns that `found` may hold besides.
    """
    patterns = tuple(ignore)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not ignorable(name, patterns)]
    shaped = [
        f"{name} (found {list(found[name])}, expected {list(shape)})"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if not (missing or extra or shaped):
        return
    parts = [
        f"{len(names)} {what}: {_listing(names)}"
        for what, names in (("missing", missing), ("left over", extra), ("of the wrong shape", shaped))
        if names
    ]
    hint = _rename_hint(missing, extra)
    raise CheckpointError(
        f"{where}: tensors do not match the config: {'; '.join(parts)}{hint}. Check that config.json belongs to these "
        "weights"
    )


def _listing(names: list[str]) -> str:
    # A wrong config makes hundreds of them; the first ones say what is wrong, the count says how much.
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _rename_hint(missing: list[str], extra: list[str]) -> str:
    if not (missing and extra):
        return ""
    near = difflib.get_close_matches(missing[0], extra, n=1, cutoff=0.75)
    return f" (is {near[0]} meant to be {missing[0]}?)" if near else ""
