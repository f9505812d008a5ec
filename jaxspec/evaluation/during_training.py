"""tau inside a training run: the serving round itself, on held-out prompts, with the weights of the moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.target import Target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.config import TrainConfig
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Drafter, Shared
from jaxspec.evaluation.prompts import read_prompts
from jaxspec.evaluation.tau import measure_tau
from jaxspec.models import layers as ly

SLOTS = 8
PAGE = 16


@dataclasses.dataclass(frozen=True)
class _Draft:
    """What the runner asks of a drafter."""

    drafter: Drafter
    params: Any
    embedding: jax.Array
    head: jax.Array


def hook(config: TrainConfig) -> Callable[[Target, Drafter, Shared], Callable[[Any], dict[str, float]]] | None:
    """The trainer's `evaluate`, or None where `run.eval_every` is 0. Speed is not reported: the target is stacked here.

    Raises DataError for a prompt file that cannot be used, before anything is trained.
    """
    if not config.run.eval_every:
        return None
    prompts = read_prompts(Path(config.run.eval_prompts or ""), "run.eval_prompts")

    def start(target: Target, drafter: Drafter, shared: Shared) -> Callable[[Any], dict[str, float]]:
        tokenizer = load_tokenizer(target.directory)
        ids = [chat_ids(tokenizer, prompt) for prompt in prompts]
        context = max(map(len, ids)) + config.run.eval_new_tokens
        dtype = config.drafter.dtype
        runner: SlotRunner | None = None

        def measure(params: Any) -> dict[str, float]:
            nonlocal runner
            params = ly.cast(params, dtype)
            if runner is None:
                draft = _Draft(drafter, params, shared.embedding, shared.head)
                slots = min(SLOTS, len(ids))
                runner = SlotRunner(
                    target, draft, num_slots=slots, max_context=-(-context // PAGE) * PAGE, page_size=PAGE
                )
            runner.replace_draft(params)
            report, _ = measure_tau(runner, ids, SamplingParams(max_new_tokens=config.run.eval_new_tokens))
            positions = enumerate(report.acceptance_conditional)
            return {
                "tau": report.tau,
                "tau_low": report.low,
                "tau_high": report.high,
                "repeated_bigram_share": report.repeated_bigram_share,
                **{f"acceptance_{slot}": share for slot, share in positions},
            }

        return measure

    return start
