"""What a round costs: measured tables of steps per second, or of additive seconds (DSpark; CONTRACTS.md §6.2).

A table is looked up at R decoding requests and M target rows (R + K drafts + C prefill rows). Both JSON formats are
the field's own, so a table that another server measured can be read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import ConfigError, problem

__all__ = ["AdditiveTable", "CostTable", "StepsTable", "load_cost_table", "save_cost_table", "unmeasured"]


@dataclasses.dataclass(frozen=True)
class StepsTable:
    """Steps per second at each probed number of rows: a floor step function, clamped at both ends."""

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int
    estimated: bool = False  # by a compiler; no device was timed

    def __post_init__(self) -> None:
        _check_probes("sample_batch_tokens", self.sample_batch_tokens)
        _check_values("sample_steps_per_sec", self.sample_steps_per_sec, self.sample_batch_tokens, above=0)
        if self.max_batch_tokens < self.sample_batch_tokens[-1]:
            raise ConfigError(
                problem(
                    "cost table: max_batch_tokens",
                    self.max_batch_tokens,
                    f"at least the last probe, {self.sample_batch_tokens[-1]}",
                )
            )

    def steps_per_second(self, rows: np.ndarray) -> np.ndarray:
        """Of the largest probe that is not above `rows`."""
        index = np.searchsorted(self.sample_batch_tokens, rows, side="right") - 1
        return np.asarray(self.sample_steps_per_sec, np.float64)[np.maximum(index, 0)]

    def step_seconds(self, requests: int, rows: np.ndarray) -> np.ndarray:
        """Seconds of a round; the number of requests plays no part in this format."""
        return 1.0 / self.steps_per_second(rows)

    def throughput(self, tokens: np.ndarray, requests: int, rows: np.ndarray) -> np.ndarray:
        """Tokens a second of rounds that bring `tokens` each."""
        return tokens * self.steps_per_second(rows)


@dataclasses.dataclass(frozen=True)
class AdditiveTable:
    """Seconds = bias + alpha(requests) + theta(rows); linear between probes, clamped at both ends."""

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]
    estimated: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bias_seconds) and self.bias_seconds > 0):
            raise ConfigError(problem("cost table: bias_seconds", self.bias_seconds, "a positive number of seconds"))
        _check_probes("bs_probes", self.bs_probes)
        _check_values("alpha_seconds", self.alpha_seconds, self.bs_probes)
        _check_probes("m_probes", self.m_probes)
        _check_values("theta_seconds", self.theta_seconds, self.m_probes)

    def step_seconds(self, requests: int, rows: np.ndarray) -> np.ndarray:
        """Seconds of a round."""
        floor = self.bias_seconds + np.interp(requests, self.bs_probes, self.alpha_seconds)
        return floor + np.interp(rows, self.m_probes, self.theta_seconds)

    def throughput(self, tokens: np.ndarray, requests: int, rows: np.ndarray) -> np.ndarray:
        """Tokens a second of rounds that bring `tokens` each."""
        return tokens / self.step_seconds(requests, rows)


CostTable = StepsTable | AdditiveTable


def unmeasured(max_batch_tokens: int) -> StepsTable:
    """The table of a server that was never profiled: every round costs the same, so every draft is verified."""
    return StepsTable((1,), (1.0,), max(max_batch_tokens, 1))


def parse_cost_table(said: Any, where: str = "cost table") -> CostTable:
    """A table from its JSON object, which is additive if it has `bias_seconds`. ConfigError names what is wrong."""
    if not isinstance(said, dict):
        raise ConfigError(problem(where, type(said).__name__, "a JSON object"))
    build: type[CostTable] = AdditiveTable if "bias_seconds" in said else StepsTable
    names = [field.name for field in dataclasses.fields(build) if field.name != "estimated"]
    estimated = said.get("estimated", False)
    if not isinstance(estimated, bool):
        raise ConfigError(problem(f"{where}: estimated", repr(estimated), "true or false"))
    said = {name: value for name, value in said.items() if name != "estimated"}
    wrong = sorted(set(names) ^ set(said))
    if wrong:
        raise ConfigError(problem(where, f"keys {sorted(said)}", f"exactly {names}"))
    scalars = {"max_batch_tokens", "bias_seconds"}
    given: dict[str, Any] = {"estimated": estimated}
    for name in names:
        value = said[name]
        numbers = [value] if name in scalars else value
        if not isinstance(numbers, list) or not all(_is_number(one) for one in numbers):
            raise ConfigError(problem(f"{where}: {name}", repr(value), "a number" if name in scalars else "numbers"))
        given[name] = value if name in scalars else tuple(value)
    return build(**given)


def load_cost_table(path: Path) -> CostTable:
    """Reads a table file. ConfigError when it is missing, no JSON, or no table."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(problem(f"cost table {path}", str(error), "a readable JSON file")) from error
    return parse_cost_table(said, f"cost table {path}")


def save_cost_table(table: CostTable, path: Path) -> None:
    """Writes what `load_cost_table` reads; only an estimated table says so, in a key of our own."""
    said = dataclasses.asdict(table)
    if not said["estimated"]:
        del said["estimated"]
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_probes(name: str, probes: tuple[int, ...]) -> None:
    whole = all(isinstance(probe, int) and probe >= 1 for probe in probes)
    if not probes or not whole or any(a >= b for a, b in itertools.pairwise(probes)):
        raise ConfigError(problem(f"cost table: {name}", repr(list(probes)), "strictly increasing positive integers"))


def _check_values(name: str, values: tuple[float, ...], probes: tuple[int, ...], above: float = -1.0) -> None:
    # a fitted theta may be 0, a number of steps per second may not
    fits = len(values) == len(probes) and all(math.isfinite(x) and x >= 0 and x > above for x in values)
    if not fits:
        least = "positive" if above == 0 else "non-negative"
        raise ConfigError(problem(f"cost table: {name}", repr(list(values)), f"{len(probes)} {least} numbers"))
