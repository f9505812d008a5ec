"""The conformance runner itself: finding cases, comparing, reporting, dumping. The cases here are made on the spot."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cli import main as cli
from jaxspec.errors import DataError
from jaxspec.evaluation.conformance import add_arguments, kinds, main
from jaxspec.evaluation.conformance.cases import Check, find_cases, read_case
from jaxspec.evaluation.conformance.compare import compare_tensor

FLOATS = np.array([[1.0, 2.0], [-3.0, 4.0], [5.0, -60.0]], np.float32)
IDS = np.array([3, 1, 2], np.int64)
CLOSE = {"mode": "close", "rtol": 1e-3, "atol": 1e-3}
SCALED = {"mode": "scaled", "relative_to_max": 1e-3, "atol": 1e-6}
EXACT = {"mode": "exact"}


@pytest.fixture(autouse=True)
def echo_kind(monkeypatch):
    """A kind that gives its inputs back, so that a test decides what was computed."""
    monkeypatch.setitem(kinds.KINDS, "0.echo", lambda case: dict(case.inputs))


def make_case(folder: Path, actual, expected, checks=None, kind="0.echo", **said) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    checks = (
        {name: EXACT if value.dtype.kind != "f" else CLOSE for name, value in expected.items()}
        if checks is None
        else checks
    )
    declared = {name: {"shape": list(value.shape), "dtype": str(value.dtype)} for name, value in expected.items()}
    document = {"case": folder.name, "kind": kind, "config": {}, "expected": declared, "checks": checks, **said}
    (folder / "case.json").write_text(json.dumps(document))
    save_file(actual, folder / "inputs.safetensors")
    if expected:
        save_file(expected, folder / "expected.safetensors")
    return folder


def run(capsys, *arguments) -> tuple[int, list[str]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    code = main(parser.parse_args([str(one) for one in arguments]))
    return code, capsys.readouterr().out.splitlines()


def difference(check, actual, **expected):
    name = next(iter(expected))
    return compare_tensor(name, check, actual, expected)


def test_a_line_a_case_and_the_counts_last(tmp_path, capsys):
    make_case(tmp_path / "good", {"x": FLOATS + 5e-4, "ids": IDS}, {"x": FLOATS, "ids": IDS})
    make_case(tmp_path / "bad", {"x": FLOATS + 0.5, "ids": IDS}, {"x": FLOATS, "ids": IDS})
    code, lines = run(capsys, tmp_path)
    assert code == 1
    assert lines[0].startswith("bad: error 0.5 (x), tolerance 0.00") and ", fail: x: " in lines[0]
    assert lines[1].startswith("good: error 0.0005 (x), tolerance 0.002, pass")
    assert lines[-1] == "1 passed, 1 failed"


def test_all_passed_is_exit_0(tmp_path, capsys):
    make_case(tmp_path / "good", {"x": FLOATS}, {"x": FLOATS})
    assert run(capsys, tmp_path) == (0, ["good: error 0 (x), tolerance 0.002, pass", "1 passed, 0 failed"])


def test_no_case_is_a_failure(tmp_path, capsys):
    code, lines = run(capsys, tmp_path)
    assert code == 1 and lines[-1] == "0 passed, 0 failed"
    make_case(tmp_path / "good", {"x": FLOATS}, {"x": FLOATS})
    code, lines = run(capsys, tmp_path, "--only", "other")
    assert code == 1 and lines[-1] == "0 passed, 0 failed"
    assert run(capsys, tmp_path / "absent")[0] == 1


def test_an_unknown_kind_fails(tmp_path, capsys):
    make_case(tmp_path / "new", {"x": FLOATS}, {"x": FLOATS}, kind="99.of_tomorrow")
    code, lines = run(capsys, tmp_path)
    assert code == 1 and "kind '99.of_tomorrow' is not known" in lines[0] and lines[-1] == "0 passed, 1 failed"


def test_a_tensor_that_is_not_computed_fails(tmp_path, capsys):
    make_case(tmp_path / "short", {"x": FLOATS}, {"x": FLOATS, "y": FLOATS})
    code, lines = run(capsys, tmp_path)
    assert code == 1 and "y: not computed" in lines[0]


def test_a_tensor_that_is_missing_in_expected_fails(tmp_path, capsys):
    make_case(tmp_path / "odd", {"x": FLOATS, "y": FLOATS}, {"x": FLOATS}, checks={"x": CLOSE, "y": CLOSE})
    code, lines = run(capsys, tmp_path)
    assert code == 1 and "y: missing in expected.safetensors" in lines[0]


def test_diagnostics_are_not_compared_but_a_case_of_nothing_else_fails(tmp_path, capsys):
    expected = {"x": FLOATS, "margin": IDS}
    make_case(tmp_path / "a", {"x": FLOATS}, expected, checks={"x": CLOSE, "margin": {"mode": "diagnostic"}})
    make_case(tmp_path / "b", {"x": FLOATS}, expected, checks={"margin": {"mode": "diagnostic"}})
    code, lines = run(capsys, tmp_path)
    assert code == 1 and ", pass" in lines[0] and "nothing was compared" in lines[1]


@pytest.mark.parametrize(
    "actual",
    [
        FLOATS[:2],
        FLOATS.T.copy(),
        FLOATS[None],
        FLOATS.astype(np.int64),
        FLOATS > 0,
        np.where(FLOATS > 4, np.nan, FLOATS),
    ],
    ids=["short", "transposed", "rank", "integers", "bools", "nan"],
)
def test_shape_dtype_and_nan(actual):
    assert difference(Check("close", rtol=1.0, atol=100.0), actual, x=FLOATS).failure is not None


def test_nan_in_both_tensors_is_no_match():
    both = np.array([np.nan], np.float32)
    assert difference(Check("exact"), both, x=both).failure is not None


def test_width_of_integers_and_floats_does_not_matter():
    assert difference(Check("exact"), IDS.astype(np.int32), x=IDS).failure is None
    assert difference(Check("close", atol=1e-6), FLOATS.astype(np.float64), x=FLOATS).failure is None


def test_exact_counts_what_differs():
    found = difference(Check("exact"), IDS + np.array([0, 1, 1]), x=IDS)
    assert found.error == 2 and found.failure == "x: 2 of 3 values differ"
    assert difference(Check("exact"), np.nextafter(FLOATS, 99), x=FLOATS).failure is not None


def test_close_is_per_element_and_of_the_expected_value():
    check = Check("close", rtol=0.1, atol=0.0)
    assert difference(check, np.float32([11.0, 0.0]), x=np.float32([10.0, 0.0])).failure is None
    assert difference(check, np.float32([10.0, 0.0]), x=np.float32([11.2, 0.0])).failure is not None
    assert difference(check, np.float32([100.0, 1e-9]), x=np.float32([100.0, 0.0])).failure is not None


def test_scaled_is_relative_to_the_largest_value():
    check = Check("scaled", relative_to_max=0.01, atol=0.0)
    wanted = np.float32([100.0, 0.0])
    assert difference(check, np.float32([100.0, 0.99]), x=wanted).failure is None
    assert difference(check, np.float32([100.0, 1.01]), x=wanted).failure is not None


@pytest.mark.parametrize("mode", ["close", "scaled"])
def test_infinities_match_only_each_other(mode):
    check = Check(mode, rtol=1.0, atol=1.0, relative_to_max=1.0)
    wanted = np.float32([np.inf, 1.0])
    assert difference(check, wanted.copy(), x=wanted).failure is None
    for actual in ([5.0, 1.0], [-np.inf, 1.0], [np.inf, np.inf]):
        assert difference(check, np.float32(actual), x=wanted).failure is not None


def test_rows_where_looks_at_the_smallest_margin_of_a_row(tmp_path, capsys):
    margin = np.float32([[0.5, 1e-9], [0.5, 0.5], [1e-6, 0.5]])
    check = {**EXACT, "rows_where": {"tensor": "margin", "above": 1e-6}}
    checks = {"ids": check, "margin": {"mode": "diagnostic"}}
    make_case(tmp_path / "a", {"ids": IDS + np.array([1, 0, 1])}, {"ids": IDS, "margin": margin}, checks)
    make_case(tmp_path / "b", {"ids": IDS + np.array([0, 1, 0])}, {"ids": IDS, "margin": margin}, checks)
    code, lines = run(capsys, tmp_path)
    assert code == 1 and lines[0].endswith("pass, 2 rows excused") and ", fail, 2 rows excused: ids" in lines[1]


def test_rows_where_cannot_excuse_everything_nor_lean_on_what_is_not_there():
    check = Check("exact", margin="margin", above=1.0)
    assert "nothing was compared" in difference(check, IDS, x=IDS, margin=np.zeros(3, np.float32)).failure
    assert "missing" in difference(check, IDS, x=IDS).failure
    assert "no common rows" in difference(check, IDS, x=IDS, margin=np.zeros(2, np.float32)).failure
    assert "NaN" in difference(check, IDS, x=IDS, margin=np.full(3, np.nan, np.float32)).failure


def test_shapes_are_compared_before_rows_are_excused():
    check = Check("exact", margin="margin", above=0.5)
    margin = np.float32([0.0, 1.0, 1.0])
    assert difference(check, np.zeros((4,), np.int64), x=IDS, margin=margin).failure is not None


def test_dump_writes_the_checked_tensors_in_the_declared_dtype(tmp_path, capsys):
    make_case(tmp_path / "cases" / "deep" / "one", {"ids": IDS.astype(np.int32), "more": FLOATS}, {"ids": IDS})
    code, lines = run(capsys, tmp_path / "cases", "--dump", tmp_path / "out")
    written = load_file(tmp_path / "out" / "deep" / "one" / "actual.safetensors")
    assert code == 0 and list(written) == ["ids"] and written["ids"].dtype == np.int64
    assert lines[-1] == "1 passed, 0 failed"


def test_dump_without_expected_is_no_failure_and_says_so(tmp_path, capsys):
    folder = make_case(tmp_path / "cases" / "one", {"ids": IDS}, {"ids": IDS})
    (folder / "expected.safetensors").unlink()
    code, lines = run(capsys, tmp_path / "cases", "--dump", tmp_path / "out")
    assert code == 0 and lines[0] == "one: error -, tolerance -, dumped"
    assert "nothing to compare" in lines[-2] and lines[-1] == "0 passed, 0 failed"
    assert np.array_equal(load_file(tmp_path / "out" / "one" / "actual.safetensors")["ids"], IDS)
    code, lines = run(capsys, tmp_path / "cases")
    assert code == 1 and "expected.safetensors is missing" in lines[0] and lines[-1] == "0 passed, 1 failed"


def test_dump_without_expected_still_wants_every_checked_tensor(tmp_path, capsys):
    folder = make_case(tmp_path / "cases" / "one", {"ids": IDS}, {"ids": IDS, "more": FLOATS})
    (folder / "expected.safetensors").unlink()
    code, lines = run(capsys, tmp_path / "cases", "--dump", tmp_path / "out")
    assert code == 1 and "more: not computed" in lines[0]


def test_links_are_followed_and_loops_end(tmp_path, capsys):
    make_case(tmp_path / "store" / "one", {"ids": IDS}, {"ids": IDS})
    root = tmp_path / "cases"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "store", target_is_directory=True)
    (tmp_path / "store" / "back").symlink_to(root, target_is_directory=True)
    code, lines = run(capsys, root)
    assert code == 0 and lines[0].startswith("linked/one: ") and lines[-1] == "1 passed, 0 failed"


def test_a_case_folder_may_be_named_directly(tmp_path, capsys):
    make_case(tmp_path / "one", {"ids": IDS}, {"ids": IDS})
    code, lines = run(capsys, tmp_path / "one")
    assert code == 0 and lines[0].startswith("one: ")


def test_names_come_from_the_folders_not_from_what_is_known(tmp_path, capsys):
    make_case(tmp_path / "b" / "x", {"ids": IDS}, {"ids": IDS}, case="something else")
    make_case(tmp_path / "a" / "x", {"ids": IDS}, {"ids": IDS})
    assert [line.split(":")[0] for line in run(capsys, tmp_path)[1][:-1]] == ["a/x", "b/x"]
    assert run(capsys, tmp_path, "--only", "b/*")[1][-1] == "1 passed, 0 failed"
    assert run(capsys, tmp_path, "--only", "/x")[1][-1] == "2 passed, 0 failed"


def test_a_warning_stands_under_the_name_of_its_case(tmp_path, capsys, monkeypatch):
    def warns(case):
        logging.getLogger("jaxspec.drafters.block_config").warning("mask_token_id %d is also pad_token_id", 7)
        return {"ids": IDS}

    monkeypatch.setitem(kinds.KINDS, "0.warns", warns)
    for name in ("a", "100%"):
        make_case(tmp_path / name, {"ids": IDS}, {"ids": IDS}, kind="0.warns")
    assert cli(["conformance", str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{name}: mask_token_id 7 is also pad_token_id" for name in ("100%", "a")]


def test_one_broken_case_leaves_the_others_alone(tmp_path, capsys, monkeypatch):
    def broken(case):
        raise ZeroDivisionError("in the code under test")

    monkeypatch.setitem(kinds.KINDS, "0.broken", broken)
    make_case(tmp_path / "a", {"ids": IDS}, {"ids": IDS}, kind="0.broken")
    make_case(tmp_path / "b", {"ids": IDS}, {"ids": IDS})
    (make_case(tmp_path / "c", {"ids": IDS}, {"ids": IDS}) / "case.json").write_text("{")
    (make_case(tmp_path / "d", {"ids": IDS}, {"ids": IDS}) / "inputs.safetensors").write_bytes(b"short")
    code, lines = run(capsys, tmp_path)
    assert code == 1 and lines[-1] == "1 passed, 3 failed"
    assert "ZeroDivisionError: in the code under test" in lines[0] and "d/" not in lines[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": 3}, "kind"),
        ({"checks": {}}, "checks"),
        ({"checks": {"x": {"mode": "loose"}}}, "checks.x.mode"),
        ({"checks": {"x": {"mode": "close", "atol": 1}}}, "checks.x"),
        ({"checks": {"x": {"mode": "exact", "atol": 1}}}, "checks.x"),
        ({"checks": {"x": {"mode": "exact", "rows_where": {"tensor": "m"}}}}, "checks.x.rows_where"),
    ],
)
def test_a_contract_that_this_version_does_not_know_is_refused(tmp_path, change, field):
    folder = make_case(tmp_path / "one", {"x": FLOATS}, {"x": FLOATS})
    said = json.loads((folder / "case.json").read_text())
    (folder / "case.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(DataError, match=field):
        read_case(folder, tmp_path)


def test_json_is_one_document(tmp_path, capsys):
    make_case(tmp_path / "a", {"x": FLOATS + 1, "y": FLOATS}, {"x": FLOATS, "y": FLOATS, "z": FLOATS})
    make_case(tmp_path / "b", {"x": FLOATS}, {"x": FLOATS})
    code, lines = run(capsys, tmp_path, "--json")
    report = json.loads("\n".join(lines))
    assert code == 1 and (report["passed"], report["failed"], report["dumped"]) == (1, 1, 0)
    bad, good = report["cases"]
    assert bad["status"] == "fail" and len(bad["reasons"]) == 2 and bad["worst"]["tensor"] == "z"
    assert good["status"] == "pass" and good["compared"] == 1 and good["worst"]["error"] == 0


def test_find_cases_is_sorted_and_finds_nested_ones(tmp_path):
    for name in ("b", "a/deep/one", "a"):
        make_case(tmp_path / name, {"x": FLOATS}, {"x": FLOATS})
    assert [path.relative_to(tmp_path).as_posix() for path in find_cases(tmp_path)] == ["a", "a/deep/one", "b"]


def test_a_malformed_case_fails_alone_and_links_are_entered_once(tmp_path):
    import json
    import os

    from jaxspec.evaluation.conformance.cases import find_cases
    from jaxspec.evaluation.conformance.main import FAILED, run_case

    good = {"kind": "1.layer_ids", "checks": {"x": {"mode": "exact"}}}
    faults = [
        {"checks": {"x": {"mode": ["exact"]}}},
        {"checks": {"x": {"mode": "close", "rtol": "a", "atol": 0}}},
        {"checks": {"x": {"mode": "close", "rtol": float("nan"), "atol": 0}}},
        {"expected": [1]},
        {"expected": {"x": 5}},
        {"target_dir": 5},
    ]
    for index, fault in enumerate(faults):
        folder = tmp_path / "cases" / str(index)
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps(good | fault))
        outcome = run_case(folder, tmp_path, None)
        assert outcome.status == FAILED and outcome.reasons
    knot = tmp_path / "knot"
    knot.mkdir()
    for one in range(12):
        (knot / str(one)).mkdir()
    for one in range(12):
        for other in range(12):
            os.symlink(knot / str(other), knot / str(one) / f"to{other}")
    assert len(find_cases(tmp_path)) == len(faults)
