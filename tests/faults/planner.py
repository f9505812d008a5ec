"""Faults of the planner: tables, history, budget, allocation and calibration."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_PLAN, _LAW = "tests/decoding/test_plan.py", "tests/decoding/test_planner_law.py"
_BUDGET, _FIT = "tests/serving/test_budget.py", "tests/evaluation/test_calibration.py"
_DEVICE, _SEARCH = "jaxspec/decoding/plan.py", "jaxspec/serving/budget.py"
PLANNER = [
    Mutant(
        "planner-parallel-product",
        _DEVICE,
        "return jnp.stack(columns, axis=-1)",
        'return __import__("jax").lax.associative_scan(jnp.multiply, confidence.astype(jnp.float32), axis=-1)',
        (f"{_PLAN}::test_a_survival_never_exceeds_the_one_before_it",),
        "a prefix product in parallel is not monotone in float32: slot k would admit itself (B12)",
    ),
    Mutant(
        "planner-ties-by-request",
        _DEVICE,
        "jnp.where(candidate, survival, -1.0).T.reshape(-1)",
        "jnp.where(candidate, survival, -1.0).reshape(-1)",
        (f"{_PLAN}::test_published_examples",),
        "among equals the lower position goes first",
    ),
    Mutant(
        "planner-minimum-not-added",
        _DEVICE,
        "jnp.clip(schedule.min_rows + extra,",
        "jnp.clip(1 + extra,",
        (f"{_PLAN}::test_allocation_equals_a_plain_sort",),
        "a granted row comes on top of the least length",
    ),
    Mutant(
        "planner-dead-rows-take-budget",
        _DEVICE,
        "(live & ~pinned)[:, None]",
        "(~pinned)[:, None]",
        (f"{_PLAN}::test_dead_rows_take_nothing_whatever_they_hold",),
        "a padding slot must not use up the budget",
    ),
    Mutant(
        "planner-room-forgotten",
        _DEVICE,
        "& (slot < room[:, None]) ",
        "",
        (f"{_PLAN}::test_room_before_the_end_of_the_context_bounds_every_row",),
        "rows without room would take budget from those that have it",
    ),
    Mutant(
        "planner-pinned-not-reserved",
        _DEVICE,
        "jnp.maximum(budget - jnp.sum(jnp.where(pinned, room, 0)), 0)",
        "budget",
        (f"{_PLAN}::test_pinned_requests_are_verified_in_full_whatever_the_neighbours_want",),
        "rows of seeded requests come out of the budget first",
    ),
    Mutant(
        "planner-early-stop",
        _SEARCH,
        "best = int(np.argmax(throughput))",
        "best = int(np.argmax(np.append(np.diff(throughput) <= 0, True)))",
        (f"{_BUDGET}::test_the_search_looks_behind_a_dip_and_takes_the_first_of_equals",),
        "costs are a staircase: the best budget may lie behind a dip",
    ),
    Mutant(
        "planner-eps-ignored",
        _SEARCH,
        "free[free >= schedule.survival_eps]",
        "free",
        (f"{_BUDGET}::test_what_the_search_leaves_out",),
        "a slot that never survives is not worth a row",
    ),
    Mutant(
        "planner-prefill-rows-ignored",
        _SEARCH,
        "rows = requests + drafts + prefill_rows",
        "rows = requests + drafts",
        (f"{_BUDGET}::test_prefill_rows_move_the_lookup",),
        "the forward carries the prefill rows too",
    ),
    Mutant(
        "planner-lag-of-one",
        "jaxspec/serving/confidence_ring.py",
        "self._rounds[0]",
        "self._rounds[-1]",
        (_LAW, f"{_BUDGET}::test_the_relay_hands_out_values_two_rounds_old"),
        "a budget may read confidences that are two rounds old, no newer ones",
    ),
    Mutant(
        "planner-stale-owner",
        "jaxspec/serving/confidence_ring.py",
        "(current >= 1) & (generations == current)",
        "current >= 1",
        (f"{_BUDGET}::test_without_history_the_layout_is_full_and_new_owners_are_optimistic",),
        "a slot's earlier owner says nothing about the new one",
    ),
    Mutant(
        "planner-table-between-probes",
        "jaxspec/serving/cost.py",
        'side="right") - 1',
        'side="left")',
        (f"{_BUDGET}::test_steps_table_is_a_floor_function_clamped_at_both_ends",),
        "the lookup is a floor",
    ),
    Mutant(
        "planner-bucket-holds-exactly",
        "jaxspec/serving/buckets.py",
        "bisect.bisect_left(grid, rows)",
        "bisect.bisect_right(grid, rows)",
        (f"{_BUDGET}::test_rounding_up_and_shards",),
        "a total that equals a bucket runs in it",
    ),
    Mutant(
        "planner-conditional-calibration",
        "jaxspec/evaluation/calibration.py",
        "candidates = [fitted * _sigmoid(",
        "candidates = [_sigmoid(",
        (f"{_FIT}::test_an_overconfident_head_is_brought_back",),
        "what is calibrated is the survival of the whole prefix",
    ),
    Mutant(
        "planner-temperatures-unused",
        "jaxspec/drafters/dspark.py",
        "return markov.calibrate(logits, temperatures)",
        "return markov.calibrate(logits)",
        (f"{_FIT}::test_a_drafter_divides_its_logits_by_its_slots_temperatures",),
        "a calibrated server reads calibrated confidences",
    ),
    Mutant(
        "planner-simulation-ignores-the-cut",
        "jaxspec/decoding/acceptance.py",
        "accepted = _prefix(u < rates, lengths)",
        "accepted = _prefix(u < rates, jnp.full_like(lengths, u.shape[1]))",
        (f"{_PLAN}::test_simulated_acceptance_has_the_asked_rates_and_obeys_the_cut",),
        "a simulated round accepts no row that was not verified",
    ),
]
