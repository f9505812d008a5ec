"""Decoding of SmolLM2 with and without a drafter, token for token."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.checkpoints.target import Target, load_target
from jaxspec.decoding.counters import repeated_bigram_share
from jaxspec.decoding.generate import Completion, count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from tests.decoding.smollm2_pair import recorded

PROMPTS, NEW_TOKENS = 8, 512
COVERS = ("jaxspec/decoding", "jaxspec/drafters", "jaxspec/models", "pallas_kernels")

Record = Callable[[str, Any], None]


@dataclasses.dataclass(frozen=True)
class Plain:
    """The target's own answers, in float32, end-of-sequence ids ignored."""

    target: Target
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    answers: Sequence[Completion] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> Plain:
        """Answers the first recorded prompts without a drafter."""
        ids = [record["prompt_ids"] for record in recorded()[:prompts]]
        made = cls(load_target("smollm2", "float32"), ids, new_tokens)
        answers, seconds = made.decode(None)
        return dataclasses.replace(made, answers=answers, seconds=seconds)

    def decode(self, draft: Any) -> tuple[list[Completion], float]:
        """All prompts side by side, and the seconds it took, compilation included."""
        start, context = time.perf_counter(), max(map(len, self.prompts)) + self.new_tokens
        runner = SlotRunner(self.target, draft, num_slots=len(self.prompts), max_context=context)
        done = generate(runner, self.prompts, SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True))
        return done, round(time.perf_counter() - start, 1)

    def check(self, name: str, draft: Any, record: Record) -> collections.Counter[int]:
        """Decodes with the drafter; every token must be the target's own. Returns rounds by accepted proposals."""
        record("prompts", len(self.prompts))
        record("tokens", sum(len(one.tokens) for one in self.answers))
        record("repeated_bigram_share", round(repeated_bigram_share([one.tokens for one in self.answers]), 4))
        record("none_seconds", self.seconds)
        (done, seconds), m = self.decode(draft), draft.drafter.num_proposals
        differing = sum(a.tokens != b.tokens for a, b in zip(self.answers, done, strict=True))
        accepted = collections.Counter(r for one in done for r in one.accepted)
        record(f"{name}_seconds", seconds)
        record(f"{name}_differing_answers", differing)
        record(f"{name}_tau", round(count(done, m).tau, 4))
        record(f"{name}_rounds_by_accepted", [accepted[r] for r in range(m + 1)])
        assert differing == 0, f"{name}: {differing} of {len(done)} answers differ from decoding without a drafter"
        return accepted


def printing(record_property: Record) -> Record:
    """Records a number and shows it, since such a check runs for minutes."""

    def record(name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        record_property(name, value)

    return record
