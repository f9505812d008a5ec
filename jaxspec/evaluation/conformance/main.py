"""The command: runs every case below a folder, prints a line a case and the counts, can write what was computed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxspec.errors import DataError, JaxspecError
from jaxspec.evaluation.conformance.cases import EXPECTED_FILE, Case, Tensors, case_name, find_cases, read_case
from jaxspec.evaluation.conformance.compare import Difference, compare_case
from jaxspec.evaluation.conformance.kinds import KINDS, run_kind

ACTUAL_FILE = "actual.safetensors"
PASSED, FAILED, DUMPED = "pass", "fail", "dumped"
SHOWN = 3  # reasons on a case's line; --json has them all


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one case came to. `worst` is the compared tensor that came closest to (or furthest past) its tolerance."""

    name: str
    kind: str
    status: str
    compared: int = 0
    excused: int = 0
    worst: Difference | None = None
    reasons: tuple[str, ...] = ()

    def line(self) -> str:
        """Name, worst error, tolerance, pass or fail, and what else there is to say."""
        error, tolerance, where = "-", "-", ""
        if self.worst is not None:
            error, tolerance, where = (
                f"{self.worst.error:.3g}",
                f"{self.worst.tolerance:.3g}",
                f" ({self.worst.tensor})",
            )
        line = f"{self.name}: error {error}{where}, tolerance {tolerance}, {self.status}"
        if self.excused:
            line += f", {self.excused} rows excused"
        if self.reasons:
            more = f" (and {len(self.reasons) - SHOWN} more)" if len(self.reasons) > SHOWN else ""
            line += ": " + "; ".join(self.reasons[:SHOWN]) + more
        return line

    def record(self) -> dict[str, Any]:
        """The same as plain data."""
        worst = (
            None
            if self.worst is None
            else {"tensor": self.worst.tensor, "error": _plain(self.worst.error), "tolerance": self.worst.tolerance}
        )
        return {**dataclasses.asdict(self), "worst": worst, "reasons": list(self.reasons)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="folder that is searched for case.json files, links followed")
    parser.add_argument("--dump", metavar="OUT", help=f"write the computed tensors as OUT/<case>/{ACTUAL_FILE}")
    parser.add_argument("--only", metavar="PATTERN", help="run only the cases whose name holds or matches this pattern")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def main(args: argparse.Namespace) -> int:
    """Runs the cases. 0 when all passed (or were dumped), 1 when one failed or none was found."""
    root = Path(args.directory)
    try:
        folders = [folder for folder in find_cases(root) if selected(case_name(folder, root), args.only)]
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcomes = []
    for folder in folders:
        outcomes.append(run_case(folder, root, Path(args.dump) if args.dump else None))
        if not args.json:
            print(outcomes[-1].line(), flush=True)
    count = {status: sum(outcome.status == status for outcome in outcomes) for status in (PASSED, FAILED, DUMPED)}
    if args.json:
        totals = {"passed": count[PASSED], "failed": count[FAILED], "dumped": count[DUMPED]}
        print(json.dumps({"cases": [outcome.record() for outcome in outcomes], **totals}, indent=1))
    else:
        if not outcomes:
            print(f"no case was found under {root}" + (f" with a name like {args.only}" if args.only else ""))
        if count[DUMPED]:
            print(f"{count[DUMPED]} dumped without {EXPECTED_FILE}: nothing to compare")
        print(f"{count[PASSED]} passed, {count[FAILED]} failed")
    return 1 if count[FAILED] or not outcomes else 0


def selected(name: str, pattern: str | None) -> bool:
    """Whether --only lets a case through: a shell pattern, or a part of the name."""
    return pattern is None or pattern in name or fnmatch.fnmatchcase(name, pattern)


def run_case(folder: Path, root: Path, dump: Path | None) -> Outcome:
    """Reads, computes, dumps and compares one case. Whatever goes wrong in it fails this case and no other."""
    name = case_name(folder, root)
    try:
        case = read_case(folder, root)
    except DataError as error:
        return Outcome(name, "", FAILED, reasons=(str(error),))
    except Exception as error:  # a case.json of any other shape: this case's failure
        return Outcome(name, "", FAILED, reasons=(f"case.json: {type(error).__name__}: {error}",))
    if case.kind not in KINDS:
        return Outcome(name, case.kind, FAILED, reasons=(f"kind {case.kind!r} is not known to this version",))
    try:
        with jax.default_matmul_precision("highest"), _warnings_of(name):
            actual = {key: np.asarray(value) for key, value in run_kind(case).items()}
        if dump is not None:
            write_actual(case, actual, dump)
        return judge(case, actual, dumping=dump is not None)
    except JaxspecError as error:
        return Outcome(name, case.kind, FAILED, reasons=(str(error),))
    except Exception as error:  # a defect of the code under test is this case's failure, reported with its type
        return Outcome(name, case.kind, FAILED, reasons=(f"{type(error).__name__}: {error}",))


@contextlib.contextmanager
def _warnings_of(name: str) -> Iterator[None]:
    """What jaxspec warns of while a case runs goes to the standard error under the case's name."""
    logger, handler = logging.getLogger("jaxspec"), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{name.replace('%', '%%')}: %(message)s"))
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def judge(case: Case, actual: Tensors, dumping: bool) -> Outcome:
    """Compares with the expected tensors, or settles what a case without them comes to."""
    needed = [name for name, check in case.checks.items() if check.mode != "diagnostic"]
    if case.expected is None:
        missing = [f"{name}: not computed" for name in needed if name not in actual]
        if not dumping:
            missing.append(
                f"{EXPECTED_FILE} is missing, there is nothing to compare with (--dump writes what is computed)"
            )
        return Outcome(case.name, case.kind, FAILED if missing else DUMPED, reasons=tuple(missing))
    found = compare_case(case, actual, case.expected)
    reasons = tuple(one.failure for one in found if one.failure is not None)
    return Outcome(
        case.name,
        case.kind,
        FAILED if reasons or not found else PASSED,
        compared=len(found),
        excused=max((one.excused for one in found), default=0),
        worst=max(found, key=lambda one: one.severity, default=None),
        reasons=reasons if found else ("every check is diagnostic, nothing was compared",),
    )


def write_actual(case: Case, actual: Tensors, dump: Path) -> None:
    """Writes the computed tensors that `checks` names, in the dtype that the case declares where the kind agrees."""
    tensors = {name: declared(actual[name], case.dtypes.get(name)) for name in case.checks if name in actual}
    folder = dump / case.name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ACTUAL_FILE, metadata={"case": case.name, "kind": case.kind})


def declared(tensor: np.ndarray, dtype: str | None) -> np.ndarray:
    """The tensor in the declared dtype (int32 as int64, say); unchanged where floats would become integers or back."""
    kinds = {"i": "i", "u": "i", "f": "f", "b": "b"}
    if dtype is None or kinds.get(np.dtype(dtype).kind) != kinds.get(tensor.dtype.kind):
        return np.ascontiguousarray(tensor)
    return np.ascontiguousarray(tensor.astype(dtype))


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)
