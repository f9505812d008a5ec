"""Fits the temperatures of a confidence head, slot after slot (STS; CONTRACTS.md §6.1), and reports how well its
confidence is calibrated. Everything in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from jaxspec.decoding.runner import RoundTrace
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.calibration import Calibration
from jaxspec.errors import ConfigError, DataError, problem

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


class Rounds:
    """Collects raw confidence logits and accepted prefixes from a runner's rounds: its `observe`.

    Rounds that verified fewer than m proposals are left out: what was not looked at is not known to be wrong. Raises
    ConfigError for a drafter without a confidence head, and for one that is calibrated already.
    """

    def __init__(self, drafter: Drafter) -> None:
        heads = getattr(drafter, "heads", None)
        if heads is None or not heads.confidence:
            found = f"a {drafter.method} without one"
            raise ConfigError(problem("drafter", found, "a DSpark with a confidence head"))
        if getattr(drafter, "temperatures", ()):
            raise ConfigError(problem("drafter", "a calibrated confidence", "raw logits: leave the STS file out"))
        self._proposals = drafter.num_proposals
        self._logits: list[np.ndarray] = []
        self._accepted: list[np.ndarray] = []

    def __call__(self, trace: RoundTrace) -> None:
        """Takes one round of one request."""
        if trace.verified == self._proposals:
            self._logits.append(trace.arrays["confidence_logits"])
            self._accepted.append(np.arange(trace.verified) < trace.accepted)

    def rows(self) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, "n m"]]:
        """Logits, and 1 while the prefix stands. Raises DataError where there was no whole round."""
        if not self._logits:
            raise DataError(problem("calibration rows", "no whole round", "longer answers or more prompts"))
        return np.stack(self._logits), np.stack(self._accepted).astype(float)


@dataclasses.dataclass(frozen=True)
class Reliability:
    """One slot's survival against what was accepted: expected calibration error, Brier score, and the area under the
    ROC curve (None where all rows ended alike)."""

    accepted: float
    ece: float
    brier: float
    auroc: float | None


def reliability(
    logits: Float[np.ndarray, "n m"],
    accepted: Float[np.ndarray, "n m"],
    temperatures: Sequence[float] | None = None,
    bins: int = BINS,
) -> list[Reliability]:
    """A report a slot."""
    scale = np.ones(logits.shape[1]) if temperatures is None else np.asarray(temperatures, np.float64)
    survival = np.cumprod(_sigmoid(logits.astype(np.float64) / scale), axis=1)
    return [
        Reliability(
            float(np.mean(stood)),
            calibration_error(_inside(predicted), stood, bins),
            float(np.mean((predicted - stood) ** 2)),
            _auroc(predicted, stood),
        )
        for predicted, stood in zip(survival.T, accepted.T.astype(np.float64), strict=True)
    ]


def _auroc(predicted: np.ndarray, observed: np.ndarray) -> float | None:
    """Chance that an accepted row is ranked above a rejected one, ties counted half."""
    hits = int(observed.sum())
    misses = len(observed) - hits
    if not hits or not misses:
        return None
    return float((rankdata(predicted)[observed > 0].sum() - hits * (hits + 1) / 2) / (hits * misses))


def _inside(probability: np.ndarray) -> np.ndarray:
    return np.clip(probability, 1e-8, 1 - 1e-8)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # the two halves are one function; each is evaluated where it cannot overflow
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))
