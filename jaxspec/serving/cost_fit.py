"""From measured rounds to a cost table: the nearest one in which more requests or more rows never cost less."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import lsq_linear

from jaxspec.errors import ConfigError, problem
from jaxspec.serving.cost import AdditiveTable, CostTable, StepsTable

__all__ = ["Cell", "fit", "misfit"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Median seconds of `steps` rounds of one executable: R slots, M target rows, of which C = `prefill` are a
    prompt's."""

    requests: int
    rows: int
    seconds: float
    steps: int
    drafting: bool = True
    prefill: int = 0


def fit(cells: Sequence[Cell], form: str) -> CostTable:
    """The table of the drafting cells; `form` is "additive" or "steps" (CONTRACTS.md §6.2). Least squares of the
    relative error over steps that only go up. ConfigError where nothing was measured."""
    drafted = [cell for cell in cells if cell.drafting]
    if not drafted:
        raise ConfigError(problem("cost table", "no measured round that drafts", "at least one"))
    return _additive(drafted) if form == "additive" else _steps(drafted)


def misfit(table: CostTable, cells: Sequence[Cell]) -> tuple[float, float]:
    """Median and largest relative error of the table at the cells that it was fitted to."""
    errors = [
        abs(float(table.step_seconds(cell.requests, np.array(cell.rows))) / cell.seconds - 1)
        for cell in cells
        if cell.drafting
    ]
    return float(np.median(errors)), max(errors)


def _additive(cells: Sequence[Cell]) -> AdditiveTable:
    requests, rows = (sorted({getattr(cell, name) for cell in cells}) for name in ("requests", "rows"))
    climbs = _climb(cells, [("requests", requests), ("rows", rows)])
    alpha, theta = climbs[1 : len(requests)], climbs[len(requests) :]
    return AdditiveTable(
        float(climbs[0]),
        tuple(requests),
        tuple(np.cumsum([0.0, *alpha]).tolist()),
        tuple(rows),
        tuple(np.cumsum([0.0, *theta]).tolist()),
    )


def _steps(cells: Sequence[Cell]) -> StepsTable:
    """Each bucket's probe stands at its lower edge: the lookup is a floor, and a round is padded up."""
    rows = sorted({cell.rows for cell in cells})
    seconds = np.cumsum(_climb(cells, [("rows", rows)]))
    edges = (1, *(below + 1 for below in rows[:-1]))
    return StepsTable(edges, tuple((1 / seconds).tolist()), rows[-1])


def _climb(cells: Sequence[Cell], axes: Sequence[tuple[str, list[int]]]) -> np.ndarray:
    """The cheapest cell's seconds (positive), and by how much they grow at each further probe of each axis (0 or
    more)."""
    columns = [np.ones(len(cells))]
    for name, probes in axes:
        values = np.array([getattr(cell, name) for cell in cells])
        columns += [(values >= probe).astype(float) for probe in probes[1:]]
    seconds = np.array([cell.seconds for cell in cells])
    least = np.zeros(len(columns))
    least[0] = seconds.min() / 100
    scaled = np.stack(columns, axis=1) / seconds[:, None]
    return lsq_linear(scaled, np.ones(len(cells)), bounds=(least, np.inf), method="bvls").x
