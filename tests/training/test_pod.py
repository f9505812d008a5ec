"""Two processes train as one: the same numbers, one writer, one decision to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxspec.config import TrainMeshSection
from jaxspec.errors import ConfigError
from jaxspec.training import pod
from tests.training import world

CODE = """
import sys
from pathlib import Path
from jaxspec.training import pod
from tests.training import world
index, port, directory, data, steps = sys.argv[1:]
config = world.config(Path(directory), Path(data), optimizer__batch_size=4, run__steps=int(steps),
    optimizer__schedule="constant", optimizer__warmup_ratio=0.0,
    run__checkpoint_every=4, mesh__fsdp=2, mesh__coordinator=f"127.0.0.1:{port}", mesh__num_processes=2,
    mesh__process_id=int(index))
pod.join(config.mesh)
from jaxspec.training.main import run
report = run(config, target=world.target())
print(report["status"], report["step"], report["resumed_from"], flush=True)
"""


def start(directory: Path, data: Path, steps: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(index), str(port), str(directory), str(data), str(steps)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    ends = [one.communicate(timeout=200) for one in processes]
    assert [one.returncode for one in processes] == [0, 0], ends
    said = [line for line in ends[1][0].splitlines() if "[Gloo]" not in line and "peer ranks" not in line]
    assert len(said) == 1, f"only process 0 speaks, and {said}"
    return [out.splitlines()[-1] for out, _ in ends]


@pytest.mark.slow("mesh", covers=("jaxspec/training", "jaxspec/drafters", "jaxspec/parallel"))
def test_two_processes_equal_one_stop_together_and_go_on(tmp_path):
    from jaxspec.training.main import run

    data = world.write_data(tmp_path / "data.npz", count=16)
    processes = start(tmp_path / "two", data, 4000)
    events = tmp_path / "two" / "metrics.jsonl"
    for _ in range(1200):
        if events.is_file() and events.read_text().count("\n") >= 3:
            break
        assert all(one.poll() is None for one in processes), [one.communicate() for one in processes]
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)  # the one that does not write
    first, second = (line.split() for line in finish(processes))
    assert first == second and first[0] == "stopped" and first[2] == "None"
    step = int(first[1])
    assert finish(start(tmp_path / "two", data, step + 4)) == [f"finished {step + 4} {step}"] * 2
    alone = world.config(
        tmp_path / "one",
        data,
        optimizer__batch_size=4,
        run__steps=step + 4,
        optimizer__schedule="constant",
        optimizer__warmup_ratio=0.0,
    )
    assert run(alone, target=world.target())["step"] == step + 4
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    one, two = ({line["step"]: line["loss"] for line in map(json.loads, lines)} for lines in logs)
    before = [number for number in one if number <= step and number in two]  # later windows begin at the resumption
    assert len(before) >= 2
    assert [two[number] for number in before] == pytest.approx([one[number] for number in before], abs=1e-5)


def test_a_cluster_that_is_not_there_is_one_error():
    with pytest.raises(ConfigError, match=r"mesh\.coordinator: auto"):
        pod.join(TrainMeshSection(coordinator="auto"))


def test_a_lone_process_decides_alone():
    assert pod.chief() and pod.agreed(True, 3.0) == (True, 3.0) and pod.gathered({"a": 1}) == {"a": 1}
    pod.join(TrainMeshSection())
