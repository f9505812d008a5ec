"""The bench over several devices at a tiny shape, on faked ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.process import run_on_devices
from tools import bench_devices

TINY = ["--shape", "tiny", "--length", "24", "--anchors", "4", "--layers", "1", "--repeats", "1"]


@pytest.mark.ci
def test_one_and_two_devices_are_timed_and_see_their_own_sequences(tmp_path: Path) -> None:
    out = tmp_path / "devices.json"
    code = f"""
    from tools import bench_devices
    print("code", bench_devices.main([*{TINY!r}, "--counts", "2", "1", "--json", {str(out)!r}]))
    """
    said = run_on_devices(code, devices=2)
    found = json.loads(out.read_text())
    one, two = found["parts"]
    assert (one["devices"], one["sequences"], two["devices"], two["sequences"]) == (1, 1, 2, 2)
    assert two["anchors"] == 2 * one["anchors"] == 8 and one["loss"] != two["loss"]
    rate = 48e3 / two["step_ms"] / (24e3 / one["step_ms"])
    assert found["times"]["2"] == pytest.approx(rate)
    assert found["verdicts"] == {"2 devices at least 1.9 times": rate >= 1.9, "losses agree": True}
    assert f"code {int(rate < 1.9)}" in said


def test_a_loss_that_is_another_models_is_seen() -> None:
    parts = [{"devices": n, "tokens_per_second": 10.0 * n, "loss": loss} for n, loss in ((1, 3.0), (2, 3.1), (4, 3.2))]
    found = bench_devices.judged(parts)
    assert found["times"] == {"2": 2.0, "4": 4.0}
    assert found["verdicts"] == {
        "2 devices at least 1.9 times": True, "4 devices at least 3.6 times": True, "losses agree": False
    }  # fmt: skip
    slow = bench_devices.judged([parts[0], {**parts[1], "tokens_per_second": 18.0}])
    assert not slow["verdicts"]["2 devices at least 1.9 times"] and slow["verdicts"]["losses agree"]


def test_more_devices_than_there_are_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_devices.main([*TINY, "--counts", "1", "99"]) == 2
    assert "--counts: [1, 99], expected 1 to" in capsys.readouterr().err
