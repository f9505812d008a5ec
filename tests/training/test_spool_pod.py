"""Two processes train as one out of a spool: both read it, one keeps the account."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxspec.training.featurestore import run as capturing
from jaxspec.training.main import run
from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK
from tests.training import world
from tests.training.test_run import Lines

CHANGES = {"optimizer__batch_size": 4, "run__checkpoint_every": 2, "run__steps": 6}
CODE = """
import sys
from pathlib import Path
from jaxspec.training import pod
from tests.training import world
from tests.training.test_spool_pod import settings
index, port, place = sys.argv[1:]
more = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": int(index), "fsdp": 2}
config = settings(Path(place), **{f"mesh__{name}": value for name, value in more.items()})
pod.join(config.mesh)
from jaxspec.training.main import run
print(run(config, target=world.target())["status"], flush=True)
"""


def settings(place: Path, **changes):
    spool = {"mode": "spool", "path": str(place / "spool"), "storage": "float32", "spool_shards": 3}
    features = {f"features__{name}": value for name, value in spool.items()}
    return world.config(place / "two", place / "data.npz", "dspark", **CHANGES, **features, **changes)


@REPEATS
def test_two_consumers_are_one_trainer(tmp_path):
    data = world.write_data(tmp_path / "data.npz", count=16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK}", "JAX_PLATFORMS": "cpu"
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(index), str(port), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    options = {"target": world.target(), "say": lambda line: None}
    producer = threading.Thread(target=capturing.run, args=(settings(tmp_path),), kwargs=options)
    producer.start()
    run(world.config(tmp_path / "one", data, "dspark", **CHANGES), target=world.target(), reporter=Lines())
    ends = [one.communicate(timeout=200) for one in processes]
    assert [one.returncode for one in processes] == [0, 0], ends
    producer.join(60)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    one, two = ([json.loads(line)["loss"] for line in lines] for lines in logs)
    assert two == pytest.approx(one, abs=1e-5)
    counts = capturing.status(str(tmp_path / "spool"))
    assert counts["steps"] == counts["acknowledged"] == 6 and counts["shards"] == counts["acknowledged_twice"] == 0
