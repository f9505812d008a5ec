"""Kinds 3 and 5: greedy generation over the fixed-slot runner, all prompts of a case side by side.

The references count the first token apart: they run rounds until `max_new_tokens` tokens stand beside it, then clip the
output. Asking the runner for one token more gives the same rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import RoundTrace, SlotRunner
from jaxspec.errors import DataError, problem
from jaxspec.evaluation.conformance.cases import INPUTS_FILE, Case, Tensors
from jaxspec.evaluation.conformance.dflash_forward import without_windows
from jaxspec.evaluation.conformance.material import draft_of, target_of

PROMPT = "prompt_"


@dataclasses.dataclass
class Answer:
    """New tokens of one prompt and the rounds that brought all but the first of them."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    rounds: list[RoundTrace] = dataclasses.field(default_factory=list)

    def new_tokens(self) -> np.ndarray:
        """r + 1 of every round."""
        return np.asarray([trace.accepted + 1 for trace in self.rounds], np.int64)

    def stacked(self, name: str) -> np.ndarray:
        """One array of the rounds' traces, [rounds, …]."""
        return np.stack([trace.arrays[name] for trace in self.rounds])


class Recorder:
    """A runner for the prompts of a case that keeps the traces of its rounds by request."""

    def __init__(self, case: Case, draft: Any, confidence_threshold: float = 0.0):
        self.prompts = prompts(case)
        self.limit = int(case.setting("max_new_tokens"))
        self._answers: dict[int, Answer] = {}
        proposals = 0 if draft is None else draft.drafter.num_proposals
        self._runner = SlotRunner(
            target_of(case),
            draft,
            num_slots=len(self.prompts),
            max_context=max(map(len, self.prompts))
            + self.limit
            + proposals
            + 2,  # a block is never cut short by the room
            confidence_threshold=confidence_threshold,
            observe=lambda trace: self._answers[trace.handle].rounds.append(trace),
        )

    def run(self, stops: Sequence[int | None] = ()) -> list[Answer]:
        """Answers every prompt greedily, each with its own stop token where one is given."""
        self._answers = {}
        for prompt, stop in zip(self.prompts, stops or [None] * len(self.prompts), strict=True):
            ends = () if stop is None else (stop,)
            params = SamplingParams(max_new_tokens=self.limit + 1, ignore_eos=True, stop_token_ids=ends)
            self._answers[self._runner.admit(prompt, params)] = Answer()
        while self._runner.live:
            for event in self._runner.step():
                self._answers[event.handle].tokens.extend(event.tokens)
        return list(self._answers.values())

    def ids(self, index: int, tokens: Sequence[int]) -> np.ndarray:
        """[1, P + n]: a prompt and the first `limit` tokens of its answer."""
        return np.asarray([[*self.prompts[index], *tokens[: self.limit]]], np.int64)


def prompts(case: Case) -> list[list[int]]:
    """prompt_0, prompt_1, … as lists of ids."""
    count = sum(name.startswith(PROMPT) for name in case.inputs)
    if not count:
        raise DataError(
            problem(f"{case.name}/{INPUTS_FILE}", "no prompt_0", f"the prompts that kind {case.kind} needs")
        )
    return [case.input(f"{PROMPT}{index}").reshape(-1).tolist() for index in range(count)]


def dflash(case: Case) -> Tensors:
    """Unstopped, stopped and plain runs of every prompt."""
    draft = draft_of(case)
    recorder = Recorder(case, dataclasses.replace(draft, drafter=without_windows(draft.drafter)))
    found: Tensors = {}
    answers = recorder.run()
    for index, answer in enumerate(answers):
        found[f"output_ids_{index}"] = recorder.ids(index, answer.tokens)
        found[f"acceptance_lengths_{index}"] = answer.new_tokens()
        found[f"draft_tokens_{index}"] = answer.stacked("proposal")
        found[f"posterior_{index}"] = answer.stacked("posterior")
    plain = Recorder(case, None)
    for index, answer in enumerate(plain.run()):
        found[f"ar_output_ids_{index}"] = plain.ids(index, answer.tokens)
    if case.config.get("stop_probe") is not None:
        found |= _stopped(recorder, answers, int(case.config["stop_probe"]))
    return found


def _stopped(recorder: Recorder, answers: Sequence[Answer], probe: int) -> Tensors:
    """Each prompt again with the probe-th token of its own unstopped answer as the stop token."""
    stops = [answer.tokens[: recorder.limit][: probe + 1][-1] for answer in answers]
    found: Tensors = {}
    for index, answer in enumerate(recorder.run(stops)):
        # the reference looks for the stop token after a round: one is counted even where prefill drew it already
        counted = answer if answer.rounds else Answer(rounds=answers[index].rounds[:1])
        found[f"stop_token_{index}"] = np.asarray([stops[index]], np.int64)
        found[f"output_ids_stop_{index}"] = recorder.ids(index, answer.tokens)
        found[f"acceptance_lengths_stop_{index}"] = counted.new_tokens()
    return found


def dspark(case: Case) -> Tensors:
    """Every prompt at every confidence threshold."""
    draft = draft_of(case)
    found: Tensors = {}
    for number, threshold in enumerate(case.config.get("thresholds") or [0.0]):
        recorder = Recorder(case, draft, float(threshold))
        for index, answer in enumerate(recorder.run()):
            name = f"{index}_th{number}"
            found[f"output_ids_{name}"] = recorder.ids(index, answer.tokens)
            found[f"acceptance_lengths_{name}"] = answer.new_tokens()
            found[f"proposal_lengths_{name}"] = np.asarray([trace.verified for trace in answer.rounds], np.int64)
            found[f"draft_tokens_{name}"] = answer.stacked("proposal")
            found[f"draft_hidden_{name}"] = answer.stacked("draft_hidden")
            if "confidence_logits" in answer.rounds[0].arrays:
                found[f"confidence_logits_{name}"] = answer.stacked("confidence_logits")
    return found


KINDS = {"3.dflash_generate_greedy": dflash, "5.dspark_generate_greedy_deepspec": dspark}
