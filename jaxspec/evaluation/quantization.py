"""What int8 costs a drafter: tau of one and the same drafter under a target as it is and under its int8 form.

Each target verifies, and gives the drafter its own features; the answers are greedy. One target is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.checkpoints.drafting import DraftOptions, open_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import CheckpointError, problem
from jaxspec.evaluation.tau import TauReport, measure_tau
from jaxspec.models.quantization import tree_bytes

__all__ = ["QuantizationReport", "compare"]


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """Bytes of the target's parameters and tau, plain and int8; `same_prefix` is the mean share of an answer up to the
    first token that differs, since int8 is another model."""

    dtype: str
    plain_bytes: int
    int8_bytes: int
    plain: TauReport
    int8: TauReport
    same_prefix: float

    @property
    def loss(self) -> float:
        """tau that int8 loses, as a share; below 0 where it gains."""
        return 1 - self.int8.tau / self.plain.tau

    def lines(self) -> list[str]:
        """For people."""
        said = [
            f"{name}: {size / 1e6:.1f} MB of parameters, tau {one.tau:.3f} ({one.low:.3f} to {one.high:.3f}, "
            f"{one.rounds} rounds)"
            for name, size, one in (
                (self.dtype, self.plain_bytes, self.plain),
                ("int8", self.int8_bytes, self.int8),
            )
        ]
        return [
            *said,
            f"int8 has {self.int8_bytes / self.plain_bytes:.2f} of the bytes and loses {100 * self.loss:.1f} % of tau; "
            f"its answers begin with {100 * self.same_prefix:.0f} % of the same tokens",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {**dataclasses.asdict(self), "loss": self.loss}


def compare(
    target: str,
    drafter: str,
    prompts: Sequence[str],
    *,
    dtype: str = "bfloat16",
    max_new_tokens: int = 128,
    max_context: int = 1024,
    num_slots: int = 8,
) -> QuantizationReport:
    """Answers the prompts, each as a conversation's first turn, under both targets. Raises what loading raises."""
    found: list[tuple[int, TauReport, list[tuple[int, ...]]]] = []
    for quantization in (None, "int8"):
        loaded = load_target(target, dtype, quantization=quantization)
        if loaded.directory is None:
            raise CheckpointError(problem(f"target {target}", "no tokenizer", "one"))
        tokenizer = load_tokenizer(loaded.directory)
        draft, proposals = open_drafter(drafter, loaded, DraftOptions())
        runner = SlotRunner(loaded, draft, num_slots=num_slots, max_context=max_context, num_proposals=proposals)
        ids = [chat_ids(tokenizer, prompt) for prompt in prompts]
        report, done = measure_tau(runner, ids, SamplingParams(max_new_tokens=max_new_tokens))
        found.append((tree_bytes(loaded.params), report, [tuple(one.tokens) for one in done]))
    (plain_bytes, plain, answers), (int8_bytes, int8, others) = found
    shares = [_same(one, other) for one, other in zip(answers, others, strict=True)]
    return QuantizationReport(dtype, plain_bytes, int8_bytes, plain, int8, sum(shares) / len(shares))


def _same(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of the longer answer that both begin with."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same / max(len(one), len(other), 1)
