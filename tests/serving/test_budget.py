"""Cost tables, buckets, the lagged ring and the budget search, with the numbers of CONTRACTS.md §6."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.decoding.plan import Schedule
from jaxspec.errors import ConfigError
from jaxspec.serving.buckets import bucket_grid, filling_budget, round_rows, round_up, shared_rows, spread
from jaxspec.serving.budget import BudgetPlanner, search
from jaxspec.serving.confidence_ring import Carry, ConfidenceRelay
from jaxspec.serving.cost import (
    AdditiveTable,
    StepsTable,
    load_cost_table,
    parse_cost_table,
    save_cost_table,
    unmeasured,
)

pytestmark = pytest.mark.ci

STEPS = StepsTable((8, 16, 32, 64), (1000.0, 950.0, 500.0, 480.0), 64)
ADDITIVE = AdditiveTable(0.01, (1, 5), (0.0, 0.004), (2, 4, 8), (0.0, 0.002, 0.01))
FLAT = StepsTable((1,), (1.0,), 99)


def survival(rows: list[list[float]]) -> np.ndarray:
    return np.asarray(rows, np.float32)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_steps_table_is_a_floor_function_clamped_at_both_ends() -> None:
    asked = np.array([1, 7, 8, 31, 32, 63, 64, 10_000])
    np.testing.assert_array_equal(STEPS.steps_per_second(asked), [1000, 1000, 1000, 950, 500, 500, 480, 480])
    np.testing.assert_allclose(STEPS.step_seconds(3, asked), 1 / STEPS.steps_per_second(asked))


def test_additive_table_interpolates_and_clamps() -> None:
    rows = np.array([1, 2, 3, 4, 6, 8, 100])
    expected = 0.01 + 0.002 + np.array([0, 0, 0.001, 0.002, 0.006, 0.01, 0.01])
    np.testing.assert_allclose(ADDITIVE.step_seconds(3, rows), expected)
    np.testing.assert_allclose(ADDITIVE.step_seconds(99, rows), expected + 0.002)
    np.testing.assert_allclose(ADDITIVE.throughput(np.full(7, 2.0), 3, rows), 2 / expected)


def test_an_unmeasured_server_verifies_everything() -> None:
    table = unmeasured(4 * 5)
    assert (table.max_batch_tokens, table.steps_per_second(np.array(1))) == (20, 1.0)
    assert search(np.full((4, 4), 0.01), table, Schedule(4)).budget == 16


@pytest.mark.parametrize("table", [STEPS, ADDITIVE])
def test_a_table_survives_its_file(table, tmp_path: Path) -> None:
    save_cost_table(table, tmp_path / "table.json")
    assert load_cost_table(tmp_path / "table.json") == table
    assert ("bias_seconds" in (tmp_path / "table.json").read_text()) == isinstance(table, AdditiveTable)


@pytest.mark.parametrize(
    ("table", "change", "named"),
    [
        (STEPS, {"sample_batch_tokens": [8, 8, 32, 64]}, "sample_batch_tokens"),
        (STEPS, {"sample_batch_tokens": []}, "sample_batch_tokens"),
        (STEPS, {"sample_batch_tokens": [8, 16, 32, "64"]}, "sample_batch_tokens"),
        (STEPS, {"sample_steps_per_sec": [1.0, 1.0, 0.0, 1.0]}, "sample_steps_per_sec"),
        (STEPS, {"sample_steps_per_sec": [1.0, 1.0, 1.0]}, "sample_steps_per_sec"),
        (STEPS, {"max_batch_tokens": 63}, "max_batch_tokens"),
        (STEPS, {"more": 1}, "more"),
        (ADDITIVE, {"bias_seconds": 0.0}, "bias_seconds"),
        (ADDITIVE, {"theta_seconds": [0.0, -1.0, 1.0]}, "theta_seconds"),
        (ADDITIVE, {"alpha_seconds": [float("nan"), 1.0]}, "alpha_seconds"),
        (ADDITIVE, {"bs_probes": 3}, "bs_probes"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_field(table, change: dict, named: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(dataclasses.asdict(table) | change))
    with pytest.raises(ConfigError, match=named) as caught:
        load_cost_table(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", '"bias_seconds"'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            load_cost_table(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="absent"):
        load_cost_table(tmp_path / "absent.json")
    with pytest.raises(ConfigError):
        parse_cost_table({})


# -- budget search ----------------------------------------------------------------------------------------------------


def test_published_search() -> None:
    """Throughputs 200, 275.5, 333, 365.5, 384, 325, 280.5 of K = 0 … 6."""
    table = StepsTable((2, 3, 4, 5, 6, 7, 8), (100.0, 95.0, 90.0, 85.0, 80.0, 65.0, 55.0), 8)
    found = search(survival([[0.9, 0.6, 0.2], [0.8, 0.5, 0.1]]), table, Schedule(3))
    assert found.budget == 4
    assert found.tokens_per_second == pytest.approx(384)
    assert found.step_seconds == pytest.approx(1 / 80)


def test_flat_and_collapsing_costs() -> None:
    for least in (0, 1, 2, 4):
        assert search(survival([[0.9, 0.8, 0.7, 0.6]]), FLAT, Schedule(4, least)).budget == 4
    assert search(survival([[0.9, 0.8]] * 2), StepsTable((2, 3), (1.0, 0.1), 9), Schedule(2)).budget == 0


def test_the_search_looks_behind_a_dip_and_takes_the_first_of_equals() -> None:
    dip = StepsTable((1, 2, 3, 4), (1.0, 0.4, 0.4, 0.4), 4)
    assert search(survival([[1.0, 1.0, 1.0]]), dip, Schedule(3)).budget == 3
    equal = StepsTable((1, 2, 3), (1.0, 0.5, 0.25), 4)
    assert search(survival([[1.0, 1.0]]), equal, Schedule(2)).budget == 0


def test_what_the_search_leaves_out() -> None:
    assert search(survival([[0.9, 1e-7, 0.0]]), FLAT, Schedule(3)).budget == 1  # below eps
    assert search(survival([[0.9, 0.8, 0.7]]), FLAT, Schedule(3, max_rows=2)).budget == 2  # a window of max_rows slots


def test_prefill_rows_move_the_lookup() -> None:
    table = StepsTable((1, 6), (1.0, 0.1), 99)
    assert search(survival([[0.9, 0.9, 0.9]]), table, Schedule(3)).budget == 3
    assert search(survival([[0.9, 0.9, 0.9]]), table, Schedule(3), prefill_rows=3).budget == 1


def test_the_budget_never_exceeds_what_the_largest_bucket_has_room_for() -> None:
    rows = survival([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])
    assert [search(rows, FLAT, Schedule(3), most=most).budget for most in (0, 4, 9)] == [0, 4, 6]
    assert search(rows, FLAT, Schedule(3), most=4, pinned=np.array([True, False])).budget == 4
    known = (np.full((4, 2), 0.9, np.float32), np.ones(4, int))
    for options in ({}, {"forced_fraction": 1.0}):
        assert planner(**options).plan(known, np.array([0, 1]), np.ones(2, int), most=3).budget == 3


def test_pinned_requests_are_in_every_budget() -> None:
    expensive = StepsTable((1, 6), (1.0, 1e-6), 99)
    rows = survival([[0.9, 0.8, 0.7], [1e-9, 0.0, 0.0]])
    assert search(rows, expensive, Schedule(3), pinned=np.array([False, True])).budget == 3
    assert search(rows, FLAT, Schedule(3), pinned=np.array([False, True])).budget == 6


# -- history ----------------------------------------------------------------------------------------------------------


def test_the_relay_hands_out_values_two_rounds_old() -> None:
    reads: list[float] = []

    def read(array: jax.Array) -> np.ndarray:
        reads.append(float(array[0, 0]))
        return np.asarray(array)

    relay = ConfidenceRelay(read)
    for step in range(5):
        known = relay.resolve()
        if step < 2:
            assert known is None
        else:
            np.testing.assert_array_equal(known[0], np.full((2, 3), step - 2))
            np.testing.assert_array_equal(known[1], [step - 2, 9])
        generations = np.array([step, 9])
        relay.publish(jax.numpy.full((2, 3), float(step)), generations)
        generations[:] = -1  # the caller's array moves on
    assert reads == [0.0, 1.0, 2.0]


def test_the_carry_delays_further_and_starts_with_nobodys_values() -> None:
    carry = Carry(2, 3, 1)
    slots = np.array([0, 2])
    seen = [carry.exchange(slots, np.full((2, 1), step + 0.5), np.array([step + 1, 7])) for step in range(4)]
    assert [tuple(found[1]) for found in seen] == [(0, 0), (0, 0), (1, 7), (2, 7)]
    assert [found[0][0, 0] for found in seen[2:]] == [0.5, 1.5]


def planner(**options) -> BudgetPlanner:
    return BudgetPlanner(FLAT, Schedule(2), 4, **options)


def test_without_history_the_layout_is_full_and_new_owners_are_optimistic() -> None:
    slots, current = np.array([1, 3]), np.array([5, 2])
    assert planner().plan(None, slots, current) is None
    low = np.full((4, 2), 1e-9, np.float32)
    known = (low, np.array([0, 5, 0, 2]))
    assert planner().plan(known, slots, current).budget == 0
    assert planner().plan(known, slots, np.array([5, 3])).budget == 2  # slot 3 has a new owner: survival one
    assert planner().plan((low, np.zeros(4, int)), slots, np.zeros(2, int)).budget == 4  # generation 0 is nobody
    assert planner(mode="static").plan(known, slots, current) is None
    assert planner(mode="cap").plan(known, slots, current).budget == 0


def test_forced_fraction_pins_the_budget() -> None:
    known = (np.full((4, 2), 0.5, np.float32), np.ones(4, int))
    for fraction, budget in ((0.0, 0), (0.3, 1), (0.5, 2), (1.0, 4)):
        found = planner(forced_fraction=fraction).plan(known, np.array([0, 1]), np.ones(2, int))
        assert (found.budget, found.step_seconds) == (budget, None)
    with pytest.raises(ConfigError, match="forced_fraction"):
        planner(forced_fraction=1.5)


def test_align_fills_the_bucket_that_is_paid_for() -> None:
    known = (np.array([[0.9, 1e-9], [1e-9, 0.5], [0, 0], [0, 0]], np.float32), np.ones(4, int))
    slots, current = np.array([0, 1]), np.ones(2, int)
    assert planner().plan(known, slots, current).budget == 1
    aligned = planner(align=True, grid=(4, 8))
    assert aligned.plan(known, slots, current).budget == 2  # 2 + 1 rows run in the bucket of 4
    assert aligned.plan(known, slots, current, prefill_rows=3).budget == 3  # 2 + 1 + 3 rows in the bucket of 8
    assert aligned.plan(known, slots, current, prefill_rows=30).budget == 1  # no bucket: as it was
    for wrong in ({"align": True}, {"align": True, "grid": (4,), "mode": "cap"}):
        with pytest.raises(ConfigError, match="align"):
            planner(**wrong)


# -- buckets ----------------------------------------------------------------------------------------------------------


def test_bucket_arithmetic_of_the_contract() -> None:
    assert bucket_grid([1, 2, 4, 8], 16) == (16, 32, 64, 128)
    assert bucket_grid([1, 2, 4, 8], 16, [12, 8, 4, 16]) == (4, 8, 12, 16, 32, 64, 128)
    for wrong in (0, 129, 4.0, True):
        with pytest.raises(ConfigError, match="buckets"):
            bucket_grid([8], 16, [wrong])
    assert filling_budget(60, 10, 6, 2) == 40
    assert filling_budget(3, 10, 6, 2) == 0
    assert round_rows(100, 150 - 100, 8) == 150
    assert round_rows(10, 150 - 10, 8) == 80
    assert round_rows(100, None, 8) == 800
    assert round_rows(8, 10, 8) == 18
    assert spread(42, 8, 8) == [6, 6, 5, 5, 5, 5, 5, 5]
    for wrong in ((7, 8, 8), (65, 8, 8)):
        with pytest.raises(ValueError, match="rows"):
            spread(*wrong)


def test_rounding_up_and_shards() -> None:
    grid = (4, 8, 16)
    assert [round_up(rows, grid) for rows in (0, 4, 5, 16, 17)] == [4, 4, 8, 16, None]
    assert shared_rows([3, 0, 9], grid) == 16
    assert shared_rows([3, None, 9], grid) is None
    assert shared_rows([17, 0], grid) is None
