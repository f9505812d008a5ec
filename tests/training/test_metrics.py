"""Numbers of the log: ratios are pooled, names are stable, a resumed log has no line twice."""

from __future__ import annotations

import io
import json

import numpy as np
from rich.console import Console

from jaxspec.training.metrics import MetricsWriter, Window
from jaxspec.training.progress import Reporter


def step(total, weight, **changes):
    base = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "anchors": 3,
        "supervised_anchors": 2,
        "supervised_tokens": 5,
        "skipped": 0,
        "nonfinite": 0,
    }
    terms = {
        "ce": (np.float32(total), np.float32(weight)),
        "metric/accuracy_position": (np.array([total, 1.0, 0.0]), np.array([weight, 4.0, 0.0])),
    }
    return {**base, "terms": terms, **changes}


def test_B38_ratios_are_pooled_and_positions_named():
    window = Window()
    window.add(step(1.0, 1.0, loss=1.0), 10, 0.5)
    window.add(step(0.0, 99.0, loss=3.0), 20, 0.1)
    numbers = window.read()
    assert numbers["loss/ce"] == 0.01  # a mean of ratios would be 0.5
    assert numbers["accuracy_position/1"] == 0.01 and numbers["accuracy_position/2"] == 0.25
    assert "accuracy_position/3" not in numbers  # nothing was supervised there
    assert (
        numbers["loss"] == 2.0
        and numbers["anchors"] == 6
        and numbers["supervised_anchors"] == 4
        and abs(numbers["data_wait_seconds"] - 0.3) < 1e-9
    )
    assert numbers["tokens_per_second"] > 0 and len(window) == 0


def test_the_log_of_a_dead_process_is_cut_back_to_the_checkpoint(tmp_path):
    writer = MetricsWriter(tmp_path, False)
    for number in (2, 4, 6):
        writer.write(number, {"loss": float(number)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # died in mid-line
    writer = MetricsWriter(tmp_path, False, resume_step=4)
    writer.write(6, {"loss": 0.0})
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 2.0), (4, 4.0), (6, 0.0)]


def test_plain_lines_without_a_terminal_and_a_bar_with_one():
    numbers = {"loss": 1.25, "learning_rate": 0.1, "grad_norm": 2.0, "tokens_per_second": 10.0}
    for terminal in (False, True):
        out = io.StringIO()
        reporter = Reporter(Console(file=out, force_terminal=terminal, width=120))
        reporter.start(2, 10)
        reporter.advance(3)
        reporter.log(3, numbers)
        reporter.stop()
        assert ("step 3/10  loss 1.25" in out.getvalue()) is not terminal
        assert ("3/10" in out.getvalue()) and ("training" in out.getvalue()) is terminal
