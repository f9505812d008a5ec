"""Whether evaluation prompts occur in training data: exactly, or as a run of 13 normalised words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

NGRAM = 13


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
    """Lower case, letters and digits only."""
    return re.findall(r"[a-z0-9]+", text.lower())


def find_overlap(prompts: Sequence[str], training_texts: Iterable[str]) -> Overlap:
    """Compares each prompt with all training texts. A prompt shorter than 13 words counts as one run of its length."""
    runs = [_runs(words(prompt)) for prompt in prompts]
    whole = [" ".join(words(prompt)) for prompt in prompts]
    lengths = {len(run) for one in runs for run in one}
    exact: set[int] = set()
    shared: set[int] = set()
    for text in training_texts:
        tokens = words(text)
        flat = f" {' '.join(tokens)} "
        have = {size: {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)} for size in lengths}
        for index, one in enumerate(runs):
            if whole[index] and f" {whole[index]} " in flat:
                exact.add(index)
            if any(run in have[len(run)] for run in one):
                shared.add(index)
    return Overlap(len(prompts), tuple(sorted(exact)), tuple(sorted(shared)))


def _runs(tokens: list[str]) -> set[tuple[str, ...]]:
    if not tokens:
        return set()
    size = min(NGRAM, len(tokens))
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
