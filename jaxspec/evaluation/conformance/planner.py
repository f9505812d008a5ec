"""Kind 9: DSpark's serving planner, from confidences to verify lengths."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxspec.decoding.plan import Schedule, allocate, survival_of
from jaxspec.drafters.markov import calibrate
from jaxspec.evaluation.calibration import fit_temperatures, temperature_grid
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.serving.buckets import filling_budget, round_rows, round_up, spread
from jaxspec.serving.budget import BudgetPlanner, Decision, search
from jaxspec.serving.cost import CostTable, parse_cost_table


def planner(case: Case) -> Tensors:
    """Every part of the planner over the case's inputs."""
    return _budgets(case) | _sizes(case) | _steps(case) | _calibration(case)


def _tables(case: Case) -> list[CostTable]:
    tables = case.setting("tables")
    return [parse_cost_table({key: value for key, value in one.items() if key != "type"}) for one in tables]


def _schedule(case: Case, row: int) -> Schedule:
    least, most = (int(case.input(f"cfg_{name}_verify_len")[row]) for name in ("min", "max"))
    return Schedule(int(case.setting("gamma")), least, most, float(case.input("cfg_survival_eps")[row]))


def _budgets(case: Case) -> Tensors:
    """Budget searches over the survivals, and what the device makes of the budgets."""
    confidence, counts = case.input("confidence"), case.input("num_requests").astype(int)
    survival = np.asarray(jax.jit(survival_of)(confidence))
    tables, spread_out = _tables(case), jax.jit(allocate, static_argnames="schedule")
    decisions: list[Decision] = []
    given: list[np.ndarray] = []
    own: list[np.ndarray] = []
    for row, count in enumerate(counts):
        schedule = _schedule(case, row)
        table = tables[int(case.input("budget_table_index")[row])]
        decisions.append(search(survival[row, :count], table, schedule))
        live = np.arange(confidence.shape[1]) < count
        for budget, out in ((case.input("topk_budget")[row], given), (decisions[-1].budget, own)):
            lengths = spread_out(confidence[row], np.int32(budget), schedule=schedule, live=live)
            out.append(np.where(live, lengths, -1).astype(np.int32))
    return {
        "survival": survival,
        "budget": np.array([one.budget for one in decisions], np.int64),
        "predicted_theta": np.array([one.tokens_per_second for one in decisions], np.float64),
        "predicted_step_seconds": np.array([one.step_seconds for one in decisions], np.float64),
        "verify_lens": np.stack(given),
        "verify_lens_after_budget": np.stack(own),
    }


def _sizes(case: Case) -> Tensors:
    """Bucket arithmetic. The reference's local tier of a rank is not rounded up; the grid does that after the ranks'
    maximum.
    """
    lengths = [spread(*map(int, args)) for args in case.input("capture_args")]
    widest = max(map(len, lengths))
    grid = [int(bucket) for bucket in case.input("grid")]
    tiers = case.input("tier_args").tolist()
    return {
        "capture_verify_lens": np.array([one + [0] * (widest - len(one)) for one in lengths], np.int64),
        "local_tier": np.array([round_rows(bs, budget, rows, least) for bs, budget, rows, least, _ in tiers]),
        "tier_fill_budget": np.array([filling_budget(tier, bs, rows, least) for bs, _, rows, least, tier in tiers]),
        "grid_rounded": np.array([round_up(int(total), grid) for total in case.input("grid_totals")], np.int64),
    }


def _steps(case: Case) -> Tensors:
    """The host planner step by step, once for each pair of lags."""
    confidence, rows = case.input("host_confidence"), case.input("host_rows")
    slots, table = int(rows.max()) + 1, _tables(case)[0]
    found: dict[str, Any] = {}
    for index, (lag, relayed) in enumerate(case.setting("host_lags")):
        host = BudgetPlanner(table, Schedule(confidence.shape[-1]), slots, lag_steps=lag, relayed=relayed)
        budgets = []
        for step, here in enumerate(rows):
            # the relay hands over whole pools; slots that are not asked for hold nothing that anybody may read
            known = np.full((slots, confidence.shape[-1]), np.nan, np.float32), np.zeros(slots, np.int64)
            known[0][here], known[1][here] = confidence[step], case.input("host_generation")[step]
            decision = host.plan(known, here, case.input("host_current_generation")[step])
            assert decision is not None
            budgets.append(decision.budget)
        found[f"host_budgets_{index}"] = np.array(budgets, np.int64)
    return found


def _calibration(case: Case) -> Tensors:
    """Fitted temperatures, and raw logits calibrated with them."""
    bins = int(case.setting("sts_bins"))
    fitted = fit_temperatures(case.input("sts_logits"), case.input("sts_prefix_mask"), bins=bins)
    temperatures = np.array(fitted.temperatures)
    return {
        "sts_grid": temperature_grid(),
        "sts_temperatures": temperatures,
        "sts_ece_before": np.array(fitted.ece_before),
        "sts_ece_after": np.array(fitted.ece_after),
        "sts_applied": jax.jit(calibrate)(case.input("sts_apply_raw"), temperatures.astype(np.float32)),
    }


KINDS = {"9.dspark_serving_planner": planner}
