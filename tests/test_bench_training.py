"""The bench of the training step at a tiny shape: every part runs, the record says what it must, and a wrong gradient
fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import bench_training
from tools.bench_training import Kept, Setup, Sizes, compare
from tools.profile_table import kinds
from tools.training_cost import PEERS, needed_flops

TINY = ["--shape", "tiny", "--length", "24", "--anchors", "4", "--layers", "1", "--repeats", "1", "--profile", "0"]
PART = {
    "command", "commit", "device", "platform", "python", "jax", "xla_flags", "shape", "context", "supervised_rows",
    "anchors", "supervised_tokens", "forward_loss_ms", "backward_ms", "optimizer_ms", "step_ms", "times_ms", "peak_gib",
    "tokens_per_second", "needed_tflop", "mfu", "floor_share", "peer", "times_the_peer", "verdicts", "check",
}  # fmt: skip


def test_every_part_runs_and_a_wrong_gradient_fails_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_training, "WARM_UPS", 1)
    keep = bench_training.first_step

    def spoiled(*arguments: Any) -> Kept:
        kept = keep(*arguments)
        kept.grads["fc"]["weight"] *= 1.05
        return kept

    out = tmp_path / "training.json"
    out.write_text(json.dumps({"parts": {"dspark": {"there": "before"}}}))
    monkeypatch.setattr(bench_training, "first_step", spoiled)
    code = bench_training.main([*TINY, "--method", "dflash", "--online", "dflash", "--json", str(out)])
    parts = json.loads(out.read_text())["parts"]
    assert parts["dspark"] == {"there": "before"}
    part, online = parts["dflash"], parts["dflash online"]
    assert set(part) >= PART and online["target_ms"] > 0 and online["features_given_ms"] == part["step_ms"]
    assert (part["anchors"], part["supervised_tokens"]) == (4, 24) and 0 < part["supervised_rows"] <= 4 * 15
    errors = part["check"]["gradient_errors"]
    assert code == 1 and not part["check"]["holds"]
    assert errors.pop("fc.weight") == pytest.approx(0.05, abs=0.01) and max(errors.values()) < 0.03
    assert part["check"]["loss_error"] < 1e-3
    assert "FAILED: expected at most 0.02" in capsys.readouterr().out


def test_what_counts_as_agreement() -> None:
    right = {"a": np.full((2, 3), 0.5, np.float32), "b": np.arange(4, dtype=np.float32), "d2t": None}
    assert compare(Kept(2.0, right), 2.0, right)["holds"]
    assert not compare(Kept(2.1, right), 2.0, right)["holds"]
    for wrong in (right["b"] * 1.03, right["b"] * np.nan):
        found = compare(Kept(2.0, right | {"b": wrong}), 2.0, right)
        assert not found["holds"] and list(found["worst"]) == ["b"]


@pytest.mark.parametrize("method", bench_training.METHODS)
def test_the_step_is_the_one_that_anchors_describe(method: str) -> None:
    """Sizes, and the floors of ANCHORS.md at the rate of a large product within what they leave open."""
    setup = Setup(method, Sizes("qwen3-4b", 4096, 512, 32000))
    drafter: Any = setup.spec.drafter
    total = sum(needed_flops(setup.spec, 4096).values())
    assert setup.shapes["features"].shape == (1, 1, 4096, len(drafter.taps) * 2560)
    assert setup.spec.dtype == np.dtype("bfloat16")
    assert ("teacher" in setup.shapes) == drafter.needs_teacher == (method != "dflash")
    floor = PEERS[method].floor
    if floor is not None:
        assert drafter.config.block_size == {"dflash": 16, "dspark": 7}[method]
        assert 0.8 < total / 700e12 / (1e-3 * floor) < 1.2
    else:
        assert drafter.objective_config.ttt_length == 7 and drafter.config.draft_vocab == 32000


def test_kernels_are_told_apart_by_kind() -> None:
    names = {
        "nvjet_hsh_128x256 | gemm.3 bf16[1920,2560] jit(step)/while": "products",
        "nvjet_hsh_128x256 | gemm.4 f32[1920,151936] jit(step)/while": "products over the vocabulary",
        "mosaic_gpu_forward_kernel": "attention",
        "loop_exponential_fusion | f.2 f32[1920,151936]": "elementwise over the vocabulary",
        "MemcpyD2D": "copies",
    }
    for name, kind in names.items():
        assert kinds([{"name": name, "us": 1000.0}], 151936) == {kind: 1.0}
