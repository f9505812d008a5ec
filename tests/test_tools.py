"""The tools behind the Makefile: honest stages, the age of slow results, a Python that really starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.mutation import Mutant, apply


def tool(root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", root / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_stages_go_on_after_a_failure_and_end_with_1(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = tool(root, "stages")
    plan = [
        stages.Stage("first", ("true",), 5, needed=True),
        stages.Stage("broken", ("false",), 5),
        stages.Stage("stuck", ("sleep", "60"), 1),
        stages.Stage("absent", ("false",), 5, only_if="no/such/path"),
        stages.Stage("last", ("true",), 5),
    ]
    monkeypatch.setattr(stages, "stages", lambda: plan)
    assert stages.main() == 1
    shown = capfd.readouterr().out
    assert "stage broken: 0 s, FAILED (exit 1)" in shown
    assert "stage stuck: 1 s, FAILED (stopped after 1 s)" in shown
    assert "stage absent: left out" in shown and "stage last: 0 s, ok" in shown
    assert shown.splitlines()[-1].endswith("failed: broken, stuck")
    monkeypatch.setattr(stages, "stages", lambda: [plan[0], plan[-1]])
    assert stages.main() == 0
    monkeypatch.setattr(stages, "stages", lambda: [stages.Stage("set-up", ("false",), 5, needed=True), plan[-1]])
    assert stages.main() == 1
    assert "stage last" not in capfd.readouterr().out.partition("set-up")[2]


def test_all_stages_end_inside_50_minutes(root: Path) -> None:
    assert sum(stage.limit for stage in tool(root, "stages").stages()) < 50 * 60


@pytest.mark.parametrize("newest", [True, False])
def test_every_test_runs_on_one_python(root: Path, tmp_path: Path, newest: bool) -> None:
    """The first suite leaves out just what a later stage names, and only where that stage will run."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/stages.py").write_text((root / "tools/stages.py").read_text())
    if newest:
        (tmp_path / ".venv-3.12").mkdir()
        (tmp_path / ".venv-3.12/.stamp-setup").touch()
    stages = tool(tmp_path, "stages")
    by_name = {stage.name: stage for stage in stages.stages()}
    left_out = {word.partition("=")[2] for word in by_name["tests"].command if word.startswith("--fast-only=")}
    later = by_name["longer tests on 3.12"]
    assert left_out == (set(stages.NEWEST) if newest else set())
    assert left_out <= set(later.command) and later.command[-len(stages.NEWEST) - 2 :][:2] == ("-m", "ci")
    assert (tmp_path / later.only_if).exists() == newest
    assert all((root / path).exists() for path in stages.NEWEST)


@pytest.mark.ci
def test_fast_only_leaves_out_longer_tests_of_a_path_and_nothing_else(root: Path) -> None:
    def collected(*more: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *more]
        files = ["tests/drafters/test_tree_confidence.py", "tests/decoding/test_trees.py"]
        done = subprocess.run([*command, *files], cwd=root, capture_output=True, text=True, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    every, some = collected(), collected("--fast-only=tests/drafters/test_tree_confidence.py")
    longer = collected("-m", "ci")
    assert every - some == {name for name in longer if "tree_confidence" in name} != set()
    assert some & longer


def test_a_result_is_stale_when_its_code_changed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tool(root, "slow_results")
    monkeypatch.setattr(slow, "ROOT", tmp_path)

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *names, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "covered.py").write_text("1\n")
    git("add", "covered.py")
    git("commit", "-qm", "first")
    result = {"commit": git("rev-parse", "HEAD"), "covers": ["covered.py"]}
    (tmp_path / "other.py").write_text("1\n")
    git("add", "other.py")
    git("commit", "-qm", "another file")
    assert slow.age(result) is None
    (tmp_path / "covered.py").write_text("2\n")
    assert "uncommitted changes" in slow.age(result)
    git("commit", "-qam", "changed it")
    assert "changed it" in slow.age(result)
    assert "not in this repository" in slow.age({**result, "commit": "0" * 40})


def test_slow_results_of_the_repository_are_complete(root: Path) -> None:
    for file in (root / "results" / "slow").glob("*.json"):
        result = json.loads(file.read_text())
        assert {"commit", "seeds", "counts", "seconds", "covers", "outcome"} <= set(result), file.name
        assert result["name"] == file.stem


def test_find_python_takes_only_what_starts(root: Path) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for wanted, code in ((version, 0), ("3.99", 1)):
        done = subprocess.run([root / "tools" / "find_python.sh", wanted], capture_output=True, text=True, check=False)
        assert done.returncode == code or wanted == version, done.stderr
        if done.returncode == 0:
            asked = [done.stdout.strip(), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == wanted


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("b", "c", "occurs 2 times"), ("z", "c", "occurs 0 times"), ("a", "a", "equals"), ("a", "c", None)],
)
def test_a_mutant_must_name_one_place(old: str, new: str, words: str | None, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("abb")
    wrong = apply(Mutant("x", "file.py", old, new, (), "why"), tmp_path)
    assert wrong is None if words is None else words in str(wrong)
    assert (tmp_path / "file.py").read_text() == ("cbb" if words is None else "abb")


def test_every_mutant_names_a_place_and_tests_that_exist(root: Path) -> None:
    from tests.mutants import MUTANTS

    for mutant in MUTANTS:
        assert (root / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.id
        assert all((root / test.partition("::")[0]).is_file() for test in mutant.tests), mutant.id
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)


def test_a_profile_counts_what_overlaps_once_and_names_what_took_longest(root: Path) -> None:
    table = tool(root, "profile_table")
    assert table._union([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (9.0, 10.0)]) == 7.0
    assert table._union([]) == 0.0
    event = namedtuple("event", "name duration_ns")
    rows = table._table([event("a#1", 500), event("b", 4000), event("a#2", 1500)], steps=2)
    assert rows == [{"name": "b", "calls": 0.5, "us": 2.0}, {"name": "a", "calls": 1.0, "us": 1.0}]


def test_the_cost_curve_spans_requests_and_rows_and_times_no_point_twice(root: Path) -> None:
    bench = tool(root, "bench_round")
    points = [(requests, rows) for requests, all_rows in bench.CURVE.items() for rows in all_rows]
    assert {1, 64} <= {requests for requests, _ in points} and {1, 512} <= {rows for _, rows in points}
    assert all(rows % requests == 0 for requests, rows in points)
    target = bench.ModelConfig.from_hf(bench.SHAPES["tiny"])
    known = [bench.Case("plain", None), bench.Case("verify 16 rows", bench.ngram(target, 15), 1, 16)]
    cases = bench.curve_cases(target, known)
    assert [(case.requests, case.rows) for case in cases] == [p for p in points if p not in ((1, 1), (1, 16))]
    assert all((case.draft is None) == (case.requests == case.rows) for case in cases)
