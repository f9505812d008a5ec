"""Times every kernel on this machine's GPU, or compiles it ahead of time for a TPU that is not there.

    python -m pallas_kernels.bench [--kernel K] [--json FILE]     one line a kernel, shape and implementation
    python -m pallas_kernels.bench --tpu v6e:2x2 [--kernel K]     one line a kernel and shape, and once more sharded

A kernel takes part by a module `pallas_kernels/<kernel>/bench.py` that defines

    cases(platform: str) -> Iterable[Case]        platform is "gpu" or "tpu"

On a GPU the frame draws the operands, runs every implementation once and compares its outputs with those of the first,
the reference (a difference beyond `tolerance` is a failure), then times each: `LOOP` calls inside one
compiled loop, every call depending on the one before, the median of up to `REPEATS` runs. Where a call's operands do
not change, what is compared is the timed loop's own output. Torch peers take the same operands as tensors and are timed
by CUDA events. The fraction is floor / time; the floor is the larger of bytes over the copy
rate and FLOP over the matrix rate, both measured at the start of the same run.

For a TPU the frame compiles `implementations["tpu"]` (and every other name that starts with "tpu") for one chip and,
where the case says how its operands are split, inside one `shard_map` over four. It prints

    OK <kernel> <shape> <chip> tpu_custom_call=N vmem=... hbm=... estimate=...

vmem is the largest scoped allocation of a custom call, hbm arguments + outputs + temporaries - aliased, both as the
compiler reports them; `estimate` is the compiler's own guess of the time and no measurement. No custom call in the
program, or any error, is a line that starts with FAILED, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

AXIS = "chips"  # the mesh axis that a case's specs name
LOOP, REPEATS = 20, 7
ACCELERATORS = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-8"}
_FAR_MORE_THAN_CACHE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    `operands` are arrays or ShapeDtypeStructs in call order; `draw(seed)` gives concrete ones, and is all that a GPU
    run uses. The first of `implementations` is the reference; names that start with "tpu" run on no GPU. `flops` counts
    allowed pairs only, `bytes` each input that must be read and each output once. `feedback` maps an operand's index to
    the output that replaces it in the next call of the timing loop (a pool that is written in place; such operands are
    donated too). `vary(operands, i)` gives the i-th call other data, so that small operands do not come out of the
    cache. `specs` are the PartitionSpecs over `AXIS` of operands and output for the sharded compilation, the shapes in
    `operands` being those of the whole mesh's arrays.
    """

    shape: str
    implementations: Mapping[str, Callable[..., Any]]
    operands: Sequence[Any]
    draw: Callable[[int], Sequence[Any]]
    flops: float
    bytes: float
    tolerance: float = 2e-2
    feedback: Mapping[int, int] = dataclasses.field(default_factory=dict)
    vary: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None
    torch_peers: Mapping[str, Callable[[Sequence[Any]], Callable[[], Any]]] = dataclasses.field(default_factory=dict)
    specs: tuple[Any, Any] | None = None
    judged: Callable[[Sequence[Any]], Any] = tuple  # what of the outputs must equal the reference's


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, case: Case) -> float:
        """Seconds below which no version of the case can run by much."""
        return max(case.bytes / self.bytes_per_second, case.flops / self.flops_per_second)


def kernels() -> list[str]:
    """Names of the kernels that have a bench module."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/bench.py"))


def collect(kernel: str, platform: str) -> Iterable[Case]:
    """The kernel's cases."""
    return importlib.import_module(f"pallas_kernels.{kernel}.bench").cases(platform)


# -- GPU --------------------------------------------------------------------------------------------------------------


def timing_loop(function: Callable[..., Any], operands: Sequence[Any], case: Case) -> Any:
    """The lowered program of `LOOP` calls, each of which depends on the one before: (fed back, other outputs)."""
    function = functools.partial(_apply, function)
    first = jax.eval_shape(function, *operands)

    fed = set(case.feedback.values())  # already carried as operands: a second copy would be made and timed

    def rest(outputs: Sequence[Any]) -> list[Any]:
        return [x for i, x in enumerate(outputs) if i not in fed]

    def body(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        inputs, last = carry
        # the barrier ties a call to the one before it, so that nothing is hoisted or merged
        tied, _ = jax.lax.optimization_barrier((inputs, last))
        outputs = function(*(case.vary(tied, index) if case.vary else tied))
        following = [outputs[case.feedback[i]] if i in case.feedback else x for i, x in enumerate(inputs)]
        return following, rest(outputs)

    def loop(inputs: Sequence[Any]) -> Any:
        empty = [jnp.zeros(x.shape, x.dtype) for x in rest(first)]
        following, last = jax.lax.fori_loop(0, LOOP, body, (list(inputs), empty))
        return [following[i] for i in case.feedback], last

    return jax.jit(loop).lower(operands)


def seconds(loop: Any, operands: Sequence[Any]) -> float:
    """Median seconds of one call of a compiled timing loop: device time, the host's share is spread over the loop.
    A loop that takes seconds is run twice, no more."""
    jax.block_until_ready(loop(operands))
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < 2 or sum(times) * LOOP < 2.0):
        started = time.perf_counter()
        jax.block_until_ready(loop(operands))
        times.append((time.perf_counter() - started) / LOOP)
    return statistics.median(times)


def _apply(function: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
    out = function(*operands)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def error(got: Any, expected: Any) -> float:
    """Largest relative error over the outputs: |got - expected| / |expected| in the 2-norm; infinite for NaN."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        value = np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30)
        worst = max(worst, float(value)) if np.isfinite(value) else float("inf")
    return worst


def torch_seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a torch call by CUDA events."""
    torch = find_torch()
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(LOOP):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / LOOP)
    return statistics.median(times)


def to_torch(operands: Sequence[Any]) -> list[Any]:
    """The operands as torch tensors on the same device."""
    torch = find_torch()
    return [torch.from_dlpack(jax.device_put(x, jax.devices()[0])) for x in operands]


def find_torch() -> Any:
    """Torch where it is installed and sees a GPU, else None. It is a peer to measure, no part of the project: only here
    and in the kernels' torch peers is it looked for."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def measure_ceilings(copied: int = _FAR_MORE_THAN_CACHE, width: int = 8192) -> Ceilings:
    """A large copy and a large bfloat16 product."""
    block = jnp.ones(copied // 2, jnp.bfloat16)
    square = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) / width**0.5  # its powers stay small
    return Ceilings(
        2 * block.nbytes / _chained_seconds(lambda x: -x, block),
        2 * width**3 / _chained_seconds(lambda x: x @ square, square),
    )


def _chained_seconds(function: Callable[[Any], Any], x: Any) -> float:
    """Median seconds of one of `LOOP` calls that are long enough to be dispatched ahead, each of the last one's
    result."""
    step = jax.jit(function)
    jax.block_until_ready(step(step(x)))
    times = []
    for _ in range(REPEATS):
        started, y = time.perf_counter(), x
        for _ in range(LOOP):
            y = step(y)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - started) / LOOP)
    return statistics.median(times)


def measure(kernel: str, case: Case, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """One record an implementation; `error` says what is wrong with it, where something is."""
    operands = [jnp.asarray(x) for x in case.draw(0)]
    base = {"kernel": kernel, "shape": case.shape, "bytes": case.bytes, "flops": case.flops}
    floor = ceilings.floor(case)
    lowered: dict[str, Any] = {}
    for name, function in case.implementations.items():
        if not name.startswith("tpu"):
            lowered[name] = _attempt(_lower, function, operands, case)
    with ThreadPoolExecutor() as threads:  # compilers of different programs do not wait for each other
        compiled = dict(zip(lowered, threads.map(_compile, lowered.values()), strict=True))
    expected: Any = None
    for name, programs in compiled.items():
        record = base | {"implementation": name}
        if isinstance(programs, Exception):
            yield record | {"error": _one_line(programs)}
            continue
        got = _attempt(_run, programs[0], operands)
        expected = got if expected is None else expected
        if not (case.feedback or case.vary or isinstance(got, Exception)):
            got = _attempt(lambda loop: _run(loop, [operands])[1], programs[1])
        off = float("inf") if isinstance(got, Exception) else error(case.judged(got), case.judged(expected))
        if not off <= case.tolerance:
            why = _one_line(got) if isinstance(got, Exception) else f"differs from the reference by {off:.2e}"
            yield record | {"error": why}
            continue
        taken = seconds(programs[1], operands)
        yield record | {"seconds": taken, "fraction": floor / taken, "difference": off}
    for name, prepare in case.torch_peers.items() if find_torch() else ():
        record = base | {"implementation": name}
        taken = _attempt(_torch_seconds, prepare, operands)
        if isinstance(taken, Exception):
            yield record | {"error": _one_line(taken)}
        else:
            yield record | {"seconds": taken, "fraction": floor / taken}


def _attempt(action: Callable[..., Any], *arguments: Any) -> Any:
    """The result or the exception: one that cannot run must not hide the others; it is reported and fails the run."""
    try:
        return action(*arguments)
    except Exception as problem:
        return problem


def _lower(function: Callable[..., Any], operands: Sequence[Any], case: Case) -> Sequence[Any]:
    once = jax.jit(functools.partial(_apply, function)).lower(*operands)
    return once, timing_loop(function, operands, case)


def _compile(programs: Any) -> Any:
    return programs if isinstance(programs, Exception) else _attempt(lambda: [p.compile() for p in programs])


def _run(program: Any, arguments: Sequence[Any]) -> Any:
    return jax.block_until_ready(program(*arguments))


def _torch_seconds(prepare: Callable[..., Any], operands: Sequence[Any]) -> float:
    return torch_seconds(prepare(to_torch(operands)))


def _one_line(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


def gpu(names: Sequence[str], out: Path | None) -> int:
    """Prints the table; 1 when anything failed."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"bench: found {device.platform}, expected a GPU; --tpu v6e:2x2 compiles for a TPU ahead of time")
        return 1
    ceilings = measure_ceilings()
    print(
        f"{device.device_kind}, jax {jax.__version__}: copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.flops_per_second / 1e12:.0f} TFLOP/s, measured now"
    )
    records = []
    for name in names:
        for case in collect(name, "gpu"):
            for record in measure(name, case, ceilings):
                records.append(record)
                print(line(record), flush=True)
    if out is not None:
        head = {
            "command": f"python -m pallas_kernels.bench {' '.join(f'--kernel {name}' for name in names)}",
            "commit": commit(),
            "device": device.device_kind,
            "platform": device.client.platform_version,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "ceilings": dataclasses.asdict(ceilings),
        }
        if find_torch():
            head["torch"] = find_torch().__version__
        out.write_text(json.dumps(head | {"records": records}, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in record for record in records))


def commit() -> str:
    """The checkout's commit; SOURCE_COMMIT says it where a copy has no .git. Empty when nobody knows."""
    if os.environ.get("SOURCE_COMMIT"):
        return os.environ["SOURCE_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def line(record: Mapping[str, Any]) -> str:
    """A record for people."""
    head = f"{record['kernel']} {record['shape']} {record['implementation']}"
    if "error" in record:
        return f"FAILED {head}: {record['error']}"
    return (
        f"{head} {1e6 * record['seconds']:.1f} us, {record['bytes'] / 1e6:.1f} MB, {record['flops'] / 1e9:.2f} GFLOP, "
        f"{100 * record['fraction']:.0f} % of the limit"
    )


# -- TPU, ahead of time -----------------------------------------------------------------------------------------------


def tpu_devices(topology: str) -> Sequence[Any]:
    """Chips of a topology (`v6e:2x2`) that need not be there; libtpu must. One topology a process.

    Raises ValueError for a name whose kind is unknown.
    """
    kind = topology.split(":")[0]
    if kind not in ACCELERATORS:
        raise ValueError(f"--tpu: found {topology!r}, expected one of {', '.join(ACCELERATORS)} and a shape: v6e:2x2")
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.update(settings | {"TPU_ACCELERATOR_TYPE": ACCELERATORS[kind]})
    # where the compiler moves large transposes to a sparse core, an older jaxlib cannot print the program
    os.environ.setdefault("LIBTPU_INIT_ARGS", "--xla_tpu_enable_offloading_copy_to_sparsecore=false")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compile_for(mesh: Mesh, function: Callable[..., Any], case: Case, sharded: bool) -> Any:
    """The compiled program on the mesh's first chip, or on all of them with the case's specs."""
    devices = mesh.devices.flat
    donated = tuple(case.feedback)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands]
    if sharded:
        assert case.specs is not None
        inputs, outputs = case.specs
        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(operands, inputs, strict=True)
        ]
        return jax.jit(function, donate_argnums=donated).lower(*placed).compile()
    one = SingleDeviceSharding(devices[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in operands]
    # what the kernel asks about its chip at trace time must be answered for this one, not for the host
    with jax.sharding.use_abstract_mesh(Mesh(np.array([devices[0]]), (AXIS,)).abstract_mesh):
        return jax.jit(function, donate_argnums=donated).lower(*placed).compile()


def describe(compiled: Any) -> dict[str, int]:
    """Custom calls, scoped VMEM, HBM and the compiler's estimated microseconds (0: it gives none) of a program."""
    text = compiled.as_text()
    calls = len(re.findall(r'custom_call_target="tpu_custom_call"', text))
    scoped = [int(size) for size in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text)]
    memory = compiled.memory_analysis()
    hbm = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    estimate = (compiled.cost_analysis() or {}).get("optimal_seconds", 0.0)
    return {
        "tpu_custom_call": calls,
        "vmem": max(scoped, default=0),
        "hbm": int(hbm - memory.alias_size_in_bytes),
        "estimate_us": round(1e6 * max(estimate, 0.0)),
    }


def tpu(names: Sequence[str], topology: str) -> int:
    """Prints a line a kernel and shape; 1 when anything failed."""
    devices = np.array(tpu_devices(topology)[:4])
    mesh = Mesh(devices, (AXIS,))
    chip, failed = topology.split(":")[0], False
    for kernel in names:
        for case in collect(kernel, "tpu"):
            for name, function in case.implementations.items():
                if not name.startswith("tpu"):
                    continue
                for sharded in (False, True) if case.specs is not None else (False,):
                    head = f"{kernel} {case.shape}{name[3:]}{f' x{devices.size}' if sharded else ''} {chip}"
                    try:
                        found = describe(compile_for(mesh, function, case, sharded))
                    except Exception as problem:
                        print(f"FAILED {head}: {_one_line(problem)}", flush=True)
                        failed = True
                        continue
                    lacking = not found["tpu_custom_call"]
                    failed |= lacking
                    print(
                        f"{'FAILED' if lacking else 'OK'} {head} tpu_custom_call={found['tpu_custom_call']} "
                        f"vmem={found['vmem'] / 2**20:.1f}MiB hbm={found['hbm'] / 2**20:.1f}MiB "
                        f"estimate={found['estimate_us']}us (the compiler's, not measured)",
                        flush=True,
                    )
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", action="append", choices=kernels(), help="only this one (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records there (GPU)")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="compile ahead of time for v5e:2x2, v5p:2x2x1, v6e:2x2 …")
    options = parser.parse_args(arguments)
    names = options.kernel or kernels()
    if options.tpu is None:
        return gpu(names, options.json)
    try:
        return tpu(names, options.tpu)
    except ValueError as problem:
        print(f"bench: {problem}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
