"""Fits the temperatures of a confidence head, slot after slot (STS; CONTRACTS.md §6.1). Everything in float64."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxspec.drafters.calibration import Calibration
from jaxspec.errors import DataError, problem

BINS = 15


def temperature_grid() -> Float[np.ndarray, "41"]:
    """41 temperatures from 0.1 to 10, evenly spaced in the logarithm, as float32 holds them."""
    return (10 ** np.linspace(-1, 1, 41)).astype(np.float32)


def calibration_error(predicted: Float[np.ndarray, "n"], observed: Float[np.ndarray, "n"], bins: int = BINS) -> float:
    """Expected calibration error over equal-width bins."""
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    sums = lambda values: np.bincount(index, values, bins)  # noqa: E731
    return float(np.abs(sums(predicted) - sums(observed)).sum() / len(predicted))


def fit_temperatures(
    logits: Float[np.ndarray, "n m"],
    accepted: Float[np.ndarray, "n m"],
    *,
    dataset: str = "",
    bins: int = BINS,
) -> Calibration:
    """One temperature a slot: the first of the grid that minimises the error of the survival up to that slot.

    `logits` are raw, `accepted` is 1 while the prefix stands. All rows enter at every slot, since the target is the
    joint event and not the conditional one; slots before keep the temperature they got. DataError without rows.
    """
    if logits.ndim != 2 or not len(logits) or logits.shape != accepted.shape:
        shapes = f"{list(logits.shape)} and {list(accepted.shape)}"
        raise DataError(problem("calibration rows", shapes, "two arrays [n, m] with n of at least 1"))
    logits, accepted = logits.astype(np.float64), accepted.astype(np.float64)
    grid = temperature_grid().astype(np.float64)
    fitted = plain = np.ones(len(logits))
    temperatures, before, after = [], [], []
    for slot in range(logits.shape[1]):
        plain = plain * _sigmoid(logits[:, slot])
        candidates = [fitted * _sigmoid(logits[:, slot] / temperature) for temperature in grid]
        errors = [calibration_error(_inside(one), accepted[:, slot], bins) for one in candidates]
        best = int(np.argmin(errors))
        fitted = candidates[best]
        temperatures.append(float(grid[best]))
        before.append(calibration_error(_inside(plain), accepted[:, slot], bins))
        after.append(errors[best])
    return Calibration(tuple(temperatures), dataset, len(logits), tuple(before), tuple(after))


def _inside(probability: np.ndarray) -> np.ndarray:
    return np.clip(probability, 1e-8, 1 - 1e-8)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # the two halves are one function; each is evaluated where it cannot overflow
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))
