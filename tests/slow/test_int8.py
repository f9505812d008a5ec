"""`make test-slow-int8`: what an int8 target costs the smoke run's DFlash, on prompts that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.decoding.smollm2_pair import recorded
from tests.helpers.process import run_python
from tests.slow import smoke

COVERS = ("jaxspec/models", "jaxspec/decoding", "jaxspec/drafters", "jaxspec/evaluation/quantization.py")


@pytest.mark.slow("int8", covers=COVERS)
def test_tau_under_an_int8_target(tmp_path: Path, record_property: Any) -> None:
    smoke.train("dflash")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": record["question"]}) + "\n" for record in recorded()))
    done = run_python(
        "-m", "jaxspec", "quantization", "--target", "smollm2", "--drafter", str(smoke.export("dflash")),
        "--file", str(prompts), "--dtype", "float32", "--max-new-tokens", "64", "--json", timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for name in ("plain", "int8"):
        record_property(f"tau {name}", [found[name][key] for key in ("tau", "low", "high", "rounds")])
    record_property("loss", found["loss"])
    record_property("same_prefix", found["same_prefix"])
    record_property("bytes", [found["plain_bytes"], found["int8_bytes"]])
    # one scale a row costs a drafter next to nothing; a misread weight would leave it at 1
    assert found["plain"]["tau"] > 1.02 and found["int8"]["tau"] > found["plain"]["tau"] - 0.1
    assert found["int8_bytes"] < 0.45 * found["plain_bytes"]  # of float32: a quarter of the layers, all of the table
