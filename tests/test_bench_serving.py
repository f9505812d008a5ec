"""The serving bench at a tiny shape: every part runs, and the record says what it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_serving
from tools.serving_pairs import split_questions

LOAD = {"tokens_per_second", "round_ms", "tau", "ttft_s", "tpot_s", "compilations"}


@pytest.mark.slow("bench-serving", covers=("tools/bench_serving.py", "tools/serving_pairs.py", "jaxspec/serving"))
def test_the_bench_measures_every_method_and_judges_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serving.json"
    asked = [
        "--shape",
        "smallest",
        "--shares",
        "0.5",
        "--rates",
        "0.9,0.8,0.7,0.6,0.5,0.4,0.3",
        "--concurrency",
        "2",
        "--overlap",
        "2",
    ]
    asked += ["--profile-at", "0", "--seconds", "0.2", "--repeats", "1", "--steps", "3", "--max-context", "96"]
    asked += ["--new-tokens", "24", "--prompt-length", "12", "--chunk", "16", "--out", str(out)]
    code = bench_serving.main(asked)
    record = json.loads(out.read_text())
    (load,), (check,) = record["loads"], record["checks"]
    for method in bench_serving.METHODS:
        assert set(load[method]) >= LOAD and load[method]["tokens_per_second"] > 0
        assert load[method]["compilations"] == 0
    assert load["none"]["tau"] == 1.0 < load["dspark static"]["tau"]
    assert load["dspark static"]["proposed"] == pytest.approx(7, abs=0.5)
    assert code == int(not check["holds"])
    assert {one["method"] for one in record["overlap"]} == set(bench_serving.METHODS)
    assert record["guard"]["rounds"] >= bench_serving.GUARDED_ROUNDS and record["guard"]["compilations"] == 0
    assert record["confidences"]["requests"] == [] or record["confidences"]["requests"][0][0][0] == [
        0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3
    ]  # fmt: skip
    rates = record["stood"]["dflash"]["rates"]
    assert len(rates) == 7 and abs(rates[0] - 0.9) < 0.1
    assert record["acceptance"].startswith("simulated") and record["cost"]["table"]["bias_seconds"] > 0


def loads(none: float, dflash: float, static: float, scheduled: float, dear: float) -> list[dict]:
    rates = dict(zip(bench_serving.METHODS, (none, dflash, static, scheduled), strict=True))
    return [
        {
            "concurrency": 8,
            **{
                method: {"tokens_per_second": rate, "round_ms": dear if method == "dspark static" else 1.0}
                for method, rate in rates.items()
            },
        }
    ]


@pytest.mark.parametrize(
    ("rates", "dear", "holds"),
    [
        ((100, 90, 110, 107), 1.2, True),
        ((100, 90, 110, 106), 1.2, False),  # below 0.97 of static
        ((100, 120, 110, 112), 1.2, False),  # below 0.97 of DFlash
        ((100, 90, 110, 112), 1.5, False),  # static's round is dear: 1.05 is asked for
        ((100, 90, 110, 116), 1.5, True),
    ],
)
def test_what_the_checks_ask_for(rates: tuple[float, ...], dear: float, holds: bool) -> None:
    assert bench_serving.verdicts(loads(*rates, dear))[0]["holds"] is holds


def test_no_question_is_both_trained_on_and_asked() -> None:
    questions = split_questions(500)
    train, calibration, bench = map(set, (questions.train, questions.calibration, questions.bench))
    assert len(train) >= 500 and len(calibration) > 250 and len(bench) > 250
    assert not (train & calibration or train & bench or calibration & bench)
