"""`jaxspec prepare`: conversations of any shape become one token file, with an account of what was dropped and why.

Inputs are read row by row; memory holds the packed output, 16 bytes of each kept row to know its duplicates, and the
evaluation prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.atomic import replacing_file
from jaxspec.errors import DataError, problem
from jaxspec.training.collect import Collector, Statistics
from jaxspec.training.data import Examples, encoded
from jaxspec.training.outputs import account_path, check_out, writing
from jaxspec.training.overlap import NGRAM, PromptIndex
from jaxspec.training.packed import Packed, vocabulary_hash, write_packed
from jaxspec.training.records import BadRow, conversations, prompts
from jaxspec.training.templates import ChatTemplate
from jaxspec.training.tokenise import check_pieces

__all__ = ["IN_FULL", "SHARED", "Settings", "prepare", "sha256", "template_hash"]

VERSION = 1
IN_FULL, SHARED = "evaluation prompt in full", f"{NGRAM} words of an evaluation prompt"
_NAMED = 10  # evaluation prompts that the report names


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides which rows are kept and how they look; `overlap` is "drop" or "refuse"."""

    max_length: int = 4096
    min_loss_tokens: int = 2
    max_empty_fraction: float = 0.5
    overlap: str = "drop"


def prepare(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: Any,
    template: ChatTemplate,
    target: str,
    vocab_size: int,
    settings: Settings = Settings(),
    evaluation: Sequence[Path] = (),
    force: bool = False,
    watch: Callable[[Statistics], None] = lambda statistics: None,
) -> tuple[Examples, dict[str, Any]]:
    """Writes `out` (.npz) and, beside it, its account as JSON; returns both. A row is a conversation, a duplicate has
    the ids and mask of an earlier one.

    Args:
      target: its name, for the account.
      evaluation: files of prompts that must not occur in the data.
      force: replace an output that is there.
      watch: called after every row.

    Raises:
      DataError: the output is there or cannot be written, an input is broken, a row overlaps and `settings.overlap`
        refuses it, or too little is left. Then nothing was written.
    """
    check_out(out, ".npz", force, [*inputs, *evaluation])
    check_pieces(tokenizer)
    asked = [prompt for file in evaluation for prompt in prompts(file, "--eval")]
    index, found = PromptIndex(asked), Counter[int]()
    collector = Collector(
        "INPUT",
        max_length=settings.max_length,
        minimum=settings.min_loss_tokens,
        vocab_size=vocab_size,
        unique=True,
    )
    sources = []
    for path in inputs:
        before = collector.statistics.rows
        for place, turns in conversations(path, "INPUT"):
            overlapping = None if isinstance(turns, BadRow) else _overlap(index, turns, found)
            if overlapping is None:
                collector.add(encoded(turns, tokenizer, template))
            elif settings.overlap == "refuse":
                what, prompt = overlapping
                raise DataError(
                    problem(f"INPUT ({place})", f"{what}: {asked[prompt][:80]!r}", "none", "or use --overlap drop")
                )
            else:
                collector.drop(overlapping[0])
            watch(collector.statistics)
        sources.append({"file": path.name, "sha256": sha256(path), "rows": collector.statistics.rows - before})
    tokens, loss_mask, offsets = collector.finish(settings.max_empty_fraction)
    examples = Examples(tokens, loss_mask, offsets, collector.statistics, template.name)
    report = {
        "version": VERSION,
        "target": target,
        "vocabulary": vocabulary_hash(tokenizer),
        "template": template.name,
        "template_sha256": template_hash(tokenizer, template),
        "settings": dataclasses.asdict(settings),
        "inputs": sources,
        "evaluation": {
            "files": [{"file": path.name, "sha256": sha256(path)} for path in evaluation],
            "prompts": len(asked),
            "found": [{"prompt": asked[one], "rows": count} for one, count in found.most_common(_NAMED)],
        },
        "statistics": dataclasses.asdict(collector.statistics),
        "content_sha256": examples.content_hash(),
    }
    with writing(out):
        account_path(out).unlink(missing_ok=True)  # never the account of another file beside the new one
        write_packed(out, Packed(tokens, offsets, loss_mask, report))
        with replacing_file(account_path(out)) as fresh:
            fresh.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return examples, report


def _overlap(index: PromptIndex, turns: Sequence[dict[str, str]], found: Counter[int]) -> tuple[str, int] | None:
    """What the conversation shares with the evaluation prompts, and with which; those that it does are counted."""
    if not len(index):
        return None
    whole: set[int] = set()
    shared: set[int] = set()
    for turn in turns:
        exact, some = index.find(turn["content"])
        whole |= exact
        shared |= some
    found.update(shared)
    if not shared:
        return None
    return (IN_FULL, min(whole)) if whole else (SHARED, min(shared))


def template_hash(tokenizer: Any, template: ChatTemplate) -> str:
    """SHA-256 of what the template is: the tokenizer's own text, or a built-in one's fields."""
    text = tokenizer.chat_template if template.name == "tokenizer" else repr(template)
    return hashlib.sha256(str(text).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
