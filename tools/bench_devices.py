"""Times the trainer's step on one, two, four, ... of this machine's devices, one sequence each, the features given.

    python tools/bench_devices.py [--method dspark] [--counts 1 2 4] [--json FILE]

The program is that of `tools/bench_training.py` over a mesh of so many devices (`data`): what `train.py` runs with the
same config where there are as many. Parameters and moments are whole on every device, gradients are summed over them.
All counts run in one process, the smallest first. Their losses on the first step are compared: other sequences give
other losses, but not far off.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxspec.training.state import abstract
from jaxspec.training.step import attention_over
from tools.bench_round import SHAPES
from tools.bench_training import METHODS, Setup, Sizes, compiled_gib, header, timed

LEAST = {2: 1.9, 4: 3.6}  # times one device's throughput
FAR = 0.05  # of the loss of other sequences


def measure(setup: Setup, repeats: int) -> dict[str, Any]:
    """The step over `setup`'s devices: milliseconds, tokens/s, the first loss, GiB a device."""
    inputs = setup.state(), setup.frozen(), setup.batch()
    program = setup.compile("step", (abstract(inputs[0]), *inputs[1:]))
    state, metrics = program(*inputs)
    loss, anchors = float(metrics["loss"]), int(metrics["anchors"])
    holder, (_, frozen, batch) = [state], inputs
    del state, inputs

    def step() -> Any:
        holder[0], metrics = program(holder[0], frozen, batch)
        return jax.block_until_ready((holder[0], metrics))

    times = timed(step, repeats)
    median = statistics.median(times)
    tokens = setup.placement.batch * setup.sizes.length
    return {
        "devices": setup.placement.mesh.size,
        "sequences": setup.placement.batch,
        "anchors": anchors,
        "loss": loss,
        "step_ms": median,
        "times_ms": times,
        "tokens_per_second": 1e3 * tokens / median,
        "gib_a_device": compiled_gib(program),
    }


def judged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Throughput against one device's, and whether the losses are of one model."""
    one = parts[0]
    ratios = {part["devices"]: part["tokens_per_second"] / one["tokens_per_second"] for part in parts[1:]}
    verdicts = {f"{count} devices at least {LEAST[count]} times": ratios[count] >= LEAST[count]
                for count in ratios if count in LEAST and one["devices"] == 1}  # fmt: skip
    near = all(abs(part["loss"] - one["loss"]) <= FAR * abs(one["loss"]) for part in parts)
    return {
        "times": {str(count): ratio for count, ratio in ratios.items()},
        "verdicts": verdicts | {"losses agree": near},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a count; 1 when a verdict fails, 2 when there are fewer devices than asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="dspark")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=5, help="of DFlash and DSpark")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    devices, counts = jax.devices(), sorted(set(arguments.counts))
    if counts[0] < 1 or counts[-1] > len(devices):
        print(f"error: --counts: {counts}, expected 1 to {len(devices)}, the devices there are", file=sys.stderr)
        return 2
    sizes = Sizes(arguments.shape, arguments.length, arguments.anchors, arguments.draft_vocab, arguments.layers)
    parts = []
    for count in counts:
        setup = Setup(arguments.method, sizes, devices=devices[:count])
        with attention_over(setup.attention):
            part = measure(setup, arguments.repeats)
        parts.append(part)
        print(
            f"{arguments.method} on {count}: step {part['step_ms']:.1f} ms, "
            f"{part['tokens_per_second'] / 1e3:.1f} k tokens/s, loss {part['loss']:.4f}, "
            f"{part['gib_a_device']:.1f} GiB a device",
            flush=True,
        )
        del setup
        gc.collect()
    found = judged(parts)
    about = header("tools/bench_devices.py") | {
        "method": arguments.method,
        "shape": sizes.shape,
        "context": sizes.length,
    }
    for what, holds in found["verdicts"].items():
        print(f"{what}: {'yes' if holds else 'NO'}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(about | {"parts": parts} | found, indent=1) + "\n", encoding="utf-8")
    return int(not all(found["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
