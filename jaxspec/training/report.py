"""The report of a run: one HTML file that needs nothing else, made of metrics.jsonl, report.json and the config.

It is written whenever the loop ends, also by a signal, and holds the whole run: the log of earlier processes is in the
same file.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import Section, render
from jaxspec.training import plots
from jaxspec.training.directory import write_atomically

__all__ = ["NAME", "document", "read_log", "write"]

NAME = "report.html"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1360px; margin: 2em auto; padding: 0 1em }
body { color: #222; background: #fff }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } }
figure { display: inline-block; margin: 0 .6em 1em 0 }
table { border-collapse: collapse; margin: .4em 0 1.2em }
td, th { padding: .15em .9em .15em 0; text-align: left; border-bottom: 1px solid #8884 }
pre { overflow-x: auto; font-size: 12px }
"""
_CHARTS: tuple[tuple[str, str], ...] = (
    ("Loss, by term", r"loss(/.*)?"),
    ("tau of the serving round, with its 95 % interval", r"eval/tau(_low|_high)?"),
    ("Acceptance of the serving round given the slots before, by slot", r"eval/acceptance/\d+"),
    ("Accuracy in training, by slot", r"accuracy_(position|step)/\d+"),
    ("Acceptance in training given the slots before, by slot", r"accepted_position/\d+"),
    ("Mean tokens of a round, estimated in training", r"(accepted_tau|tau_probabilistic|served_length|oracle_length)"),
    ("Candidates that hold the label, by slot", r"selector_coverage_position/\d+"),
    ("Selector's accuracy where they do, by slot", r"selector_conditional_accuracy_position/\d+"),
    ("Calibration error of the confidence, by slot", r"eval/ece/\d+"),
    ("Tokens a second", r"tokens_per_second"),
    ("Learning rate", r"learning_rate"),
    ("Gradient norm", r"grad_norm"),
)
_BY_SLOT = (("acceptance given the slots before", "eval/acceptance"), ("all slots up to it", "eval/survival"))
_SLOT_TABLE = ("acceptance", "survival", "ece", "brier", "auroc")


def write(place: Path, report: Mapping[str, Any], config: Section, say: Callable[[str], None]) -> Path:
    """Write DIRECTORY/report.html and say where it is.

    Args:
      report: what `training.main.run` returns.
    """
    path = place / NAME
    write_atomically(path, document(report, config, read_log(place / "metrics.jsonl")))
    say(f"report: {path}")
    return path


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, in order; none where there is no file."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut short by a process that died; the next start removes it
            continue
    return found


def document(report: Mapping[str, Any], config: Section, log: list[dict[str, Any]]) -> str:
    """The page."""
    body = "".join(
        [
            "<h1>Training run</h1>",
            _table(_summary(report)),
            "<h2>Curves</h2>",
            "".join(f"<figure>{chart}</figure>" for chart in _curves(log)) or "<p>The log is empty.</p>",
            "<h2>The last evaluation, by slot</h2>",
            _slots(log),
            "<h2>Data</h2>",
            _table((name.replace("_", " "), value) for name, value in dict(report.get("data") or {}).items()),
            "<h2>The last numbers of the log</h2>",
            _table(sorted(_last(log).items())),
            "<h2>Settings</h2>",
            f"<pre>{html.escape(render(config))}</pre>",
        ]
    )
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Training run</title>'
    return f"{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n"


def _summary(report: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("status", "reason", "step", "resumed_from", "skipped_steps", "sequence_length", "export"):
        yield name.replace("_", " "), report.get(name)
    seconds, tokens = float(report.get("seconds") or 0.0), int(report.get("tokens") or 0)
    yield "seconds of the loop", round(seconds, 1)
    yield "tokens", tokens
    if seconds:
        yield "tokens a second, evaluations included", round(tokens / seconds, 1)
    for name, value in dict(report.get("weights") or {}).items():
        yield f"exported weights: {name.replace('_', ' ')}", value


def _curves(log: list[dict[str, Any]]) -> Iterator[str]:
    for title, pattern in _CHARTS:
        names = sorted({name for line in log for name in line if re.fullmatch(pattern, name)}, key=_natural)
        chart = plots.lines(
            title, {name: [(line["step"], line[name]) for line in log if name in line] for name in names}
        )
        if chart:
            yield chart
    last: dict[str, Any] = next((line for line in reversed(log) if "eval/tau" in line), {})
    by_slot = {title: [last[name] for name in _by_slot(last, prefix)] for title, prefix in _BY_SLOT}
    chart = plots.bars(f"Acceptance by slot at step {last.get('step')}", by_slot)
    if chart:
        yield chart


def _slots(log: list[dict[str, Any]]) -> str:
    last = next((line for line in reversed(log) if "eval/tau" in line), None)
    if last is None:
        return "<p>No evaluation was made (run.eval_every).</p>"
    columns = [name for name in _SLOT_TABLE if _by_slot(last, f"eval/{name}")]
    count = len(_by_slot(last, "eval/acceptance"))
    rows = [[slot, *(last.get(f"eval/{name}/{slot}", "") for name in columns)] for slot in range(1, count + 1)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("slot", *columns))
    cells = "".join("<tr>" + "".join(f"<td>{_shown(value)}</td>" for value in row) + "</tr>" for row in rows)
    note = (
        f"<p>step {last['step']}, tau {_shown(last['eval/tau'])} over {_shown(last.get('eval/rounds', ''))} rounds</p>"
    )
    return f"{note}<table><tr>{head}</tr>{cells}</table>"


def _by_slot(line: Mapping[str, Any], prefix: str) -> list[str]:
    return sorted((name for name in line if re.fullmatch(rf"{re.escape(prefix)}/\d+", name)), key=_natural)


def _last(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Each name's last value."""
    return {name: value for line in log for name, value in line.items()}


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{_shown(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>" if cells else "<p>Nothing.</p>"


def _shown(value: Any) -> str:
    return html.escape(f"{value:.5g}" if isinstance(value, float) else str(value))
