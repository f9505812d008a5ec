"""tau inside a training run: the serving round itself, on held-out prompts, with the weights of the moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.target import Target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.config import TrainConfig
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters.base import Drafter, Shared
from jaxspec.errors import DataError
from jaxspec.evaluation.calibration import Rounds, reliability
from jaxspec.evaluation.prompts import read_prompts
from jaxspec.evaluation.tau import TauReport, measure_tau
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
        return measurement(config, [chat_ids(tokenizer, prompt) for prompt in prompts], target, drafter, shared)

    return start


def measurement(
    config: TrainConfig, ids: list[list[int]], target: Target, drafter: Drafter, shared: Shared
) -> Callable[[Any], dict[str, float]]:
    """Parameters -> numbers: tau with its interval, rounds, acceptance by slot (`acceptance/K` given that the slots
    before were accepted, `survival/K` together with them; slots from 1, as everywhere in the log), and, of a confidence
    head, how well it is calibrated by slot.

    Args:
      ids: the prompts' tokens.
      target: its parameters stacked, on one device or spread over a mesh; the parameters that are measured lie there
      too.
    """
    context = max(map(len, ids)) + config.run.eval_new_tokens
    calibrates = bool(getattr(getattr(drafter, "heads", None), "confidence", False))
    runner: SlotRunner | None = None
    rounds: Rounds | None = None

    def observe(trace: Any) -> None:
        assert rounds is not None
        rounds(trace)

    def measure(params: Any) -> dict[str, float]:
        nonlocal runner, rounds
        params = ly.cast(params, config.drafter.dtype)
        if not isinstance(shared.embedding.sharding, jax.sharding.NamedSharding):
            params = jax.device_put(params, next(iter(shared.embedding.devices())))
        if runner is None:
            runner = SlotRunner(
                target,
                _Draft(drafter, params, shared.embedding, shared.head),
                num_slots=min(SLOTS, len(ids)),
                max_context=-(-context // PAGE) * PAGE,
                page_size=PAGE,
                observe=observe if calibrates else None,
            )
        runner.replace_draft(params)
        rounds = Rounds(drafter) if calibrates else None
        report, _ = measure_tau(runner, ids, SamplingParams(max_new_tokens=config.run.eval_new_tokens))
        return dict(_numbers(report)) | (dict(_calibration(rounds)) if rounds is not None else {})

    return measure


def _numbers(report: TauReport) -> Iterator[tuple[str, float]]:
    for name in ("tau", "rounds", "repeated_bigram_share"):
        yield name, float(getattr(report, name))
    yield from (("tau_low", report.low), ("tau_high", report.high))
    for slot, share in enumerate(report.acceptance_conditional, 1):
        yield f"acceptance/{slot}", share
    for slot, share in enumerate(report.acceptance_unconditional, 1):
        yield f"survival/{slot}", share


def _calibration(rounds: Rounds) -> Iterator[tuple[str, float]]:
    """By slot: ECE and Brier score of the survival that the head predicts, and the area under its ROC curve where some
    rounds stood and some did not."""
    try:
        found = reliability(*rounds.rows())
    except DataError:  # no round verified a whole block: there is nothing to say
        return
    for slot, one in enumerate(found, 1):
        yield f"ece/{slot}", one.ece
        yield f"brier/{slot}", one.brier
        if one.auroc is not None:
            yield f"auroc/{slot}", one.auroc
