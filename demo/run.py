"""The main job, end to end, on the embedded default: train a drafter for SmolLM2-135M-Instruct, export it, load it
back, measure it, and serve it over gRPC beside plain decoding. Writes out/demo/report.json.

    make demo            or            python -m demo.run [--seconds 300]

Under 12 minutes on 2 CPU cores, set-up included. On a CPU this drafter does not pay yet; the report prints the speed
as it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from demo.make_answers import DATA
from demo.prompts import held_out
from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.config import TrainConfig, load_config
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.errors import ServerError
from jaxspec.evaluation.tau import TauReport, measure_tau
from jaxspec.serving.client import Client
from jaxspec.training.build import fresh_drafter, initial_params
from jaxspec.training.data import load_examples
from jaxspec.training.overlap import find_overlap
from pallas_kernels.bench import commit

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "demo"
EVAL_TOKENS = 48
FLOOR = 1.12  # a tau below it means that something broke
SERVED_TOKENS = 64
SERVED_PROMPTS = 8
SLOTS = 8
CONTEXT = 512


def main(seconds: float) -> int:
    """Runs the demo; returns the exit code."""
    started = time.perf_counter()
    console = Console()
    OUT.mkdir(parents=True, exist_ok=True)
    overrides = [
        f"run.directory={OUT / 'train'}",
        f"run.export={OUT / 'drafter'}",
        "run.fresh=true",
        f"run.seconds={seconds}",
    ]
    config = load_config(TrainConfig, ROOT / "configs" / "quickstart.yaml", overrides)

    step(console, "the target")
    target = load_target(config.target.source, dtype="float32")
    tokenizer = load_tokenizer(target.directory)
    prompts = held_out(OUT)
    ids = [chat_ids(tokenizer, row["prompt"]) for row in prompts]
    overlap = find_overlap([row["prompt"] for row in prompts], training_texts(tokenizer))
    console.print(overlap.line())

    step(console, f"tau of the untrained drafter on {len(ids)} held-out prompts")
    before = tau(target, untrained(config, target), ids)
    console.print(f"tau {before.tau:.3f}")

    step(console, f"training for {seconds:.0f} s")
    subprocess.run(
        [sys.executable, ROOT / "train.py", "--config", "configs/quickstart.yaml", *overrides], cwd=ROOT, check=True
    )

    step(console, "tau of the exported drafter, loaded back")
    after = tau(target, load_drafter(OUT / "drafter", target), ids)
    console.print(f"tau {after.tau:.3f} [{after.low:.3f}, {after.high:.3f}]")

    step(console, f"{SERVED_PROMPTS} prompts x {SERVED_TOKENS} tokens over gRPC, with and without the drafter")
    asked = range(0, len(ids), len(ids) // SERVED_PROMPTS)
    served = {}
    for name, drafter in drafters().items():
        console.print(f"a server with drafter {name}:" if name == "none" else "a server with the trained drafter:")
        served[name] = serve_and_ask(drafter, [ids[index] for index in asked])

    identical = served["none"]["answers"] == served["drafter"]["answers"]
    report = {
        "command": "make demo",
        "commit": commit(),
        "seed": config.run.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}",
        "tau_before": before.tau,
        "tau_after": after.tau,
        "tau_after_95_percent": [after.low, after.high],
        "identical_to_plain": identical,
        "forwards_per_token": 1 / after.tau,
        "repeated_bigram_share": after.repeated_bigram_share,
        "acceptance_by_position": list(after.acceptance_conditional),
        "tokens_per_second": {name: one["tokens_per_second"] for name, one in served.items()},
        "prompts": [
            {**row, "prompt_ids": one, "served": index in asked}
            for index, (row, one) in enumerate(zip(prompts, ids, strict=True))
        ],
        "overlap": {"checked": overlap.checked, "exact": len(overlap.exact), "ngram": len(overlap.ngram)},
        "served": served,
        "export": os.path.relpath(OUT / "drafter", ROOT),
        "training_seconds": seconds,
        "total_seconds": time.perf_counter() - started,
    }
    (OUT / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    show(console, report)
    wrong = {
        "the served tokens differ from those of plain decoding": not identical,
        f"tau {after.tau:.3f} is below {FLOOR}, which two free cores reach in 300 s of training; on a slower or busy "
        "machine give it more: .venv/bin/python -m demo.run --seconds 900": after.tau < FLOOR,
        f"tau {after.tau:.3f} is not above the untrained {before.tau:.3f} by its 95 % interval": after.low
        <= before.tau,
        f"{len(overlap.exact)} evaluation prompts are in the training data": bool(overlap.exact),
    }
    for reason in (reason for reason, holds in wrong.items() if holds):
        console.print(f"FAILED: {reason}")
    return int(any(wrong.values()))


def step(console: Console, title: str) -> None:
    """A heading with the time, so that a reader sees where the minutes go."""
    console.rule(f"{time.strftime('%H:%M:%S')}  {title}", align="left")


def untrained(config: TrainConfig, target: Target) -> Draft:
    """The drafter that the training starts from."""
    drafter = fresh_drafter(config, target.config)
    params = initial_params(drafter, jax.random.key(config.run.seed), "float32")
    return Draft(drafter, params)


def tau(target: Target, draft: Draft, ids: list[list[int]]) -> TauReport:
    """tau by the serving round, greedy."""
    runner = SlotRunner(target, draft, num_slots=SLOTS, max_context=CONTEXT, prefill_chunk=128)
    return measure_tau(runner, ids, SamplingParams(max_new_tokens=EVAL_TOKENS))[0]


def training_texts(tokenizer: Any) -> Iterator[str]:
    """The shipped training data as text."""
    shipped = load_examples(DATA)
    for index in range(len(shipped)):
        yield tokenizer.decode(shipped[index]["input_ids"].tolist())


def drafters() -> dict[str, str]:
    """The two servers."""
    return {"none": "none", "drafter": str(OUT / "drafter")}


def serve_and_ask(drafter: str, ids: list[list[int]]) -> dict[str, Any]:
    """Starts a server process, asks all prompts at once, stops it. Returns answers, speed and rounds."""
    with server(drafter) as address, Client(address) as client:
        started = time.perf_counter()
        answers = ask_all(client, ids)
        seconds = time.perf_counter() - started
    tokens = [answer.token_ids for answer in answers]
    rounds = sum(int(answer.usage["rounds"]) for answer in answers)
    return {
        "answers": tokens,
        "rounds": rounds,
        "seconds": seconds,
        "tokens_per_second": sum(map(len, tokens)) / seconds,
    }


def ask_all(client: Client, ids: list[list[int]]) -> list[Any]:
    """All prompts side by side, each for at least SERVED_TOKENS tokens."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(ids)) as pool:
        ask = lambda prompt: client.complete(prompt, max_new_tokens=SERVED_TOKENS, ignore_eos=True)  # noqa: E731
        return list(pool.map(ask, ids))


@contextlib.contextmanager
def server(drafter: str) -> Iterator[str]:
    """A serve.py process on a free port; yields its address once it is SERVING."""
    command = [
        sys.executable,
        str(ROOT / "serve.py"),
        "--config",
        "configs/serve/quickstart.yaml",
        f"drafter={drafter}",
    ]
    command += [
        "server.port=0",
        f"engine.num_slots={SLOTS}",
        f"engine.max_context={CONTEXT}",
        "engine.prefill_chunk=128",
        f"engine.slot_buckets=[{SLOTS}]",  # all prompts come at once: no smaller program would run
        "engine.pause_drafting=false",  # forwards are counted, also where they cost time
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"SERVING on (\S+)", line):
                yield found[1]
                break
        else:
            raise ServerError(f"serve.py: ended with code {process.wait()} before it was SERVING, expected it to start")
    finally:
        process.terminate()
        process.communicate()


def show(console: Console, report: dict[str, Any]) -> None:
    """The report as a table."""
    table = Table(title="out/demo/report.json", show_header=False)
    low, high = report["tau_after_95_percent"]
    speed = report["tokens_per_second"]
    table.add_row("tau before training", f"{report['tau_before']:.3f}")
    table.add_row("tau after training (95 %)", f"{report['tau_after']:.3f} ({low:.3f} to {high:.3f})")
    table.add_row("target forwards per token", f"{report['forwards_per_token']:.3f}")
    forwards = {name: one["rounds"] for name, one in report["served"].items()}
    table.add_row("served: forwards without / with drafter", f"{forwards['none']} / {forwards['drafter']}")
    table.add_row("identical to plain decoding", "yes" if report["identical_to_plain"] else "NO")
    table.add_row("tokens/s without / with drafter", f"{speed['none']:.1f} / {speed['drafter']:.1f}")
    table.add_row("drafter", report["export"])
    table.add_row("seconds", f"{report['total_seconds']:.0f}")
    console.print(table)
    command = f"python serve.py --config configs/serve/quickstart.yaml drafter={report['export']}"
    console.print(f"Serve it: {command}", soft_wrap=True)  # a line break in it would cut the command in two
    console.print(
        "On a CPU a verified row costs about as much as a decoded one, so fewer forwards are not yet less time; on an "
        "accelerator a forward over a few rows costs what a single row costs."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="wall-clock budget of the training")
    sys.exit(main(parser.parse_args().seconds))
