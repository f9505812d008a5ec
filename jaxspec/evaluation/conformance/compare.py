"""Comparison of a computed tensor with the expected one, in the modes that case.json knows."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxspec.evaluation.conformance.cases import Case, Check, Tensors

KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float"}  # V: bfloat16 of ml_dtypes


@dataclasses.dataclass(frozen=True)
class Difference:
    """One compared tensor: its worst error, the tolerance at that element, the rows excused, why it failed (or None).

    For `exact` the error is the number of elements that differ and the tolerance is 0.
    """

    tensor: str
    error: float
    tolerance: float
    excused: int = 0
    failure: str | None = None

    @property
    def severity(self) -> float:
        """Error in units of the tolerance; what ranks the tensors of a case."""
        if self.failure is not None and not np.isfinite(self.error):
            return float("inf")
        return self.error / self.tolerance if self.tolerance > 0 else (float("inf") if self.error > 0 else 0.0)


def compare_case(case: Case, actual: Tensors, expected: Tensors) -> list[Difference]:
    """One Difference for every check that is not `diagnostic`, in the order of case.json."""
    return [
        compare_tensor(name, check, actual.get(name), expected)
        for name, check in case.checks.items()
        if check.mode != "diagnostic"
    ]


def compare_tensor(name: str, check: Check, actual: np.ndarray | None, expected: Tensors) -> Difference:
    """Applies one check. A tensor that was not computed, or has no expected value, is a failure, never a pass."""
    failed = lambda why: Difference(name, float("inf"), 0.0, failure=f"{name}: {why}")  # noqa: E731
    if actual is None:
        return failed("not computed")
    if name not in expected:
        return failed("missing in expected.safetensors")
    wanted = expected[name]
    if actual.shape != wanted.shape:
        return failed(f"shape {list(actual.shape)}, expected {list(wanted.shape)}")
    found_kind, wanted_kind = KINDS.get(actual.dtype.kind), KINDS.get(wanted.dtype.kind)
    if found_kind != wanted_kind or found_kind is None:
        return failed(f"dtype {actual.dtype}, expected {wanted.dtype}")
    excused = 0
    if check.margin is not None:
        kept, why = rows_kept(check, expected, wanted)
        if why is not None:
            return failed(why)
        excused = int(np.sum(~kept))
        actual, wanted = actual[kept], wanted[kept]
        if excused and not kept.any():
            return failed(f"every row is excused by {check.margin}, nothing was compared")
    if found_kind == "float":
        actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
        for which, tensor in (("computed", actual), ("expected", wanted)):
            if np.isnan(tensor).any():
                return failed(f"{int(np.isnan(tensor).sum())} NaN in the {which} tensor")
    return _measure(name, check, actual, wanted, excused)


def rows_kept(check: Check, expected: Tensors, wanted: np.ndarray) -> tuple[np.ndarray, str | None]:
    """Which rows (first axis) take part: those whose smallest margin is above the limit. Or why that cannot be said."""
    nothing = np.ones((0,), bool)
    if check.margin not in expected:
        return nothing, f"its margin {check.margin} is missing in expected.safetensors"
    margin = expected[check.margin]
    if margin.ndim == 0 or wanted.ndim == 0 or margin.shape[0] != wanted.shape[0]:
        return (
            nothing,
            f"its margin {check.margin} is {list(margin.shape)}, the tensor {list(wanted.shape)}: no common rows",
        )
    if np.isnan(margin).any():
        return nothing, f"its margin {check.margin} holds NaN"
    return margin.reshape(margin.shape[0], -1).min(axis=1, initial=np.inf) > check.above, None


def _measure(name: str, check: Check, actual: np.ndarray, wanted: np.ndarray, excused: int) -> Difference:
    if check.mode == "exact" or actual.dtype.kind != "f":
        different = int(np.sum(actual != wanted))
        if check.mode == "exact" or different == 0:
            why = f"{name}: {different} of {actual.size} values differ" if different else None
            return Difference(name, float(different), 0.0, excused, why)
        actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
    same = actual == wanted  # equal infinities have no finite difference
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(actual - wanted))
    if not np.isfinite(error).all():
        return Difference(name, float("inf"), 0.0, excused, f"{name}: an infinity in one tensor only")
    allowed = check.atol + check.rtol * np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    if check.mode == "scaled":
        finite = np.abs(wanted[np.isfinite(wanted)])
        allowed = np.full(wanted.shape, check.relative_to_max * (finite.max() if finite.size else 0.0) + check.atol)
    if error.size == 0:
        return Difference(name, 0.0, check.atol, excused)
    excess = np.where(error > 0, error, 0.0) / np.where(allowed > 0, allowed, 1e-300)
    worst = np.unravel_index(int(np.argmax(excess)), error.shape)
    found = Difference(name, float(error[worst]), float(allowed[worst]), excused)
    if np.all(error <= allowed):
        return found
    where = f" at {[int(i) for i in worst]}" if error.ndim else ""
    why = f"{name}: {actual[worst]:.7g}{where}, expected {wanted[worst]:.7g} within {found.tolerance:.3g}"
    return dataclasses.replace(found, failure=why)
