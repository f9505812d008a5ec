"""Compiled sizes: which bucket a round takes, and what fits into it (CONTRACTS.md §6.6).

Verify lengths count the anchor; a budget K counts extra rows, over the batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from jaxspec.errors import ConfigError, InvariantError, problem


def bucket_grid(batch_sizes: Iterable[int], rows_each: int, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """Row buckets: one for each captured number of requests at `rows_each` (m + 1) rows, and the extra ones.

    Raises ConfigError for an extra bucket that is no integer from 1 to the largest.
    """
    full = {size * rows_each for size in batch_sizes}
    for size in extra:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= max(full):
            raise ConfigError(problem("engine.buckets", size, f"integers from 1 to {max(full)}"))
        full.add(size)
    return tuple(sorted(full))


def round_up(rows: int, grid: Sequence[int]) -> int | None:
    """The smallest bucket that holds `rows`; None beyond the grid."""
    index = bisect.bisect_left(grid, rows)
    return grid[index] if index < len(grid) else None


def bucket_for(rows: int, grid: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`. Raises InvariantError beyond the grid."""
    found = round_up(rows, grid)
    if found is None:
        raise InvariantError(problem("rows", rows, f"at most {max(grid)}, the largest bucket"))
    return found


def round_rows(requests: int, budget: int | None, rows_each: int, min_length: int = 1) -> int:
    """Rows that a round may need: every request's least, and the budget on top; all of them without a budget."""
    full = requests * rows_each
    return full if budget is None else min(requests * max(min_length, 1) + budget, full)


def filling_budget(bucket: int, requests: int, rows_each: int, min_length: int = 1) -> int:
    """The budget that fills a bucket (its rows are paid for), at most every proposal."""
    return max(min(bucket, requests * rows_each) - requests * max(min_length, 1), 0)


def shared_rows(needed: Sequence[int | None], grid: Sequence[int]) -> int | None:
    """The bucket that all data-parallel shards run: the largest any needs. None (the full layout) if one shard has no
    budget. An idle shard needs 0.
    """
    known = [rows for rows in needed if rows is not None]
    return round_up(max(known), grid) if len(known) == len(needed) else None


def spread(rows: int, requests: int, most: int) -> list[int]:
    """Verify lengths that fill a bucket evenly, the first ones one longer: what a bucket is profiled with.

    Raises ValueError where they cannot: fewer rows than requests, or more than `most` each.
    """
    if not requests <= rows <= requests * most:
        raise ValueError(f"rows: found {rows}, expected {requests} to {requests * most} for {requests} requests")
    base, longer = divmod(rows, requests)
    return [base + (index < longer) for index in range(requests)]


def slot_grid(num_slots: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Slot buckets: powers of four up to all slots, or what is asked for and all slots. Raises ConfigError for a size
    that is not from 1 to all of them."""
    wanted = asked or [4**power for power in range(num_slots.bit_length()) if 4**power < num_slots]
    for size in wanted:
        if not 1 <= size <= num_slots:
            raise ConfigError(problem("engine.slot_buckets", size, f"sizes from 1 to num_slots = {num_slots}"))
    return tuple(sorted({*wanted, num_slots}))
