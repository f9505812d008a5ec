"""What a compiled program sends from one data shard to another, read from its text."""

from __future__ import annotations

import math
import re

import numpy as np

_OPS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast|ragged-all-to-all"
_CALL = re.compile(rf"= (.*?) (?:{_OPS})(?:-start)?\((.*)$", re.M)
_SHAPE = re.compile(r"(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


def groups_of(call: str) -> list[list[int]]:
    """Devices that talk to each other. Raises ValueError for a notation that it does not know."""
    pairs = re.search(r"source_target_pairs=\{([\d,{}]*)\}", call)
    listed = pairs or re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", call)
    if listed:
        return [[int(one) for one in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[0])]
    axes = re.search(r"replica_groups=mesh\[('[^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", call)
    if axes:  # names of a mesh's axes: groups along the listed ones
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        listed_axes = re.findall(r"'(\w+)'(:?)", axes[3])
        if not listed_axes or any(part for _, part in listed_axes):
            raise ValueError(f"no known axes in {call[:200]}")
        ids = _ids(axes[2]) if axes[2] else np.arange(math.prod(map(int, sizes.values())))
        ids = ids.reshape([int(size) for size in sizes.values()])
        order = [list(sizes).index(name) for name, _ in listed_axes]
        moved = np.moveaxis(ids, order, range(-len(order), 0))
        return moved.reshape(-1, math.prod(moved.shape[-len(order) :])).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", call)
    if not iota:
        raise ValueError(f"no groups in {call[:200]}")
    return _ids(iota[2]).reshape([int(one) for one in iota[1].split(",")]).tolist()


def _ids(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the first ids, reshaped and transposed."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"no device ids in {text}")
    dims = [int(one) for one in found[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(one) for one in found[2].split(",")]) if found[2] else ids


def largest_across(text: str, tensor: int) -> int:
    """Bytes of the largest result of a collective whose devices (data-major) are in more than one data shard of so many
    devices; of any collective for `tensor` 1."""
    largest = 0
    for result, call in _CALL.findall(text):
        if any(len({device // tensor for device in group}) > 1 for group in groups_of(call)):
            sizes = (
                (int(bits) // 8 if bits else 1) * math.prod(int(one) for one in dims.split(",") if one)
                for _, bits, dims in _SHAPE.findall(result)
            )
            largest = max(largest, *sizes)
    return largest
