"""Rows become examples one by one: cut, looked at, kept or dropped for a reason that is counted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.records import BadRow

__all__ = ["Collector", "Row", "Statistics"]

Row = tuple[np.ndarray, np.ndarray] | BadRow  # ids int [S] and loss mask bool [S], or why there are none


@dataclass
class Statistics:
    """What became of the rows of a data set. `cut` counts the tokens that truncated rows lost."""

    rows: int = 0
    kept: int = 0
    empty: int = 0
    truncated: int = 0
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    def drop(self, reason: str) -> None:
        """Counts a row that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def line(self) -> str:
        """One line for the log."""
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"data: {self.kept} of {self.rows} rows, {self.tokens} tokens, {self.supervised} supervised, "
            f"{self.truncated} truncated; dropped: {why}"
        )


class Collector:
    """Takes rows in order and holds those that can be trained on, packed: a few bytes a token, and nothing else of a
    row but, for `unique`, 16 bytes.

    Args:
      field: what named the data; it heads an error.
      max_length: longer rows are cut.
      minimum: rows with fewer supervised tokens are dropped.
      vocab_size: ids must lie below it.
      unique: a row with the ids and mask of an earlier one is dropped.
    """

    def __init__(
        self, field: str, *, max_length: int, minimum: int = 1, vocab_size: int | None = None, unique: bool = False
    ):
        self.statistics = Statistics()
        self._field, self._max_length, self._minimum, self._vocab = field, max_length, max(minimum, 1), vocab_size
        self._dtype = np.dtype(np.uint16 if vocab_size is not None and vocab_size <= 1 << 16 else np.int32)
        self._ids, self._mask, self._lengths = bytearray(), bytearray(), [0]
        self._seen: set[bytes] | None = set() if unique else None

    def add(self, row: Row) -> None:
        """Raises DataError for an id that the vocabulary does not have."""
        stats = self.statistics
        stats.rows += 1
        if isinstance(row, BadRow):
            stats.drop(row.reason)
            stats.empty += 1
            return
        tokens, mask = row[0][: self._max_length], row[1][: self._max_length]
        stats.truncated += len(row[0]) > self._max_length
        stats.cut += len(row[0]) - len(tokens)
        supervised, has_anchor = int(mask.sum()), bool((mask[:-1] & mask[1:]).any())
        stats.empty += not has_anchor
        if not has_anchor or supervised < self._minimum:
            reason = (
                "too few supervised tokens"
                if has_anchor
                else "no valid anchor"
                if supervised
                else "no supervised token"
            )
            stats.drop(reason)
            return
        self._check_ids(tokens)
        ids, marks = tokens.astype(self._dtype).tobytes(), mask.astype(np.uint8).tobytes()
        if self._seen is not None:
            key = hashlib.blake2b(ids + marks, digest_size=16).digest()
            if key in self._seen:
                stats.drop("duplicate")
                return
            self._seen.add(key)
        self._ids += ids
        self._mask += marks
        self._lengths.append(len(tokens))
        stats.kept += 1
        stats.tokens += len(tokens)
        stats.supervised += supervised
        stats.longest = max(stats.longest, len(tokens))

    def drop(self, reason: str) -> None:
        """Counts a row that is left out although it could be trained on."""
        self.statistics.rows += 1
        self.statistics.drop(reason)

    def finish(self, max_empty: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens [total], loss_mask bool [total], offsets int64 [n + 1].

        Raises:
          DataError: nothing is left, or more than the share `max_empty` of the rows has no valid anchor (two
            supervised tokens in a row).
        """
        stats = self.statistics
        if stats.rows == 0:
            raise DataError(problem(self._field, "an empty data set", "at least one conversation"))
        if stats.empty > max_empty * stats.rows:
            raise DataError(
                problem(
                    self._option("max_empty_fraction"),
                    f"{stats.empty} of {stats.rows} rows without a valid anchor",
                    f"at most {max_empty:.0%}",
                    f"check {self._option('template')}, {self._option('max_length')} and the answers ({stats.line()})",
                )
            )
        if not stats.kept:
            raise DataError(
                problem(
                    self._option("min_loss_tokens"),
                    f"no row left of {stats.rows}",
                    f"rows with at least {self._minimum} supervised tokens",
                    stats.line(),
                )
            )
        mask: Any = np.frombuffer(self._mask, np.uint8).view(bool)
        return np.frombuffer(self._ids, self._dtype), mask, np.cumsum(self._lengths, dtype=np.int64)

    def _option(self, key: str) -> str:
        """What a user calls it: a key of the config, or an option of the command line."""
        return f"data.{key}" if self._field == "data.path" else f"--{key.replace('_', '-')}"

    def _check_ids(self, tokens: np.ndarray) -> None:
        if self._vocab is not None and (tokens.min() < 0 or tokens.max() >= self._vocab):
            raise DataError(
                problem(
                    f"{self._field}, row {self.statistics.rows}",
                    f"token id {tokens.max()}",
                    f"ids from 0 to {self._vocab - 1}, the target's vocabulary",
                    "use data that was tokenised for this target",
                )
            )
