"""Tokens a second of the serving engine under load: no drafter, DFlash, DSpark verified whole, DSpark with budgets.

    python tools/bench_serving.py --dflash DIR --dspark DIR [--target smollm2] [--sts FILE]
    python tools/bench_serving.py --shape qwen3-4b --rates-of results/h200/serving.json --concurrency 1,8,64,256

A closed loop at each concurrency, in the process of the engine (no network), all methods in one run. Each concurrency
has a process of its own, with as many slots: they compile side by side, then wait for one another and measure one at a
time; one that stands still is ended, with its stacks on the error stream. The cost table is measured first, on the
engine that uses it. Also: overlap on and off, the device's idle share, the rounds under jax's transfer guard with a
control that trips it, confidences beside what was accepted (for tools/simulate_serving.py), and how often each slot
stood. The record is written after each part: what was measured is there whatever ends the run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import filelock
import jax
import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.evaluation.device_time import DeviceTrace
from jaxspec.evaluation.load import LoadReport, closed_loop
from jaxspec.serving.adaptive import DraftSwitch
from jaxspec.serving.cost import unmeasured
from jaxspec.serving.cost_fit import Cell, fit, misfit
from jaxspec.serving.engine import Engine
from jaxspec.serving.profiling import measure
from pallas_kernels.bench import commit
from tools.serving_pairs import BLOCK, SHAPES, Pairs, lean, random_shape, recorded, trained

METHODS = ("none", "dflash", "dspark static", "dspark scheduled")
DRAFTED = ("dflash", "dspark")
WARM_ROUNDS = 150  # of the scheduled engine: what it knows of a load is as old as that
GUARDED_ROUNDS = 100
STALLED = 180.0  # seconds without a new part, after which a process says where it stands and gives up its turn


@dataclasses.dataclass
class Bench:
    """The engines, of which DSpark's serves two methods, and what a request looks like."""

    pairs: Pairs
    arguments: argparse.Namespace
    engines: dict[str, Engine]
    lengths: list[int]
    switch: DraftSwitch

    def engine(self, method: str) -> Engine:
        """The method's engine, set to it."""
        engine = self.engines[method.partition(" ")[0]]
        planner = engine.drafting.planner
        if planner is not None:
            scheduled = method == "dspark scheduled"
            planner.mode = "compact" if scheduled else "static"
            engine.drafting.switch = self.switch if scheduled else None
        return engine

    def run(self, method: str, concurrency: int, seconds: float, **more: Any) -> LoadReport:
        """One window of a closed loop."""
        engine = self.engine(method)
        return closed_loop(engine, self.pairs.prompts, self.lengths, concurrency, seconds=seconds, **more)


def build(pairs: Pairs, arguments: argparse.Namespace) -> Bench:
    """Engines over the same slots and shapes, compiled side by side."""
    slots = max(arguments.concurrency)
    common: dict[str, Any] = {
        "num_slots": slots,
        "slot_buckets": tuple(arguments.concurrency),
        "row_shares": arguments.shares,
        "max_context": arguments.max_context,
        "prefill_chunk": min(arguments.chunk, arguments.max_context),
        "prefill_pieces": arguments.pieces,
        "prefix_cache": False,
        "rules": False,
        "max_logprobs": None,
        "program": pairs.program,
        "attention": arguments.attention,
    }
    engines = {
        "none": Engine(pairs.target, None, **common),
        "dflash": Engine(pairs.target, pairs.drafts["dflash"], pause_drafting=False, **common),
        "dspark": Engine(pairs.target, pairs.drafts["dspark"], cost_table=unmeasured(1), **common),
    }
    rng = np.random.default_rng(7)
    low, high = arguments.new_tokens // 2, arguments.new_tokens * 3 // 2
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, future in {name: pool.submit(lean(engine).warm_up) for name, engine in engines.items()}.items():
            future.result()
            seconds = time.perf_counter() - started
            print(f"{slots}: {name}: {engines[name].num_executables} compiled, {seconds:.0f} s", flush=True)
    return Bench(pairs, arguments, engines, rng.integers(low, high + 1, 997).tolist(), DraftSwitch())


def measured_cost(bench: Bench) -> dict[str, Any]:
    """Measures the cost table on DSpark's engine and gives it to its planner."""
    engine = bench.engine("dspark scheduled")
    cells = measure(engine, context=bench.arguments.max_context // 2, steps=bench.arguments.steps)
    table = fit(cells, "additive")
    assert engine.drafting.planner is not None
    engine.drafting.planner.table = table
    return described(cells)


def described(cells: list[Cell]) -> dict[str, Any]:
    """Cells, and the one table over all of them."""
    table = fit(cells, "additive")
    median, worst = misfit(table, cells)
    return {
        "table": dataclasses.asdict(table),
        "misfit": {"median": median, "worst": worst},
        "cells": [list(dataclasses.astuple(cell)) for cell in cells],
        "cells_are": [field.name for field in dataclasses.fields(Cell)],
    }


def loads(bench: Bench, save: Callable[[str, Any], None]) -> list[dict[str, Any]]:
    """Every method at every concurrency, in turn, `repeats` windows each."""
    found: list[dict[str, Any]] = []
    for concurrency in bench.arguments.concurrency:
        windows: dict[str, list[LoadReport]] = {method: [] for method in METHODS}
        for repeat in range(bench.arguments.repeats):
            for method in METHODS:
                warm = WARM_ROUNDS if method == "dspark scheduled" and not repeat else 0
                windows[method].append(bench.run(method, concurrency, bench.arguments.seconds, warm_rounds=warm))
        found.append({"concurrency": concurrency, **{method: pooled(one) for method, one in windows.items()}})
        save("loads", found)
        rates = {method: found[-1][method]["tokens_per_second"] for method in METHODS}
        print(concurrency, {method: round(rate, 1) for method, rate in rates.items()}, flush=True)
    return found


def pooled(windows: list[LoadReport]) -> dict[str, Any]:
    """One record of several windows: rates over their sum, and each window's own."""
    seconds, rounds = (sum(getattr(one, name) for one in windows) for name in ("seconds", "rounds"))
    mean = lambda values: float(np.mean(values)) if all(v is not None for v in values) else None  # noqa: E731
    pair = lambda name: [mean([v and v[i] for v in (getattr(one, name) for one in windows)]) for i in (0, 1)]  # noqa: E731
    return {
        "tokens_per_second": sum(one.tokens for one in windows) / seconds,
        "windows": [round(one.tokens_per_second, 1) for one in windows],
        "round_ms": 1e3 * seconds / max(rounds, 1),
        "rounds": rounds,
        "drafted_rounds": sum(one.drafted_rounds for one in windows),
        "rows_a_round": sum(one.rows for one in windows) / max(rounds, 1),
        "tau": mean([one.tau for one in windows]),
        "proposed": mean([one.proposed for one in windows]),
        "ttft_s": pair("ttft"),
        "tpot_s": pair("tpot"),
        "finished": sum(one.finished for one in windows),
        "compilations": sum(one.compilations for one in windows),
    }


def overlap(bench: Bench) -> list[dict[str, Any]]:
    """The same windows with the host's part of a round behind the device's, and in front of it."""
    found = []
    for concurrency in set(bench.arguments.overlap) & set(bench.arguments.concurrency):
        for method in METHODS:
            engine, both = bench.engine(method), {}
            for lag in (1, 0):
                engine.lag = lag
                both["on" if lag else "off"] = pooled([bench.run(method, concurrency, bench.arguments.seconds)])
            engine.lag = 1
            found.append({"concurrency": concurrency, "method": method, **both})
    return found


def idle(bench: Bench) -> list[dict[str, Any]]:
    """Round wall without the profiler, device time a round with it."""
    found = []
    for method in METHODS:
        wall = bench.run(method, bench.arguments.profile_at, bench.arguments.seconds)
        trace = DeviceTrace()
        seen = bench.run(method, bench.arguments.profile_at, 0.0, min_rounds=60, around=lambda: trace)  # noqa: B023
        busy = trace.time.busy / seen.rounds
        found.append({
            "method": method, "concurrency": bench.arguments.profile_at, "round_wall_ms": 1e3 * wall.round_seconds,
            "device_busy_ms": 1e3 * busy, "idle_share": 1 - busy / wall.round_seconds,
            "idle_share_while_traced": trace.time.idle_share, "device_events_a_round": trace.time.events / seen.rounds,
        })  # fmt: skip
    return found


def guarded(bench: Bench) -> dict[str, Any]:
    """Rounds of the scheduled engine while implicit copies are errors, then the same with one deliberate `.item()`."""
    engine, concurrency = bench.engine("dspark scheduled"), min(32, bench.arguments.largest)
    first = jax.jit(lambda values: values.reshape(-1)[0])
    first(jax.device_put(np.zeros((engine.num_slots, engine.num_proposals), np.float32)))  # compiled outside
    publish = engine.drafting.publish

    def careless(confidence: Any, decoding: Any) -> None:
        first(confidence).item()
        publish(confidence, decoding)

    with jax.transfer_guard("disallow"):
        clean = bench.run("dspark scheduled", concurrency, 0.0, min_rounds=GUARDED_ROUNDS)
    bench.engine("dspark static")  # drafts in every round, so that the control is reached
    engine.drafting.publish = careless  # type: ignore[method-assign]
    tripped = None
    try:
        with jax.transfer_guard("disallow"):
            bench.run("dspark static", concurrency, 0.0, min_rounds=1)
    except Exception as error:  # jax raises a RuntimeError of its own; whatever comes is reported
        tripped = str(error).splitlines()[0][:200]
    return {
        "rounds": clean.rounds, "compilations": clean.compilations, "concurrency": concurrency,
        "guard": "jax.transfer_guard('disallow')", "item_tripped_it": tripped is not None, "message": tripped,
    }  # fmt: skip


def confidences(bench: Bench) -> dict[str, Any]:
    """What the drafter said of each slot, and how many proposals stood, when all were verified: by request, in order.

    Lists are [request][round] -> (m confidences, accepted)."""
    concurrency = min(32, bench.arguments.largest)
    rows: dict[int, list[Any]] = {}
    with recorded(bench.engine("dspark static")) as found:
        bench.run("dspark static", concurrency, 0.0, min_rounds=160)
    for one in found:
        rows.setdefault(one.request, []).append([[round(value, 3) for value in one.confidence], one.accepted])
    long = sorted((one for one in rows.values() if len(one) >= 16), key=len, reverse=True)[:48]
    return {"concurrency": concurrency, "requests": [one[:40] for one in long]}


def stood(bench: Bench) -> dict[str, Any]:
    """How often each slot of a whole block stood, given that those before it did, by method; slots that were not
    reached 10 times are left at the rate of the one before."""
    concurrency, found = min(32, bench.arguments.largest), {}
    for method in ("dflash", "dspark static"):
        with recorded(bench.engine(method)) as rounds:
            bench.run(method, concurrency, 0.0, min_rounds=160)
        counts = np.bincount([one.accepted for one in rounds], minlength=BLOCK + 1)
        reached = counts[::-1].cumsum()[::-1]  # at least k stood
        rates: list[float] = []
        for tried, passed in itertools.pairwise(reached):
            rates.append(round(float(passed / tried), 4) if tried >= 10 or not rates else rates[-1])
        found[method.partition(" ")[0]] = {"rates": rates, "rounds": len(rounds)}
    return {"concurrency": concurrency, **found}


def verdicts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scheduled against the best of the others, and against static where static's round is dear."""
    checks = []
    for load in found:
        rate = {method: load[method]["tokens_per_second"] for method in METHODS}
        best = max(METHODS[:3], key=lambda method: rate[method])
        dear = load["dspark static"]["round_ms"] / load["none"]["round_ms"]
        over_best, over_static = (rate[METHODS[3]] / rate[other] for other in (best, "dspark static"))
        checks.append({
            "concurrency": load["concurrency"], "best_other": best, "scheduled_over_best_other": over_best,
            "static_round_over_plain_step": dear, "scheduled_over_static": over_static,
            "holds": over_best >= 0.97 and (dear < 1.5 or over_static >= 1.05),
        })  # fmt: skip
    return checks


def write(record: dict[str, Any], path: Path) -> None:
    """All of it or nothing: the process may be ended at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text(lines(record), encoding="utf-8")
    partial.replace(path)


def lines(record: dict[str, Any]) -> str:
    """JSON with a line for each field, and for each entry of a list of records."""

    def one(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {one(value)}" for name, value in record.items()) + "\n}\n"


def surroundings() -> dict[str, Any]:
    """Command, commit, card and versions."""
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "command": command(),
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "card": _card(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def command() -> str:
    """As it was typed."""
    return " ".join(["python", "tools/bench_serving.py", *sys.argv[1:]])


def _card() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(argv: list[str] | None = None) -> int:
    """Writes --out and prints a line a load; 1 where a check does not hold."""
    arguments = parse(argv)
    if len(arguments.concurrency) == 1:
        record = alone(arguments)
    else:
        record = crowd(arguments, list(sys.argv[1:] if argv is None else argv))
    for check in record["checks"]:
        print(json.dumps(check), flush=True)
    if missing := record.get("missing"):
        print(f"NOT MEASURED: {missing}", flush=True)
    return int(bool(missing) or not all(check["holds"] for check in record["checks"]))


def alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of one concurrency, in this process."""
    started = time.perf_counter()
    if arguments.shape:
        pairs = random_shape(arguments.shape, arguments.rates, arguments.prompt_length)
    else:
        dtype = arguments.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        pairs = trained(arguments.target, dtype, arguments.dflash, arguments.dspark, arguments.sts)
    settings = ("max_context", "chunk", "pieces", "new_tokens", "seconds", "repeats", "steps", "shares", "attention")
    record: dict[str, Any] = {**surroundings(), **pairs.about}
    record["settings"] = {name: getattr(arguments, name) for name in settings}

    def save(name: str, value: Any) -> None:
        faulthandler.dump_traceback_later(STALLED, file=sys.__stderr__, exit=True)  # instead of the one before it
        record[name] = value
        record["seconds"] = round(time.perf_counter() - started, 1)
        write(record, arguments.out)
        print(f"{arguments.concurrency[0]}: {record['seconds']:.0f} s: {name}", flush=True)

    bench = build(pairs, arguments)
    save("executables", sum(len(engine.executables.shapes) for engine in bench.engines.values()))
    faulthandler.cancel_dump_traceback_later()  # a turn may be long in coming
    with turn(arguments.meet, arguments.crowd):
        faulthandler.dump_traceback_later(STALLED, file=sys.__stderr__, exit=True)
        save("cost", measured_cost(bench))
        save("loads", loads(bench, save))
        save("checks", verdicts(record["loads"]))
        concurrency = arguments.concurrency[0]
        if concurrency in arguments.overlap:
            save("overlap", overlap(bench))
        if concurrency == arguments.profile_at:
            save("idle", idle(bench))
        if concurrency == min(32, arguments.largest):
            save("confidences", confidences(bench))
            save("stood", stood(bench))
            save("guard", guarded(bench))
    faulthandler.cancel_dump_traceback_later()
    return record


@contextlib.contextmanager
def turn(meet: Path | None, crowd: int) -> Iterator[None]:
    """Waits in `meet` until `crowd` processes are there, then until it is this one's turn."""
    if meet is None:
        yield
        return
    (meet / f"ready-{os.getpid()}").touch()
    while len(list(meet.glob("ready-*"))) < crowd:
        time.sleep(0.1)
    with filelock.FileLock(meet / "turn"):
        yield


def crowd(arguments: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """A process for each concurrency; their records as one. Their own lie beside it until the end; a SIGTERM ends them
    too."""
    folder = arguments.out.with_suffix(".parts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env, running = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for one in arguments.concurrency:
            own = ["--concurrency", str(one), "--largest", str(max(arguments.concurrency)), "--meet", str(folder)]
            own += ["--crowd", str(len(arguments.concurrency)), "--out", str(folder / f"{one}.json")]
            running[one] = subprocess.Popen([sys.executable, __file__, *argv, *own], env=env)
        while running:
            time.sleep(0.2)
            for one in [one for one, process in running.items() if process.poll() is not None]:
                (folder / f"ready-{running.pop(one).pid}").touch()  # if it broke, the others need not wait for it
                merge(arguments, folder)
    finally:
        for process in running.values():
            process.kill()
        record = merge(arguments, folder)
    shutil.rmtree(folder)
    return record


def merge(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What is there so far, as one record, which is written."""
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    parts = sorted((part for part in parts if "checks" in part), key=lambda part: part["loads"][0]["concurrency"])
    if not parts:
        return {"checks": [], "missing": arguments.concurrency}
    own = ("executables", "cost", "loads", "checks", "overlap", "idle", "confidences", "stood", "guard", "seconds")
    record = {name: value for name, value in parts[0].items() if name not in own} | {"command": command()}
    record["missing"] = sorted(set(arguments.concurrency) - {part["loads"][0]["concurrency"] for part in parts})
    record["executables"] = sum(part["executables"] for part in parts)
    for name in ("loads", "checks", "idle", "overlap"):
        record[name] = [one for part in parts for one in part.get(name, [])]
    record["cost"] = described([Cell(*cell) for part in parts for cell in part["cost"]["cells"]])
    for name in ("guard", "confidences", "stood"):
        for part in parts:
            if name in part:
                record[name] = part[name]
    write(record, arguments.out)
    return record


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: sorted({int(word) for word in text.split(",")}) if text else []  # noqa: E731
    fractions = lambda text: tuple(float(word) for word in text.split(","))  # noqa: E731
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dflash", type=Path, metavar="DIR", help="an exported DFlash drafter")
    parser.add_argument("--dspark", type=Path, metavar="DIR", help="an exported DSpark drafter with a confidence head")
    parser.add_argument("--sts", type=Path, metavar="FILE", help="temperatures of DSpark's confidence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead, and --rates")
    parser.add_argument(
        "--rates", default=(), type=fractions,
        help="with --shape: chance of each proposal, given that those before it stood",
    )  # fmt: skip
    parser.add_argument(
        "--rates-of",
        type=Path,
        metavar="FILE",
        help="with --shape: each method's rates as a record of this bench has them",
    )
    parser.add_argument("--prompt-length", type=int, default=64, help="with --shape")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--overlap", type=numbers, default=[1, 32, 256], help="concurrencies of overlap on and off")
    parser.add_argument("--profile-at", type=int, default=32, help="concurrency of the device's idle share; 0: none")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a window")
    parser.add_argument("--repeats", type=int, default=2, help="windows")
    parser.add_argument("--steps", type=int, default=16, help="rounds a probe of the cost table")
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument(
        "--new-tokens", type=int, default=160, help="a request's mean; from half of it to one and a half"
    )
    parser.add_argument("--shares", type=fractions, default=(0.25, 0.5, 0.75), help="row buckets, of all rows")
    parser.add_argument("--chunk", type=int, default=512, help="prefill rows of a round")
    parser.add_argument("--attention", default="auto", help="what reads the pages, as Engine takes it")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("results/h200/serving.json"))
    own = parser.add_argument_group("of the process of one concurrency")
    own.add_argument("--largest", type=int, help="the largest concurrency of the run")
    own.add_argument("--meet", type=Path, help="folder in which the processes wait for one another")
    own.add_argument("--crowd", type=int, default=1, help="how many they are")
    arguments = parser.parse_args(argv)
    arguments.largest = arguments.largest or max(arguments.concurrency)
    if not arguments.shape and not (arguments.dflash and arguments.dspark):
        parser.error("--dflash and --dspark are needed without --shape")
    if arguments.shape and arguments.rates_of:
        try:
            known = json.loads(arguments.rates_of.read_text(encoding="utf-8")).get("stood")
        except (OSError, ValueError) as error:
            parser.error(f"--rates-of: {arguments.rates_of} cannot be read: {error}")
        if known is None:
            parser.error(f"--rates-of: {arguments.rates_of} has no `stood`, expected a record of trained drafters")
        arguments.rates = {method: tuple(known[method]["rates"]) for method in DRAFTED}
    elif arguments.shape:
        if len(arguments.rates) != BLOCK:
            parser.error(f"--rates: found {len(arguments.rates)} numbers, expected {BLOCK}, one a proposal")
        arguments.rates = dict.fromkeys(DRAFTED, arguments.rates)
    for name in ("overlap", "profile_at"):
        asked = getattr(arguments, name)
        if max(asked if isinstance(asked, list) else [asked], default=0) > arguments.largest:
            parser.error(f"--{name.replace('_', '-')}: found more than the largest concurrency")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxspecError as error:
        sys.exit(f"error: {error}")
