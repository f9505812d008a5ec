"""The tokenised data set: built once at start, held packed in memory, fingerprinted, with a count of what was
dropped."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.records import BadRow, conversations, packed
from jaxspec.training.templates import TemplateMismatch, choose
from jaxspec.training.tokenise import check_pieces, encode

__all__ = ["Examples", "Statistics", "load_examples"]


@dataclass
class Statistics:
    """What became of the rows of a data set."""

    rows: int = 0
    kept: int = 0
    empty: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """One line for the log."""
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"data: {self.kept} of {self.rows} rows, {self.tokens} tokens, {self.supervised} supervised, "
            f"{self.truncated} truncated; dropped: {why}"
        )


@dataclass(frozen=True)
class Examples:
    """Packed examples. A random-access source for Grain: `examples[i]` is one example.

    tokens int32 [total], loss_mask bool [total], offsets int64 [n + 1].
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    statistics: Statistics
    template: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return {"input_ids": self.tokens[part], "loss_mask": self.loss_mask[part], "example_id": int(index)}

    @property
    def longest(self) -> int:
        """Length of the longest example."""
        return int(np.diff(self.offsets).max(initial=0))

    def content_hash(self) -> str:
        """SHA-256 of ids, masks and boundaries."""
        digest = hashlib.sha256()
        for array in (self.tokens.astype("<i4"), self.loss_mask.astype("u1"), self.offsets.astype("<i8")):
            digest.update(array.tobytes())
        return digest.hexdigest()


def load_examples(
    path: str | Path,
    *,
    tokenizer: Any = None,
    template: str = "auto",
    max_length: int = 4096,
    min_loss_tokens: int = 1,
    max_empty_fraction: float = 0.5,
    vocab_size: int | None = None,
) -> Examples:
    """Read `data.path`: .jsonl (needs the target's tokenizer) or .npz.

    Args:
      tokenizer: of the target; a callable without arguments is called when it is needed (a token file needs none).
      template: `data.template`.
      max_length: longer examples are cut.
      min_loss_tokens: examples with fewer supervised tokens are dropped and counted.
      max_empty_fraction: a larger share of rows without a valid anchor (two supervised tokens in a row) stops the run.
      vocab_size: ids must lie below it.

    Raises:
      DataError: names the field and what was expected.
    """
    source = Path(path)
    if not source.is_file():
        raise DataError(
            problem("data.path", f"no file {str(path)!r}", "a .jsonl file of conversations or an .npz token file")
        )
    if source.suffix == ".npz":
        rows, name = _packed_rows(source), "none"
    elif source.suffix in (".jsonl", ".json"):
        tokenizer = tokenizer() if callable(tokenizer) and not hasattr(tokenizer, "encode") else tokenizer
        check_pieces(tokenizer)
        chosen = choose(template, tokenizer)
        rows, name = _conversation_rows(source, tokenizer, chosen), chosen.name
    else:
        raise DataError(problem("data.path", source.name, "a file ending in .jsonl or .npz"))
    return _collect(rows, name, max_length, max(min_loss_tokens, 1), max_empty_fraction, vocab_size)


Row = tuple[np.ndarray, np.ndarray] | BadRow


def _packed_rows(path: Path) -> Iterator[Row]:
    tokens, offsets, prompts = packed(path)
    for start, end, prompt in zip(offsets[:-1], offsets[1:], prompts, strict=True):
        yield tokens[start:end], np.arange(end - start) >= prompt


def _conversation_rows(path: Path, tokenizer: Any, template: Any) -> Iterator[Row]:
    for turns in conversations(path):
        try:
            # cut later: an untruncated length is what `truncated` counts
            yield turns if isinstance(turns, BadRow) else encode(tokenizer, template, turns, 1 << 30)
        except TemplateMismatch:
            yield BadRow("template does not fit")


def _collect(
    rows: Iterator[Row], template: str, max_length: int, minimum: int, max_empty: float, vocab_size: int | None
) -> Examples:
    stats, ids, masks = Statistics(), [], []
    for row in rows:
        stats.rows += 1
        if isinstance(row, BadRow):
            stats.dropped[row.reason] += 1
            stats.empty += 1
            continue
        tokens, mask = row[0][:max_length], row[1][:max_length]
        stats.truncated += len(row[0]) > max_length
        supervised, has_anchor = int(mask.sum()), bool((mask[:-1] & mask[1:]).any())
        stats.empty += not has_anchor
        if not has_anchor or supervised < minimum:
            reason = (
                "too few supervised tokens"
                if has_anchor
                else "no valid anchor"
                if supervised
                else "no supervised token"
            )
            stats.dropped[reason] += 1
            continue
        if vocab_size is not None and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise DataError(
                problem(
                    f"data.path, row {stats.rows}",
                    f"token id {tokens.max()}",
                    f"ids from 0 to {vocab_size - 1}, the target's vocabulary",
                    "use data that was tokenised for this target",
                )
            )
        ids.append(tokens)
        masks.append(mask)
        stats.kept, stats.tokens, stats.supervised = (
            stats.kept + 1,
            stats.tokens + len(tokens),
            stats.supervised + supervised,
        )
    if stats.rows == 0:
        raise DataError(problem("data.path", "an empty data set", "at least one conversation"))
    if stats.empty > max_empty * stats.rows:
        raise DataError(
            problem(
                "data.max_empty_fraction",
                f"{stats.empty} of {stats.rows} rows without a valid anchor",
                f"at most {max_empty:.0%}",
                f"check data.template, data.max_length and the answers ({stats.line()})",
            )
        )
    if not ids:
        raise DataError(
            problem(
                "data.min_loss_tokens",
                f"no row left of {stats.rows}",
                f"rows with at least {minimum} supervised tokens",
                stats.line(),
            )
        )
    return Examples(
        np.concatenate(ids), np.concatenate(masks), np.cumsum([0, *map(len, ids)], dtype=np.int64), stats, template
    )
