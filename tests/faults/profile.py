"""Faults of the cost profile: what is measured, fitted, kept beside the table, and counted under load."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TESTS, _LOAD = "tests/serving/test_profile.py", "tests/evaluation/test_load.py"
_FIT, _MEASURE, _ORIGIN = "cost_fit", "profiling", "cost_origin"


def _in(room: str) -> str:
    return f"jaxspec/serving/{room}.py"


PROFILE = [
    Mutant(
        "profile-fit-may-fall",
        _in(_FIT),
        "least = np.zeros(len(columns))",
        "least = np.full(len(columns), -np.inf)",
        (f"{_TESTS}::test_a_fitted_table_never_falls_however_noisy_the_rounds",),
        "noise would make a larger round cheaper than a smaller one",
    ),
    Mutant(
        "profile-plain-rounds-fitted",
        _in(_FIT),
        "drafted = [cell for cell in cells if cell.drafting]",
        "drafted = list(cells)",
        (f"{_TESTS}::test_the_fit_finds_an_additive_law_again",),
        "a plain round's cost says nothing about a budget",
    ),
    Mutant(
        "profile-steps-at-the-upper-edge",
        _in(_FIT),
        "(1, *(below + 1 for below in rows[:-1]))",
        "tuple(rows)",
        (f"{_TESTS}::test_a_bucket_of_steps_is_probed_at_its_lower_edge",),
        "a floor lookup would give a padded round the cost of the bucket below",
    ),
    Mutant(
        "profile-rounds-in-flight-mixed-up",
        _in(_MEASURE),
        "self._labels.popleft() if len(self._labels) > (engine.lag if dispatched else 0) else None",
        "engine.executables.newest if dispatched else None",
        (f"{_TESTS}::test_overlapped_rounds_are_told_apart",),
        "under overlap the seconds are those of the round before",
    ),
    Mutant(
        "profile-budget-left-pinned",
        _in(_MEASURE),
        "planner.forced_fraction, engine.drafting.switch = forced, switch",
        "engine.drafting.switch = switch",
        (f"{_TESTS}::test_every_bucket_is_measured_and_the_engine_is_left_as_it_was",),
        "the server would go on with the last probe's budget",
    ),
    Mutant(
        "profile-any-device-will-do",
        _in(_ORIGIN),
        "if made_for.get(name) != value:",
        'if name != "device" and made_for.get(name) != value:',
        (f"{_TESTS}::test_a_table_is_taken_where_it_was_measured_and_nowhere_else",),
        "another device's costs are wrong without a sign of it",
    ),
    Mutant(
        "profile-manifest-of-another-table",
        _in(_ORIGIN),
        "if digest != _digest(path):",
        "if False:",
        (f"{_TESTS}::test_a_manifest_of_another_table_is_refused",),
        "a manifest vouches for the table that it was written with",
    ),
    Mutant(
        "profile-search-between-buckets",
        "jaxspec/serving/budget.py",
        "if run is not None:",
        "if run is not None and False:",
        (f"{_TESTS}::test_the_search_asks_for_what_would_run",),
        "a round costs what its bucket costs",
    ),
    Mutant(
        "load-ramp-counted",
        "jaxspec/evaluation/load.py",
        "            if counting:\n                self.tokens += len(event.tokens)\n",
        "            if True:\n                self.tokens += len(event.tokens)\n",
        (f"{_LOAD}::test_a_closed_loop_counts_what_came_within_its_window",),
        "tokens of the start are not the window's",
    ),
    Mutant(
        "load-device-time-of-derived-lines",
        "jaxspec/evaluation/device_time.py",
        'if line.name.startswith("Stream") or line.name == "XLA Ops"',
        'if line.name != "Steps"',
        (f"{_LOAD}::test_busy_time_is_that_of_the_devices_streams",),
        "a line over whole modules covers the gaps between kernels",
    ),
    Mutant(
        "load-simulated-uncut",
        "jaxspec/evaluation/simulation.py",
        "np.minimum(accepted, lengths - 1).sum()",
        "accepted.sum()",
        (f"{_LOAD}::test_a_simulated_cut_costs_tokens",),
        "a simulated round accepts no row that was not verified",
    ),
]
