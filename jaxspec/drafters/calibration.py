"""Sequential temperature scaling (STS) of a confidence head: the file that fitting writes and a server reads.

Format: CONTRACTS.md §6.1, which is the field's own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, problem


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One temperature a slot (m of them), and the expected calibration error of the survivals before and after."""

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    @classmethod
    def load(cls, path: Path, num_proposals: int) -> Calibration:
        """Reads the file. ConfigError when it is unreadable or not for a drafter of `num_proposals` slots."""
        where = f"STS file {path}"
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(problem(where, str(error), "a readable JSON file")) from error
        if not isinstance(said, dict):
            raise ConfigError(problem(where, type(said).__name__, "a JSON object"))
        unknown = sorted(set(said) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(problem(where, f"unknown keys {unknown}", "the keys of an STS file"))
        found = said.get("temperatures")
        fits = isinstance(found, list) and len(found) == num_proposals and all(map(_positive, found))
        if not fits:
            raise ConfigError(problem(f"{where}: temperatures", repr(found), f"{num_proposals} positive numbers"))
        listed: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
        }
        return cls(**listed)

    def save(self, path: Path) -> None:
        """Writes the file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0
