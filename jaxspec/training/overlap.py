"""Whether evaluation prompts occur in training data: exactly, or as a run of 13 normalised words."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = ["NGRAM", "Overlap", "PromptIndex", "find_overlap", "words"]

NGRAM = 13
# Scripts that put no blanks between words: each character counts as one.
_DENSE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f"
_WORD = re.compile(rf"[{_DENSE}]|[^\W_{_DENSE}]+")
_NONE: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Indices of the evaluation prompts that occur in the training texts."""

    checked: int
    exact: tuple[int, ...]
    ngram: tuple[int, ...]

    def line(self) -> str:
        """One line for a report."""
        return (
            f"{self.checked} evaluation prompts against the training texts: {len(self.exact)} occur in full, "
            f"{len(self.ngram)} share {NGRAM} words in a row"
        )


def words(text: str) -> list[str]:
    """Letters and digits only, without their case and their width."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class PromptIndex:
    """Finds prompts in texts. A prompt shorter than 13 words counts as one run of its length."""

    def __init__(self, prompts: Iterable[str]):
        self._whole: list[str] = []
        self._runs: dict[int, dict[tuple[str, ...], set[int]]] = {}  # by length: run -> prompts that have it
        for index, prompt in enumerate(prompts):
            tokens = words(prompt)
            self._whole.append(_flat(tokens))
            size = min(NGRAM, len(tokens))
            for start in range(len(tokens) - size + 1 if size else 0):
                self._runs.setdefault(size, {}).setdefault(tuple(tokens[start : start + size]), set()).add(index)

    def __len__(self) -> int:
        return len(self._whole)

    def find(self, text: str) -> tuple[set[int], set[int]]:
        """Indices of the prompts that occur in full, and of those that share a run with the text (the former too)."""
        tokens = words(text)
        shared: set[int] = set()
        for size, runs in self._runs.items():
            for start in range(len(tokens) - size + 1):
                shared |= runs.get(tuple(tokens[start : start + size]), _NONE)
        flat = _flat(tokens) if shared else ""
        return {index for index in shared if self._whole[index] in flat}, shared


def _flat(tokens: Sequence[str]) -> str:
    return f" {' '.join(tokens)} "


def find_overlap(prompts: Sequence[str], training_texts: Iterable[str]) -> Overlap:
    """Compares each prompt with all training texts."""
    index = PromptIndex(prompts)
    exact: set[int] = set()
    shared: set[int] = set()
    for text in training_texts:
        whole, some = index.find(text)
        exact |= whole
        shared |= some
    return Overlap(len(index), tuple(sorted(exact)), tuple(sorted(shared)))
