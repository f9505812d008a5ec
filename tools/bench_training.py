"""Times the trainer's step on this machine's device at a public target's shape, the features given, weights random.

    python tools/bench_training.py [--method dflash dspark eagle3] [--online dspark] [--json FILE]

The program is the one `train.py` runs from stored features (`compile_step`, its anchors, its chunked vocabulary loss,
the device's attention kernel, float32 masters, donated state) on one sequence whose tokens are all supervised.
`forward + backward` is that program without its update, `forward + loss` without its gradient; optimizer and backward
are the differences. The gradients that are checked are those of the timed program's own first step, read out of Adam's
first moment. The reference has no kernel, no chunks and no rematerialisation; `--reference float32` adds one that
rounds nothing either, and says how far both bfloat16 paths are from it. References run behind all timing. A part that
is there already in FILE is replaced, the others stay.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import TrainConfig, build
from jaxspec.drafters.base import Batch, Shared
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten, split_trainable, stack_layers
from jaxspec.training import optimizer as opt
from jaxspec.training.build import fresh_drafter
from jaxspec.training.features import capture
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.pipeline import batch_shapes
from jaxspec.training.state import Placement, abstract, create
from jaxspec.training.step import Frozen, StepSpec, attention_over, compile_step, forward_backward, gradients
from pallas_kernels.bench import commit
from tools.bench_round import SHAPES, random_weights
from tools.profile_table import kinds, operations, profile
from tools.training_cost import PEAK_FLOPS, PEERS, needed_flops

METHODS = tuple(PEERS)
WARM_UPS = 3
TOLERANCE = 2e-2  # of the loss, and of each gradient's norm
FASTER, GOAL = 1.3, 2.0  # times the best peer's tokens/s
SLACK = 1.02  # of the online step over the sum of its parts: what two runs differ by
GIB = 2**30
GROUPS = 8  # of anchors, in a reference
_STEPS = 1000  # of the schedule; the program is the same for any number


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a bench is of."""

    shape: str
    length: int
    anchors: int
    draft_vocab: int
    layers: int = 5  # of a block drafter

    @property
    def target(self) -> ModelConfig:
        """The target's shape."""
        return ModelConfig.from_hf(SHAPES[self.shape])


class Setup:
    """A method's step and what it takes, as `train.py` puts them together. `plain` is the reference path, in that
    dtype; `online` runs the target inside the step. One sequence a device."""

    def __init__(
        self,
        method: str,
        sizes: Sizes,
        plain: str | None = None,
        online: bool = False,
        devices: Sequence[Any] | None = None,
    ):
        self.method, self.sizes, self.online = method, sizes, online
        self.placement = Placement.of(devices)
        drafter: dict[str, Any] = {"method": method, "dtype": plain or "bfloat16"}
        if method == "eagle3":
            drafter["draft_vocab_size"] = sizes.draft_vocab
        else:
            drafter |= {"mask_token_id": 7, "num_layers": sizes.layers}
        self.config = build(
            TrainConfig,
            {
                "version": 1,
                "target": {"source": "random"},
                "drafter": drafter,
                "objective": {"chunk_blocks": 0} if plain else {},
                "data": {"path": "random", "max_length": sizes.length, "num_anchors": sizes.anchors},
                "optimizer": {"batch_size": self.placement.batch},
                "run": {"directory": "out/bench-training", "steps": _STEPS},
            },
        )
        config, model = self.config, Decoder(sizes.target)
        made: Any = fresh_drafter(config, sizes.target)
        self.full = model
        if not made.needs_teacher:
            model = model.truncated({"model": {"layers": []}}, made.taps)[0]
        self.spec = StepSpec(
            model=model,
            drafter=made,
            optimizer=opt.build(config.optimizer),
            learning_rate=opt.schedule(config.optimizer, _STEPS),
            num_anchors=config.data.num_anchors,
            anchor_rule=config.data.anchor_rule,
            block_size=made.config.block_size,
            total_steps=_STEPS,
            dtype=jnp.dtype(config.drafter.dtype),
        )
        self.exact = plain == "float32"
        self.groups = math.gcd(sizes.anchors, GROUPS) if plain and method != "eagle3" else 1
        hidden = sizes.target.hidden_size
        stored = Layout(len(made.taps) * hidden, hidden if made.needs_teacher else 0, "bfloat16")
        self.shapes = batch_shapes(1, self.placement.batch, sizes.length, None if online else stored)
        self.attention = "reference" if plain or jax.default_backend() == "cpu" else config.run.anchor_attention

    def state(self) -> Any:
        """The same for every setup of the method: weights that bfloat16 holds exactly, so that a path which rounds
        them computes with the same ones."""
        key = jax.random.key(self.config.run.seed)
        counts = np.random.default_rng(0).permutation(self.sizes.target.vocab_size)

        def make(key: jax.Array) -> Any:
            params = self.spec.drafter.init(jax.random.fold_in(key, 2), jnp.bfloat16)
            if hasattr(self.spec.drafter, "with_vocabulary"):
                params = self.spec.drafter.with_vocabulary(params, counts)
            return create(params, self.spec.optimizer, key)

        made = jax.eval_shape(make, key)
        return jax.jit(make, out_shardings=self.placement.shardings(made))(key)

    def batch(self) -> dict[str, jax.Array]:
        """Random tokens, all supervised, with random features."""
        rng = np.random.default_rng(1)
        fixed = {
            "input_ids": rng.integers(10, self.sizes.target.vocab_size, self.shapes["input_ids"].shape, np.int32),
            "loss_mask": np.ones(self.shapes["loss_mask"].shape, bool),
            "example_ids": np.arange(self.placement.batch, dtype=np.int32)[None],
            "epochs": np.zeros((1, self.placement.batch), np.int32),
        }
        drawn = {
            name: jax.random.normal(jax.random.key(index), shape.shape, shape.dtype)
            for index, (name, shape) in enumerate(sorted(self.shapes.items()))
            if name not in fixed
        }
        return self.placement.put_batch(fixed | drawn)

    def frozen(self) -> Frozen:
        """Tables alone, or the whole target."""
        if not self.online:
            shape = (self.sizes.target.vocab_size, self.sizes.target.hidden_size)
            table = random_weights([jax.ShapeDtypeStruct(shape, jnp.bfloat16)])[0]
            return self.placement.put(Frozen({}, Shared(table, table)))
        wanted = jax.eval_shape(stack_layers, self.spec.model.abstract_params(jnp.bfloat16))
        params = random_weights(wanted)
        shared = Shared(self.full.embedding(params), self.full.head(params))
        return self.placement.put(Frozen(params, shared))

    def compile(self, name: str, inputs: Any) -> Any:
        """One of `step`, `forward_backward`, `forward`, `target`. `inputs` = (state, frozen, batch), arrays or not."""
        state, frozen, batch = inputs
        if name == "step":
            return compile_step(self.spec, state, frozen, batch, self.placement)

        def gradient(state: Any, frozen: Any, batch: Any) -> Any:
            batches, loss, _, grads = forward_backward(self.spec, state, frozen, batch)
            if self.groups == 1:
                return loss, grads
            # the reference's scores of all blocks at once would not fit: groups of them, accumulated exactly
            parts, keys = grouped(batches, self.groups), jax.random.split(state.key, self.groups)
            loss, _, grads = gradients(self.spec.drafter, state.params, frozen.shared, parts, keys, self.spec.dtype)
            return loss, grads

        def target(state: Any, frozen: Any, batch: Any) -> Any:
            return capture(self.spec.model, self.spec.drafter, frozen.target, batch["input_ids"][0], self.spec.dtype)

        functions: dict[str, Callable[..., Any]] = {
            "forward_backward": gradient,
            "forward": lambda *inputs: gradient(*inputs)[0],
            "target": target,
        }
        shapes = [abstract(part) for part in inputs]
        with jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh):
            return jax.jit(functions[name]).lower(*shapes).compile()


def grouped(batches: Batch, count: int) -> Batch:
    """The same anchors as `count` micro-batches: blocks do not see each other."""
    split = lambda x: jnp.moveaxis(x[0].reshape(x.shape[1], count, -1), 1, 0)  # noqa: E731
    repeat = lambda x: jnp.broadcast_to(x, (count, *x.shape[1:]))  # noqa: E731
    parts = {field.name: getattr(batches, field.name) for field in dataclasses.fields(batches)}
    parts = {name: jax.tree.map(split if name in ("anchors", "keep") else repeat, x) for name, x in parts.items()}
    return dataclasses.replace(batches, **parts)


def compile_all(setup: Setup, names: Sequence[str], inputs: Any) -> tuple[dict[str, Any], float]:
    """The programs, compiled side by side, and the seconds it took."""
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = dict(zip(names, pool.map(lambda name: setup.compile(name, inputs), names), strict=True))
    return made, time.perf_counter() - started


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each call, waited for, after the warm-up."""
    times = []
    for _ in range(WARM_UPS + repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - started))
    return times[WARM_UPS:]


def compiled_gib(program: Any) -> float:
    """What the compiler says that a program holds at once: arguments, temporaries, results that replace no argument."""
    memory = program.memory_analysis()
    live = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + live) / GIB


def allocated_gib() -> float | None:
    """The allocator's peak since the process began; None where the device keeps none."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / GIB


@dataclasses.dataclass
class Kept:
    """The first step's loss and gradients, on the host, until the reference has run."""

    loss: float
    grads: Any


def first_step(setup: Setup, state: Any, metrics: dict[str, Any]) -> Kept:
    """Gradients out of Adam's first moment, mu = (1 - b1) x clipped gradient."""
    section, norm = setup.config.optimizer, float(metrics["grad_norm"])
    clipped = min(1.0, section.clip_norm / (norm + 1e-6))
    moments = jax.device_get(state.opt_state[1].mu)
    scale = np.float32(1 / ((1 - section.b1) * clipped))
    return Kept(float(metrics["loss"]), jax.tree.map(lambda leaf: np.asarray(leaf) * scale, moments))


def measure(setup: Setup, arguments: argparse.Namespace) -> tuple[dict[str, Any], Kept]:
    """Everything but the reference."""
    state, frozen, batch = setup.state(), setup.frozen(), setup.batch()
    inputs = (abstract(state), frozen, batch)
    programs, compiling = compile_all(setup, ("step", "forward_backward", "forward"), inputs)
    before = allocated_gib()
    state, metrics = programs["step"](state, frozen, batch)
    kept = first_step(setup, state, metrics)
    counted = jax.device_get(metrics)
    holder = [state]
    del state

    def step() -> Any:
        holder[0], metrics = programs["step"](holder[0], frozen, batch)
        return jax.block_until_ready((holder[0], metrics))

    times = {"step": timed(step, arguments.repeats)}
    peak = allocated_gib()
    table = profile(step, arguments.profile, operations(programs["step"])) if arguments.profile else None
    for name in ("forward_backward", "forward"):
        times[name] = timed(functools.partial(programs[name], holder[0], frozen, batch), arguments.repeats)
    median = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "kind": "features given",
        "supervised_rows": int(counted["terms"]["metric/accuracy"][1]),
        "anchors": int(counted["anchors"]),
        "supervised_tokens": int(counted["supervised_tokens"]),
        "drafter_parameters": sum(leaf.size for leaf in jax.tree.leaves(split_trainable(holder[0].params)[0])),
        "attention": setup.attention,
        "compile_s": compiling,
        "forward_loss_ms": median["forward"],
        "backward_ms": median["forward_backward"] - median["forward"],
        "optimizer_ms": median["step"] - median["forward_backward"],
        "forward_backward_ms": median["forward_backward"],
        "step_ms": median["step"],
        "times_ms": times,
        "peak_gib": {
            "compiled": compiled_gib(programs["step"]),
            "allocator": peak,
            "allocator_is": None if peak is None else "exact" if peak != before else "at most",
        },
        "profile": table,
    }
    vocab = setup.sizes.draft_vocab if setup.method == "eagle3" else setup.sizes.target.vocab_size
    if table is not None:
        record["kinds_ms"] = kinds(table["kernels"], vocab)
    return record | judged(setup, record), kept


def judged(setup: Setup, record: dict[str, Any]) -> dict[str, Any]:
    """Against the peer, the floor and the chip."""
    peer, length = PEERS[setup.method], setup.sizes.length
    flops = needed_flops(setup.spec, length)
    total, gib = sum(flops.values()), record["peak_gib"]["compiled"]
    speed = peer.forward_backward / record["forward_backward_ms"]
    return {
        "tokens_per_second": {
            "forward_backward": 1e3 * length / record["forward_backward_ms"],
            "step": 1e3 * length / record["step_ms"],
        },
        "needed_tflop": {name: value / 1e12 for name, value in flops.items()},
        "mfu": total / (1e-3 * record["forward_backward_ms"]) / PEAK_FLOPS,
        "floor_ms": peer.floor,
        "floor_share": None if peer.floor is None else peer.floor / record["forward_backward_ms"],
        "peer": dataclasses.asdict(peer) | {"forward_backward": peer.forward_backward},
        "times_the_peer": {"forward_backward": speed, "step": peer.step / record["step_ms"]},
        "verdicts": {
            f"at least {FASTER} times the peer": min(speed, peer.step / record["step_ms"]) >= FASTER,
            f"goal {GOAL:g} times": speed >= GOAL,
            "no more memory": gib <= peer.gib,
        },
    }


def compare(kept: Kept, loss: float, grads: Any) -> dict[str, Any]:
    """The timed program's loss and gradients against the reference's, each leaf by its norm."""
    errors = {}
    ours, theirs = flatten(kept.grads), flatten(grads)
    for name, leaf in theirs.items():
        if leaf is None:
            continue
        expected = np.asarray(leaf, np.float32)
        off = float(np.linalg.norm((ours[name] - expected).ravel()))
        errors[name] = off / max(float(np.linalg.norm(expected.ravel())), 1e-30)
    off = abs(kept.loss - loss) / max(abs(loss), 1e-30)
    worst = max(errors, key=lambda name: errors[name] if np.isfinite(errors[name]) else np.inf)
    holds = all(value <= TOLERANCE for value in (off, *errors.values()))  # a NaN is no agreement
    return {
        "loss": kept.loss, "reference_loss": loss, "loss_error": off, "worst": {worst: errors[worst]},
        "gradient_errors": errors, "tolerance": TOLERANCE, "holds": holds,
    }  # fmt: skip


def reference(setup: Setup) -> Kept:
    """Loss and gradients of a plain setup."""
    inputs = setup.state(), setup.frozen(), setup.batch()
    with attention_over(setup.attention), jax.default_matmul_precision("highest" if setup.exact else "default"):
        program = setup.compile("forward_backward", inputs)  # here, since another thread has a precision of its own
    loss, grads = jax.device_get(program(*inputs))
    return Kept(float(loss), grads)


def checks(method: str, sizes: Sizes, kept: Kept, exact: bool) -> dict[str, Any]:
    """The timed program against the reference; with `exact` both against one in float32."""
    plain = reference(Setup(method, sizes, "bfloat16"))
    found = {"check": compare(kept, plain.loss, plain.grads)}
    if exact:
        gc.collect()
        wide = reference(Setup(method, sizes, "float32"))
        found["float32"] = compare(kept, wide.loss, wide.grads)
        found["reference_float32"] = compare(plain, wide.loss, wide.grads)
    return found


def online(method: str, sizes: Sizes, arguments: argparse.Namespace, stored_ms: float | None) -> dict[str, Any]:
    """The online step beside its parts: the target's forward alone, and the step with the features given."""
    setup = Setup(method, sizes, online=True)
    with attention_over(setup.attention):
        holder, frozen, batch = [setup.state()], setup.frozen(), setup.batch()
        programs, compiling = compile_all(setup, ("step", "target"), (abstract(holder[0]), frozen, batch))

        def step() -> Any:
            holder[0], metrics = programs["step"](holder[0], frozen, batch)
            return jax.block_until_ready((holder[0], metrics))

        times = {"step": timed(step, arguments.repeats)}
        times["target"] = timed(lambda: programs["target"](holder[0], frozen, batch), arguments.repeats)
        median = {name: statistics.median(values) for name, values in times.items()}
        table = profile(step, 1, operations(programs["step"])) if arguments.profile else None
    record = {
        "kind": "online",
        "target_layers": setup.spec.model.config.num_layers,
        "compile_s": compiling,
        "target_ms": median["target"],
        "peer_target_ms": 89.5,
        "features_given_ms": stored_ms,
        "step_ms": median["step"],
        "times_ms": times,
        "peak_gib": {"compiled": compiled_gib(programs["step"])},
        "profile": table,
    }
    if stored_ms is not None:
        most = SLACK * (median["target"] + stored_ms)
        record["verdicts"] = {"no more than the sum of its parts": median["step"] <= most}
    return record


def line(name: str, part: dict[str, Any]) -> str:
    """A part for people."""
    if part["kind"] == "online":
        given = part["features_given_ms"]
        return (
            f"{name}: target {part['target_ms']:.1f} ms, features given {given}, online step {part['step_ms']:.1f} ms"
        )
    rate, times, floor = part["tokens_per_second"], part["times_the_peer"], part["floor_share"]
    return (
        f"{name}: forward + loss {part['forward_loss_ms']:.1f}, backward {part['backward_ms']:.1f}, optimizer "
        f"{part['optimizer_ms']:.1f}, step {part['step_ms']:.1f} ms; {rate['forward_backward'] / 1e3:.1f} k tokens/s "
        f"({times['forward_backward']:.2f} x the peer; with the optimizer {rate['step'] / 1e3:.1f} k, "
        f"{times['step']:.2f} x); {part['peak_gib']['compiled']:.1f} GiB of {part['peer']['gib']}; "
        f"MFU {100 * part['mfu']:.0f} %{'' if floor is None else f', {100 * floor:.0f} % of the floor'}; "
        f"{part['anchors']} anchors, {part['supervised_rows']} supervised rows"
    )


def header(tool: str = "tools/bench_training.py") -> dict[str, Any]:
    """How, on what and of which commit; in every part, since parts may be of several runs."""
    device, asked = jax.devices()[0], sys.argv[1:]
    if "--json" in asked:  # where a run kept its file says nothing
        at = asked.index("--json")
        del asked[at : at + 2]
    return {
        "command": " ".join(["python", tool, *asked]),
        "commit": commit(),
        "device": device.device_kind,
        "platform": device.client.platform_version.strip(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


class Record:
    """The parts, written after each one."""

    def __init__(self, path: Path | None):
        self.path = path
        there = path is not None and path.is_file()
        self.parts: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")).get("parts", {}) if there and path else {}
        )

    def keep(self, name: str, part: dict[str, Any]) -> None:
        """Adds or replaces a part."""
        self.parts[name] = part
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"parts": self.parts}, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a part; 1 when a verdict or a check fails (the goal aside)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, nargs="*", default=["eagle3", "dspark", "dflash"])
    parser.add_argument("--online", choices=METHODS, nargs="*", default=[], help="methods whose online step is timed")
    parser.add_argument(
        "--reference", choices=("none", "bfloat16", "float32"), default="bfloat16", help="none leaves the checks out"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=5, help="of DFlash and DSpark")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--profile", type=int, default=3, help="steps that are profiled; 0 for none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    sizes = Sizes(arguments.shape, arguments.length, arguments.anchors, arguments.draft_vocab, arguments.layers)
    record, about, kept, failed = Record(arguments.json), header(), {}, False
    about |= {"shape": sizes.shape, "context": sizes.length}

    def say(name: str, part: dict[str, Any]) -> None:
        nonlocal failed
        lost = [what for what, holds in part.get("verdicts", {}).items() if not holds]
        failed |= any(not what.startswith("goal") for what in lost)
        print(line(name, part) + "".join(f"; NOT {what}" for what in lost), flush=True)

    for method in arguments.method:
        setup = Setup(method, sizes)
        with attention_over(setup.attention):
            part, kept[method] = measure(setup, arguments)
        record.keep(method, about | part)
        say(method, part)
        gc.collect()
    for method in arguments.online:
        stored = record.parts.get(method, {}).get("step_ms")
        part = online(method, sizes, arguments, stored)
        record.keep(f"{method} online", about | part)
        say(f"{method} online", part)
        gc.collect()
    for method in () if arguments.reference == "none" else kept:
        found = checks(method, sizes, kept[method], arguments.reference == "float32")
        record.keep(method, record.parts[method] | found)
        failed |= not found["check"]["holds"]
        for name, check in found.items():
            ((leaf, error),) = check["worst"].items()
            lost = name == "check" and not check["holds"]
            print(
                f"{method}, {name}: loss {check['loss']:.5f}, expected {check['reference_loss']:.5f}; worst gradient "
                f"{leaf} {error:.1e}{f', FAILED: expected at most {TOLERANCE:g}' if lost else ''}",
                flush=True,
            )
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
