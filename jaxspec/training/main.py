"""A training run from its config: load, build, resume or begin, train, export. `train.py` calls `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxspec.checkpoints.drafter import Draft, check_export_folder, save_drafter
from jaxspec.checkpoints.target import Target
from jaxspec.config import TrainConfig, render
from jaxspec.config.schema import contradiction
from jaxspec.drafters.base import Shared
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.errors import CheckpointError, ConfigError, DataError, ResumeError, problem
from jaxspec.training import directory as run_directory
from jaxspec.training import fingerprint as fp
from jaxspec.training import memory, pod, tracking
from jaxspec.training import optimizer as opt
from jaxspec.training import report as run_report
from jaxspec.training.anchors import any_anchor
from jaxspec.training.best import Best, about
from jaxspec.training.build import initial_params
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.data import Examples
from jaxspec.training.featurestore.modes import Features, open_features
from jaxspec.training.inputs import load_data, load_draft, load_stacked, needed_target, stacked, tables_alone
from jaxspec.training.loop import Loop, Outcome
from jaxspec.training.metrics import MetricsWriter, NoWriter
from jaxspec.training.pipeline import Batches, batch_shapes, padded_length, steps_per_epochs
from jaxspec.training.progress import Reporter
from jaxspec.training.signals import StopRequest, stop_requests
from jaxspec.training.state import Placement, abstract, choose, create
from jaxspec.training.step import Frozen, StepSpec, attention_over, compile_step

__all__ = ["Evaluate", "run"]

META_VERSION = 1
Evaluate = Callable[[Target, Any, Shared], Callable[[Any], dict[str, float]]]


@dataclasses.dataclass
class _Run:
    """What the stages of a run hand to each other. `target.params` is the stacked form."""

    config: TrainConfig
    target: Target
    draft: Draft
    examples: Examples
    seq_len: int
    total_steps: int | None
    fingerprint: dict[str, Any]
    spec: StepSpec
    features: Features
    reporter: Reporter


def run(
    config: TrainConfig,
    *,
    target: Target | None = None,
    evaluate: Evaluate | None = None,
    reporter: Reporter | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Any]:
    """Train a drafter; the same call again goes on where the last one stopped.

    Args:
      config: see `jaxspec.config.TrainConfig`. `run.seconds` ends a run early; a schedule needs `run.steps` or
      `run.epochs`.
      target: loaded already (its parameters as a list of layers); loaded from `target.source` when None.
      evaluate: called once as evaluate(target, drafter, shared); what it returns is called with the drafter's float32
        parameters every `run.eval_every` steps and gives numbers for the log. It must not keep the parameters.
      reporter: prints; a bar on a terminal, lines elsewhere, when None.
      devices: what `config.mesh` is made of; all that jax sees when None.

    Returns:
      report: status ("finished", "stopped" or "already finished"), reason, step, resumed_from, seconds, tokens, export,
      weights (which the export holds), best, metrics. It is also in DIRECTORY/report.json, and DIRECTORY/report.html
      shows it with the log's curves.

    Raises:
      ConfigError, DataError, CheckpointError, HubError, ResumeError: see jaxspec.errors; nothing was written for the
      first four unless the run had begun.
      TrainingError: there is nothing in the data to learn from, or no gradient is a number.
    """
    reporter = reporter or Reporter(None if pod.chief() else Console(quiet=True))
    if config.run.export_weights == "best" and evaluate is None:
        raise ConfigError(problem("run.export_weights", "best without an evaluation", "last", "or give `evaluate`"))
    with stop_requests() as stop:
        place = Path(config.run.directory)
        if pod.chief():
            run_directory.check(place, config.run.fresh)
        placement = choose(config.mesh, config.optimizer.batch_size, devices or jax.devices())
        attention = _anchor_attention(config, placement)
        prepared = _prepare(config, target, reporter, placement)
        lock = run_directory.locked(place) if pod.chief() else contextlib.nullcontext()
        with lock, run_directory.writing(place):
            moved = run_directory.prepare(place, config.run.fresh) if pod.chief() else None
            if moved is not None:
                reporter.say(f"run.fresh: the earlier run was moved to {moved}")
            reporter.say("resolved config:\n" + render(config))
            pod.together("the run directory is there")
            checkpoints = Checkpoints(place / "checkpoints", config.run.keep, config.run.keep_every)
            try:
                with attention_over(attention):
                    report = _train(prepared, checkpoints, evaluate, stop, placement)
            finally:
                prepared.features.close()
                checkpoints.close()
            if pod.chief():
                run_directory.write_atomically(place / "report.json", json.dumps(report, indent=1) + "\n")
                run_report.write(place, report, config, reporter.say)
            pod.together("the report is there")
        return report


def _anchor_attention(config: TrainConfig, placement: Placement) -> str:
    """A CPU has no kernel of its own: `auto` is the reference there. Raises ConfigError for one that cannot run."""
    asked, platform = config.run.anchor_attention, placement.mesh.devices.flat[0].platform
    if asked in ("tpu", "gpu") and platform != asked:
        found = f"{asked}, on a {platform.upper()}"
        raise ConfigError(problem("run.anchor_attention", found, "auto, reference or the device's own"))
    if asked == "gpu" and config.drafter.dtype == "float32":
        why = "the GPU's kernel has no float32"
        raise contradiction("run.anchor_attention", "drafter.dtype", why, "use bfloat16, auto or reference")
    return "reference" if asked == "auto" and platform == "cpu" else asked


def _prepare(config: TrainConfig, target: Target | None, reporter: Reporter, placement: Placement) -> _Run:
    """Everything that can be wrong with the inputs, before anything is written."""
    if config.run.eval_every and jax.process_count() > 1:
        raise ConfigError(problem("run.eval_every", config.run.eval_every, "0 where several processes train"))
    if pod.chief():
        try:
            check_export_folder(_export_folder(config))
        except CheckpointError as error:
            raise CheckpointError(f"run.export: {error}") from error
    tracking.check(config)
    target = target or load_stacked(config, placement)
    draft = load_draft(config, target, reporter.say)
    examples = load_data(config, target)
    reporter.say(examples.statistics.line())
    data = config.data
    seq_len = padded_length(examples, data.max_length)
    _check_anchors(config, draft.drafter, examples, seq_len)
    features = open_features(config, target, draft.drafter, examples, seq_len)
    rows = config.optimizer.batch_size * config.optimizer.accumulation
    limits = [config.run.steps, config.run.epochs and steps_per_epochs(len(examples), config.run.epochs, rows)]
    total = min((limit for limit in limits if limit), default=None)
    spec = StepSpec(
        model=target.model,
        drafter=draft.drafter,
        optimizer=opt.build(config.optimizer),
        learning_rate=opt.schedule(config.optimizer, total),
        num_anchors=data.num_anchors,
        anchor_rule=data.anchor_rule,
        block_size=draft.drafter.config.block_size,
        total_steps=total,
        dtype=jnp.dtype(config.drafter.dtype),
        ema_decay=config.optimizer.ema_decay,
    )
    identity = f"{target.name} {target.revision}"
    marks = fp.fingerprint(config, examples, draft.drafter.to_hf(), identity, total) | features.marks
    if features.layout is not None and not config.run.eval_every:
        target = dataclasses.replace(target, params=tables_alone(target.params))  # nothing runs the target
    else:
        target = stacked(target)
        model, params = needed_target(target, draft.drafter, whole=bool(config.run.eval_every))
        if model is not target.model:
            spec = dataclasses.replace(spec, model=model)
            target = dataclasses.replace(target, params=params)
    return _Run(config, target, draft, examples, seq_len, total, marks, spec, features, reporter)


def _check_anchors(config: TrainConfig, drafter: Any, examples: Examples, seq_len: int) -> None:
    """Raises DataError where no step could have an anchor, which would export what was never trained."""
    if isinstance(drafter, (Eagle, Eagle3)):  # every supervised row of a sequence is trained, anchors are not read
        return
    masks = (examples[index]["loss_mask"] for index in range(len(examples)))
    if not any_anchor(masks, seq_len, config.data.anchor_rule, drafter.config.block_size):
        raise DataError(
            problem(
                "data.anchor_rule",
                f"no place for an anchor in any of the {len(examples)} sequences (the longest has {examples.longest} "
                f"tokens, a block {drafter.config.block_size}) under the rule {config.data.anchor_rule!r}",
                "longer sequences",
                "use other data, a smaller drafter.block_size or data.anchor_rule=adjacent",
            )
        )


def _train(
    run: _Run, checkpoints: Checkpoints, evaluate: Evaluate | None, stop: StopRequest, placement: Placement
) -> dict[str, Any]:
    config, reporter, place = run.config, run.reporter, Path(run.config.run.directory)
    key = jax.random.key(config.run.seed)
    batches = run.features.batches(run.examples, run.seq_len)
    step = checkpoints.resumable()
    before: dict[str, Any] = {"seconds": 0.0, "tokens": 0}
    if step is not None:
        before = _resumable(checkpoints.meta(step), run, place)
        batches.set_state(before["input"])
    batches.begin(step or 0)
    params = (
        run.draft.params
        if run.draft.params is not None
        else initial_params(run.draft.drafter, key, jnp.float32, run.examples)
    )
    average = config.optimizer.ema_decay is not None
    state = placement.put(create(placement.put(params), run.spec.optimizer, key, average))
    if step is not None:
        state = checkpoints.restore(step, abstract(state), placement.shardings(state))
    goal = f" of {run.total_steps}" if run.total_steps else ""
    origin = "starting at step 0" if step is None else f"resuming from the checkpoint at step {step}"
    reporter.say(f"{origin}{goal} in {place}")
    if pod.chief():
        run_directory.write_atomically(place / "config.yaml", render(config))
    shared = run.draft.shared(run.target)
    best = Best(config, place / "best", run.draft, reporter.say) if config.run.eval_every and pod.chief() else None
    if step is not None and _is_finished(step, before["seconds"], run):
        reached = ["seconds"] if run.total_steps is None or step < run.total_steps else ["steps", "epochs"]
        limits = " or ".join(f"run.{name}" for name in reached if getattr(config.run, name))
        more = f" or raise {limits}" if reached == ["seconds"] or not fp.reads_total(config) else ""
        reporter.say(f"this run is finished (step {step}); set run.fresh=true to start anew{more}")
        outcome = Outcome(state, step, "already finished", before["seconds"], before["tokens"], {})
    else:
        outcome = _loop(run, state, step or 0, before, batches, checkpoints, shared, evaluate, stop, placement, best)
    finished = outcome.reason in ("steps", "seconds", "already finished")
    weights = _weights(config, outcome.step, best, outcome.last)
    exported = _export(run, outcome, best, weights) if finished else None
    status = "already finished" if outcome.reason == "already finished" else "finished" if finished else "stopped"
    if outcome.reason == "seconds":
        reporter.say(f"the budget of run.seconds={config.run.seconds:g} was reached at step {outcome.step}")
    if status == "stopped":
        reporter.say(f"stopped by {outcome.reason} at step {outcome.step}, saved; the same command goes on from there")
    if finished:
        batches.finish()
    return {
        "version": META_VERSION,
        "status": status,
        "reason": outcome.reason,
        "step": outcome.step,
        "resumed_from": step,
        "seconds": outcome.seconds,
        "tokens": outcome.tokens,
        "skipped_steps": int(jax.device_get(outcome.state.skipped)),
        "sequence_length": run.seq_len,
        "data": dataclasses.asdict(run.examples.statistics),
        "export": None if exported is None else str(exported),
        "weights": weights if finished else None,
        "best": None if best is None or best.found is None else dataclasses.asdict(best.found),
        "metrics": outcome.last,
    }


def _resumable(meta: dict[str, Any], run: _Run, place: Path) -> dict[str, Any]:
    if meta.get("version") != META_VERSION:
        raise ResumeError(
            problem(
                f"run.directory {place}",
                f"checkpoint format {meta.get('version')!r}",
                f"{META_VERSION}",
                "use the release that wrote it, or run.fresh=true",
            )
        )
    fp.check(meta["fingerprint"], json.loads(json.dumps(run.fingerprint)), str(place))
    return meta


def _is_finished(step: int, seconds: float, run: _Run) -> bool:
    limit = run.config.run.seconds
    return (run.total_steps is not None and step >= run.total_steps) or (limit is not None and seconds >= limit)


def _loop(
    run: _Run, state: Any, step: int, before: dict[str, Any], batches: Batches, checkpoints: Checkpoints, shared:
    Shared,
    evaluate: Evaluate | None, stop: StopRequest, placement: Placement, best: Best | None,
) -> Outcome:  # fmt: skip
    config, place = run.config, Path(run.config.run.directory)
    rows = (config.optimizer.accumulation, config.optimizer.batch_size)
    stored = run.features.layout is not None
    frozen = placement.put(Frozen({} if stored else run.target.params, shared))
    batch = batch_shapes(*rows, run.seq_len, run.features.layout)
    started = time.perf_counter()
    shape = abstract(state)  # the first step donates the arrays
    with memory.answered(config, shape, frozen, placement, run.reporter.say):
        compiled = compile_step(run.spec, state, frozen, batch, placement)
    run.reporter.say(
        f"step compiled in {time.perf_counter() - started:.1f} s: {rows[0]} x {rows[1]} sequences of {run.seq_len}, "
        f"{config.data.num_anchors} anchors each, on {placement}"
    )
    writer: MetricsWriter | NoWriter = NoWriter()
    if pod.chief():
        tracker = None if config.run.wandb is None else tracking.Tracker(config, place)
        writer = MetricsWriter(place, config.run.tensorboard, step, tracker)
    hook = evaluate(run.target, run.draft.drafter, shared) if evaluate is not None and config.run.eval_every else None
    loop = Loop(
        config.run, compiled, frozen, placement, batches, checkpoints, writer, run.reporter, stop, run.total_steps,
        {"version": META_VERSION, "fingerprint": run.fingerprint, "config": config.model_dump(mode="json")}, hook, best,
    )  # fmt: skip
    try:
        with memory.answered(config, shape, frozen, placement, run.reporter.say, compiled):
            return loop.run(state, step, before["seconds"], before["tokens"])
    finally:
        writer.close()


def _export_folder(config: TrainConfig) -> Path:
    return Path(config.run.export or Path(config.run.directory) / "export")


def _weights(config: TrainConfig, step: int, best: Best | None, last: dict[str, float]) -> dict[str, Any]:
    """Which weights an export of this run holds: `from` last or best, whether they are the moving average (its decay),
    the step they are of, and their tau where it was measured."""
    chosen = {"from": config.run.export_weights, "ema_decay": config.optimizer.ema_decay}
    if config.run.export_weights == "best" and best is not None and best.found is not None:
        return chosen | {"step": best.found.step, "tau": best.found.tau}
    return chosen | {"step": step, "tau": last.get("eval/tau")}


def _export(run: _Run, outcome: Outcome, best: Best | None, weights: dict[str, Any]) -> Path:
    """Write the drafter in its public format; one that is there from an earlier end of this run stays."""
    folder = _export_folder(run.config)
    params = pod.gathered(outcome.state.served)
    if not pod.chief():
        return folder
    path = Path(run.config.run.directory) / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    earlier, same = report.get("export"), (report.get("weights") or {}).get("from") == weights["from"]
    there = (folder / "config.json").is_file() and earlier is not None and Path(earlier).resolve() == folder.resolve()
    if outcome.reason == "already finished" and there and same:
        weights |= report["weights"]
        run.reporter.say(f"drafter: {folder}")
        return folder
    which = "moving average" if weights["ema_decay"] is not None else "parameters"
    if weights["from"] == "best":
        assert best is not None  # export_weights=best asks for run.eval_every
        found = best.copy_to(folder)
        which += f" of step {found.step}, the best by tau ({found.tau:.3f})"
    else:
        draft = dataclasses.replace(run.draft, params=params)
        said = about(run.config, outcome.step, weights["tau"])
        save_drafter(folder, draft, dtype=run.config.drafter.dtype, metadata=said)
        which += f" of step {outcome.step}"
    run.reporter.say(f"drafter exported to {folder} ({which})")
    return folder
