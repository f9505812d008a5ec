"""The run report: one file, every curve of the log, nothing from elsewhere; and the log that also goes to wandb."""

from __future__ import annotations

import json
import sys
import types
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from jaxspec.errors import ConfigError
from jaxspec.training import plots, report, tracking
from jaxspec.training.metrics import MetricsWriter
from tests.training import world


class Balanced(HTMLParser):
    """Raises where tags do not close each other; keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)
        outside = [value for name, value in attrs if name in ("src", "href")]
        assert not outside, outside

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


LOG = [
    {"step": 2, "loss": 3.0, "loss/ce": 2.0, "loss/l1": 1.0, "tokens_per_second": 100.0, "accuracy_position/1": 0.1},
    {"step": 2, "eval/tau": 1.1, "eval/tau_low": 1.0, "eval/tau_high": 1.3, "eval/acceptance/1": 0.2,
     "eval/acceptance/2": 0.1, "eval/survival/1": 0.2, "eval/survival/2": 0.02, "eval/ece/1": 0.05},
    {"step": 4, "loss": float("nan"), "loss/ce": 1.5, "tokens_per_second": 120.0, "accuracy_position/1": 0.3},
    {"step": 4, "eval/tau": 1.625, "eval/tau_low": 1.5, "eval/tau_high": 1.7, "eval/acceptance/1": 0.4,
     "eval/acceptance/2": 0.3, "eval/acceptance/10": 0.25, "eval/survival/1": 0.4, "eval/ece/1": 0.04},
]  # fmt: skip


def test_the_page_holds_curves_slots_settings_and_data(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG) + '{"step": 6, "lo')
    said = []
    config = world.config(place, tmp_path / "<data>.npz")
    facts = {"status": "finished", "seconds": 2.0, "tokens": 500, "data": {"kept": 7, "dropped_empty": 2},
             "weights": {"from": "best", "step": 4, "tau": 1.625}}  # fmt: skip
    path = report.write(place, facts, config, said.append)
    assert said == [f"report: {path}"] and path.parent == place
    page = Balanced()
    page.feed(path.read_text())
    assert not page.open
    for words in ("Loss, by term", "tau of the serving round", "Tokens a second", "dropped empty", "250", "best",
                  "learning_rate: 0.01", "step 4, tau 1.625", "<data>.npz"):  # fmt: skip
        assert words in page.text, words
    assert "<data>" not in path.read_text()
    charts = path.read_text().split("<svg")[1:]
    assert len(charts) == 7  # loss, tau, acceptance, accuracy, calibration, tokens a second, bars
    assert charts[0].count("<polyline") == 3 and charts[1].count("<polyline") == 3
    for chart in charts:
        ET.fromstring("<svg" + chart.partition("</svg>")[0] + "</svg>")
        assert "nan" not in chart.partition("</svg>")[0].replace("dominant", "")


def test_a_run_without_a_log_still_has_a_page(tmp_path):
    page = report.document(
        {"status": "stopped"}, world.config(tmp_path, tmp_path / "d"), report.read_log(tmp_path / "x")
    )
    assert "The log is empty" in page and "No evaluation was made" in page


def test_points_lie_where_they_should():
    chart = plots.lines("t", {"a": [(0, 0.0), (10, 1.0)]})
    x = [float(pair.split(",")[0]) for pair in chart.partition('points="')[2].partition('"')[0].split()]
    y = [float(pair.split(",")[1]) for pair in chart.partition('points="')[2].partition('"')[0].split()]
    assert x == [64.0, plots.WIDTH - 12.0] and y[0] > y[1]
    assert plots.lines("t", {"a": []}) == "" and plots.bars("t", {}) == ""
    assert "<polyline" in plots.lines("one point", {"a": [(3, 2.0)]})
    bars = plots.bars("t", {"a": [0.5, 1.0]})
    heights = [float(part.split('"')[0]) for part in bars.split(' height="')[2:] if part.split('"')[0] not in ("9",)]
    assert heights[0] == pytest.approx(heights[1] / 2, abs=0.1)


def fake(monkeypatch, fails=False):
    calls = []

    def init(**options):
        if fails:
            raise RuntimeError("api_key not configured")
        calls.append(("init", options["project"], options["id"], options["resume"], options["config"]["version"]))
        log = lambda numbers, step: calls.append(("log", step, numbers))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: calls.append(("finish",)))

    module = types.ModuleType("wandb")
    module.init = init
    module.__spec__ = types.SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_the_log_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, monkeypatch):
    calls = fake(monkeypatch)
    config = world.config(tmp_path, tmp_path / "d", run__wandb="drafts")
    tracking.check(config)
    for step in (2, 4):
        writer = MetricsWriter(tmp_path, False, step - 2, tracking.Tracker(config, tmp_path))
        writer.write(step, {"loss": 1.0})
        writer.close()
    first, second = calls[0], calls[3]
    assert first[:2] == ("init", "drafts") and first[3:] == ("allow", 1) and first == second
    assert calls[1:3] == [("log", 2, {"loss": 1.0}), ("finish",)] and calls[4] == ("log", 4, {"loss": 1.0})


def test_wandb_is_only_imported_when_asked_for_and_its_absence_is_said_first(tmp_path, monkeypatch):
    tracking.check(world.config(tmp_path, tmp_path / "d"))
    assert "wandb" not in sys.modules
    config = world.config(tmp_path, tmp_path / "d", run__wandb="drafts")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run\.wandb.*pip install wandb"):
        tracking.check(config)
    fake(monkeypatch, fails=True)
    with pytest.raises(ConfigError, match=r"run\.wandb.*api_key not configured.*WANDB_MODE=offline"):
        tracking.Tracker(config, tmp_path)
