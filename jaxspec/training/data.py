"""The tokenised data set: built once at start, held packed in memory, fingerprinted, with a count of what was
dropped."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import DataError, problem
from jaxspec.training.collect import Collector, Row, Statistics
from jaxspec.training.deepspec_cache import cached_rows
from jaxspec.training.packed import Packed, packed, vocabulary_hash
from jaxspec.training.records import BadRow, conversations
from jaxspec.training.sources import SUFFIXES
from jaxspec.training.templates import ChatTemplate, Message, TemplateMismatch, choose
from jaxspec.training.tokenise import check_pieces, encode

__all__ = ["Examples", "encoded", "load_examples"]

_HASHED = 1 << 20  # values at a time


@dataclass(frozen=True)
class Examples:
    """Packed examples. A random-access source for Grain: `examples[i]` is one example.

    tokens integers [total], loss_mask bool [total], offsets int64 [n + 1]. An example's ids are int32.
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
        ids = self.tokens[part].astype(np.int32)
        return {"input_ids": ids, "loss_mask": self.loss_mask[part], "example_id": int(index)}

    @property
    def longest(self) -> int:
        """Length of the longest example."""
        return int(np.diff(self.offsets).max(initial=0))

    def content_hash(self) -> str:
        """SHA-256 of ids, masks and boundaries."""
        digest = hashlib.sha256()
        for array, kind in ((self.tokens, "<i4"), (self.loss_mask, "u1"), (self.offsets, "<i8")):
            for start in range(0, len(array), _HASHED):
                digest.update(array[start : start + _HASHED].astype(kind).tobytes())
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
    """Read `data.path`: conversations (which need the target's tokenizer), an .npz token file or a DeepSpec cache.

    Args:
      tokenizer: of the target, None where it has none; a callable without arguments is called when it is needed.
      template: `data.template`; a token file has its own.
      max_length: longer examples are cut.
      min_loss_tokens: examples with fewer supervised tokens are dropped and counted.
      max_empty_fraction: a larger share of rows without a valid anchor (two supervised tokens in a row) stops the run.
      vocab_size: ids must lie below it.

    Raises:
      DataError: names the field and what was expected.
    """
    source = Path(path)
    expected = f"a file of conversations ({', '.join(SUFFIXES)}), an .npz token file or the folder of a DeepSpec cache"
    if not source.is_file() and not source.is_dir():
        raise DataError(problem("data.path", f"no file {str(path)!r}", expected))
    rows: Iterator[Row]
    if source.is_dir():
        rows, name = cached_rows(source), "none"
    elif source.suffix == ".npz":
        content = packed(source)
        _check_vocabulary(content, tokenizer, source)
        rows, name = _packed_rows(content), str(content.about.get("template", "none"))
    elif source.suffix in SUFFIXES:
        if tokenizer is None:
            raise DataError(
                problem("data.path", "conversations, and a target without a tokenizer", "an .npz token file")
            )
        tokenizer = _made(tokenizer)
        check_pieces(tokenizer)
        chosen = choose(template, tokenizer)
        turns = (turns for _, turns in conversations(source))
        rows, name = (encoded(one, tokenizer, chosen) for one in turns), chosen.name
    else:
        raise DataError(problem("data.path", source.name, expected))
    collector = Collector("data.path", max_length=max_length, minimum=min_loss_tokens, vocab_size=vocab_size)
    for row in rows:
        collector.add(row)
    tokens, loss_mask, offsets = collector.finish(max_empty_fraction)
    return Examples(tokens, loss_mask, offsets, collector.statistics, name)


def encoded(turns: Sequence[Message] | BadRow, tokenizer: Any, template: ChatTemplate) -> Row:
    """A conversation's ids and mask, whole: what is cut later is counted there."""
    try:
        return turns if isinstance(turns, BadRow) else encode(tokenizer, template, turns, 1 << 30)
    except TemplateMismatch:
        return BadRow("template does not fit")


def _packed_rows(content: Packed) -> Iterator[Row]:
    for start, end in itertools.pairwise(content.offsets):
        yield content.tokens[start:end], content.loss_mask[start:end]


def _made(tokenizer: Any) -> Any:
    return tokenizer() if callable(tokenizer) and not hasattr(tokenizer, "encode") else tokenizer


def _check_vocabulary(content: Packed, tokenizer: Any, source: Path) -> None:
    """A token file that says whose ids it holds must hold the target's."""
    told = content.about.get("vocabulary")
    if told is not None and tokenizer is not None and told != vocabulary_hash(_made(tokenizer)):
        raise DataError(
            problem(
                f"data.path ({source.name})",
                f"token ids of another vocabulary, that of {content.about.get('target')!r}",
                "those of target.source",
                "prepare the data for this target",
            )
        )
