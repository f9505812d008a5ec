"""The command from a folder of weights: spread over a mesh as it is read, with an adapter, evaluated where it lies; and
stopped by SIGTERM as a cluster does it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints.safetensors_file import write_safetensors
from jaxspec.checkpoints.store import TensorFolder
from tests.helpers.process import QUICK, environment, run_on_devices
from tests.training import world
from tests.training.test_regenerate import CHATML
from tests.training.test_templates import make_tokenizer

pytestmark = pytest.mark.ci

# run on four devices; parameters as small as these would lie whole on each of them by default
RUN = """
from jaxspec import cli
from jaxspec.checkpoints import placing
from jaxspec.training import state
of, put, split = state.Placement.of, placing.jax.make_array_from_callback, []
def watch(shape, sharding, callback):
    leaf = put(shape, sharding, callback)
    split.append(leaf.addressable_shards[0].data.size / leaf.size)
    return leaf
placing.jax.make_array_from_callback = watch
state.Placement.of = lambda *arguments, **options: of(*arguments, **options, small=0)
assert cli.main(["train", "--config", CONFIG, "mesh.fsdp=2", "mesh.tensor=2"]) == 0
print(len(split), min(split))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an adapter for it, data, prompts and a config."""
    root = tmp_path_factory.mktemp("scale")
    target = world.folder(root / "tiny", make_tokenizer(CHATML))
    shapes = TensorFolder(target).shapes()
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        if name.endswith("q_proj.weight"):
            module = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = rng.normal(0, 0.2, (2, shape[1])).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(0, 0.2, (shape[0], 2)).astype(np.float32)
    (root / "lora").mkdir()
    write_safetensors(root / "lora" / "adapter_model.safetensors", tensors)
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (root / "lora" / "adapter_config.json").write_text(json.dumps(adapter))
    (root / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a b"}\n')
    config = f"""
version: 1
preset: dflash
target: {{source: {target}, dtype: float32, lora: {root / "lora"}}}
drafter: {{num_layers: 1, block_size: 4, mask_token_id: 12, target_layer_ids: [0, 1], dtype: float32}}
data: {{path: {world.write_data(root / "data.npz")}, max_length: 24, num_anchors: 5}}
optimizer: {{learning_rate: 0.01, batch_size: 4, ema_decay: 0.5}}
run: {{directory: {root / "run"}, steps: 6, checkpoint_every: 0, log_every: 2, tensorboard: false, eval_every: 3,
  eval_prompts: {root / "prompts.jsonl"}, eval_new_tokens: 8, export_weights: best}}
"""
    (root / "config.yaml").write_text(config)
    return root


def test_a_mesh_loads_trains_evaluates_and_exports(place: Path) -> None:
    """That the numbers do not depend on the mesh is test_mesh's."""
    said = run_on_devices(f"CONFIG = {str(place / 'config.yaml')!r}\n" + RUN, 4)
    assert said.splitlines()[-1] == "24 0.25"  # every tensor of the target, the matrices in quarters
    report = json.loads((place / "run" / "report.json").read_text())
    assert report["status"] == "finished" and report["best"]["tau"] >= 1.0 and report["metrics"]["eval/rounds"] > 0
    assert report["weights"] == {"from": "best", "ema_decay": 0.5, **report["best"]}
    export = TensorFolder(place / "run" / "export")
    assert export.metadata()["jaxspec.weights"] == "average" and export.shape("fc.weight") == (16, 32)


def test_SIGTERM_saves_and_exits_0(place: Path) -> None:
    """That a second start goes on from there, exactly, is B56's."""
    run = place / "terminated"
    command = [
        sys.executable, "-m", "jaxspec", "train", "--config", str(place / "config.yaml"), f"run.directory={run}",
        "run.steps=100000", "run.log_every=1", "run.eval_every=0", "run.export_weights=last",
    ]  # fmt: skip
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(XLA_FLAGS=QUICK), **quiet)
    log, deadline = run / "metrics.jsonl", time.monotonic() + 200
    try:
        while process.poll() is None and time.monotonic() < deadline and not (log.is_file() and log.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "the same command goes on from there" in said, said
    report = json.loads((run / "report.json").read_text())
    assert (report["status"], report["reason"]) == ("stopped", "SIGTERM")
    assert (run / "checkpoints" / str(report["step"])).is_dir() and (run / "report.html").is_file()
