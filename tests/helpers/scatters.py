"""The scatters of a function: what they promise, and where each row goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def scatters(call: Callable[..., Any], *arguments: Any) -> list[tuple[bool, np.ndarray]]:
    """Of each one that stands outside loops and calls: whether its indices are promised to differ, and they [M, n]."""
    closed, found = jax.make_jaxpr(call)(*arguments), []
    for eqn in closed.eqns:
        if eqn.primitive.name == "scatter":
            asked = closed.jaxpr.replace(
                outvars=[eqn.invars[1]], debug_info=closed.jaxpr.debug_info.with_unknown_names()
            )
            (indices,) = jaxpr_as_fun(ClosedJaxpr(asked, closed.consts))(*jax.tree.leaves(arguments))
            found.append((eqn.params["unique_indices"], np.asarray(indices)))
    return found


def assert_apart(found: list[tuple[bool, np.ndarray]], trash: int) -> None:
    """Every scatter is a plain store, and true to its promise: rows meet on no page but `trash`."""
    assert found
    for promised, indices in found:
        assert promised and indices.min() >= 0
        real = indices[indices[:, 0] != trash]
        assert 0 < len(real) == len(np.unique(real, axis=0)) < len(indices)
