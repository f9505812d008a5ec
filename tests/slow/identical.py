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
    """The target's own answers, in float32, end-of-sequence ids ignored; what is measured goes to `record`."""

    target: Target
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    record: Record
    answers: Sequence[Completion] = ()

    @classmethod
    def of(cls, record: Record, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> Plain:
        """Answers the first recorded prompts without a drafter."""
        ids = [record["prompt_ids"] for record in recorded()[:prompts]]
        made = cls(load_target("smollm2", "float32"), ids, new_tokens, record)
        made = dataclasses.replace(made, answers=made.decode("none", None))
        record("prompts", prompts)
        record("tokens", sum(len(one.tokens) for one in made.answers))
        record("repeated_bigram_share", round(repeated_bigram_share([one.tokens for one in made.answers]), 4))
        return made

    def decode(self, name: str, draft: Any) -> list[Completion]:
        """All prompts side by side."""
        start, context = time.perf_counter(), max(map(len, self.prompts)) + self.new_tokens
        runner = SlotRunner(self.target, draft, num_slots=len(self.prompts), max_context=context)
        done = generate(runner, self.prompts, SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True))
        self.record(f"{name}_seconds", round(time.perf_counter() - start, 1))
        return done

    def check(self, name: str, draft: Any) -> collections.Counter[int]:
        """Decodes with the drafter; every token must be the target's own. Returns rounds by accepted proposals."""
        done, m = self.decode(name, draft), draft.drafter.num_proposals
        differing = sum(a.tokens != b.tokens for a, b in zip(self.answers, done, strict=True))
        accepted = collections.Counter(r for one in done for r in one.accepted)
        self.record(f"{name}_differing_answers", differing)
        self.record(f"{name}_tau", round(count(done, m).tau, 4))
        self.record(f"{name}_rounds_by_accepted", [accepted[r] for r in range(m + 1)])
        assert differing == 0, f"{name}: {differing} of {len(done)} answers differ from decoding without a drafter"
        return accepted


def printing(record_property: Record) -> Record:
    """Records a number and shows it, since such a check runs for minutes."""

    def record(name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        record_property(name, value)

    return record
