"""The drafters of the serving bench: a DFlash and a DSpark for SmolLM2, trained for a minute on the target's answers.

    python tools/bench_drafters.py --out out/bench [--answers 4096] [--seconds 75] [--prompts FILE.jsonl ...]

Answers questions of the demo's kinds (and those of --prompts, one object with "prompt" a line) with the serving engine,
trains both drafters side by side, and fits the temperatures of DSpark's confidence on questions that neither training
nor bench knows. Writes dflash/, dspark/, sts.json and drafters.json; needs a GPU to be quick.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from demo.make_answers import chat_ids
from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.evaluation.calibration import fit_temperatures
from jaxspec.evaluation.load import closed_loop
from jaxspec.serving.cost import unmeasured
from jaxspec.serving.engine import Engine
from tools.serving_pairs import BLOCK, lean, recorded, split_questions

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 384
METHODS = {
    "dflash": [f"drafter.block_size={BLOCK + 1}", "objective.gamma=4.0"],
    # the gradient of the L1 distance is nothing before the drafter knows anything (configs/smollm2/dspark.yaml)
    "dspark": [f"drafter.block_size={BLOCK}", "objective.ce_alpha=1.0"],
}


def engine_for(target: Any, draft: Any, slots: int, attention: str) -> Engine:
    """One size, everything verified."""
    engine = Engine(
        target, draft, num_slots=slots, slot_buckets=(slots,), max_context=CONTEXT, prefill_chunk=min(512, CONTEXT),
        prefill_pieces=8, prefix_cache=False, rules=False, max_logprobs=None, pause_drafting=False,
        attention=attention, row_shares=(), cost_table=None if draft is None else unmeasured(1),
    )  # fmt: skip
    if engine.drafting.planner is not None:
        engine.drafting.planner.mode = "static"
    return lean(engine)


def answer(engine: Engine, prompts: list[list[int]], new_tokens: int, path: Path) -> int:
    """Writes the answers as a token file; returns how many tokens they have."""
    done = generate(engine, prompts, SamplingParams(max_new_tokens=new_tokens))
    sequences = [list(one.prompt_ids) + list(one.tokens) for one in done]
    np.savez_compressed(
        path,
        tokens=np.concatenate([np.array(one, np.uint16) for one in sequences]),
        offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
        prompt_lengths=np.array([len(one.prompt_ids) for one in done], np.int64),
    )
    return sum(len(one.tokens) for one in done)


def train(target: str, data: Path, out: Path, arguments: argparse.Namespace) -> None:
    """Both drafters at once, each in a process of its own. SystemExit where one fails."""
    running = {}
    for method, own in METHODS.items():
        overrides = [
            f"target.source={target}", f"data.path={data}", f"data.max_length={CONTEXT}", "data.num_anchors=64",
            f"optimizer.batch_size={arguments.batch}", "optimizer.learning_rate=0.001",
            f"run.directory={out / f'{method}-run'}", f"run.export={out / method}", "run.fresh=true",
            f"run.epochs={arguments.epochs}", f"run.seconds={arguments.seconds}", "run.checkpoint_every=0",
            "run.log_every=100", "run.tensorboard=false", *own, *arguments.override,
        ]  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), "--config", f"configs/smollm2/{method}.yaml", *overrides]
        running[method] = subprocess.Popen(command, cwd=ROOT)
    failed = [method for method, process in running.items() if process.wait()]
    if failed:
        sys.exit(f"training of {', '.join(failed)} failed")


def calibrate(target: Any, out: Path, prompts: list[list[int]], slots: int, attention: str) -> dict[str, Any]:
    """Fits and writes the temperatures of DSpark's confidence; what it reached on the same questions."""
    engine = engine_for(target, load_drafter(out / "dspark", target), slots, attention)
    engine.warm_up()
    with recorded(engine) as rows:
        report = closed_loop(engine, prompts, [128], slots, seconds=0.0, min_rounds=160)
    said, stood = (np.array(part) for part in zip(*[(one.confidence, one.accepted) for one in rows], strict=True))
    said = np.clip(said.astype(np.float64), 1e-6, 1 - 1e-6)
    accepted = np.arange(said.shape[1]) < stood[:, None]
    fitted = fit_temperatures(np.log(said / (1 - said)), accepted, dataset="demo questions, held out")
    fitted.save(out / "sts.json")
    reached = [(stood >= slot).sum() for slot in range(said.shape[1])]
    return {
        "tau": report.tau,
        "rounds": len(rows),
        "temperatures": fitted.temperatures,
        "calibration_error_before": fitted.ece_before,
        "calibration_error_after": fitted.ece_after,
        "acceptance_by_slot": [
            float(row.sum() / max(count, 1)) for row, count in zip(accepted.T, reached, strict=True)
        ],
    }


def main() -> int:
    """Prints and writes what was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=512, help="answered at once")
    parser.add_argument("--calibration-slots", type=int, default=64)
    parser.add_argument("--attention", default="auto", help="what reads the pages, as Engine takes it")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=75.0, help="most of each training")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], metavar="JSONL", help="more training questions")
    parser.add_argument("--override", nargs="*", default=[], metavar="section.key=value", help="of both trainings")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process and two trainings share one card
    out, started = arguments.out.resolve(), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    target = load_target(arguments.target, dtype="float32" if jax.default_backend() == "cpu" else "bfloat16")
    tokenizer = load_tokenizer(target.directory)
    questions = split_questions(arguments.answers)
    more = [json.loads(line)["prompt"] for file in arguments.prompts for line in file.read_text().split("\n") if line]
    asked = [*questions.train, *more]
    np.random.default_rng(0).shuffle(asked)
    encode = lambda texts: [ids for ids in (chat_ids(tokenizer, text) for text in texts) if len(ids) <= 192]  # noqa: E731
    prompts = encode(asked)[: arguments.answers]
    slots = min(arguments.slots, len(prompts))
    engine = engine_for(target, None, slots, arguments.attention)
    tokens = answer(engine, prompts, arguments.new_tokens, out / "answers.npz")
    del engine  # its pages are the trainings'
    said: dict[str, Any] = {"answers": len(prompts), "answer_tokens": tokens}
    print(f"{time.perf_counter() - started:.0f} s: {json.dumps(said)}", flush=True)
    train(arguments.target, out / "answers.npz", out, arguments)
    print(f"{time.perf_counter() - started:.0f} s: trained", flush=True)
    asked_to_fit = encode(questions.calibration)
    said["dspark"] = calibrate(target, out, asked_to_fit, arguments.calibration_slots, arguments.attention)
    said["seconds"] = round(time.perf_counter() - started, 1)
    (out / "drafters.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
