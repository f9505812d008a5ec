"""Pages and the prefix cache: reference counts, what a hit holds, and random walks against a naive model."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import ConfigError, InvariantError
from jaxspec.serving.pages import TRASH, PageAllocator, PageLease, rows_in_flight
from jaxspec.serving.prefix import PrefixCache

pytestmark = pytest.mark.ci

SIZE = 4
LIMIT = 64


def never(count: int) -> int:
    return 0


def fill(cache: PrefixCache, allocator: PageAllocator, tokens: list[int], **options) -> list[int]:
    """A request that prefills `tokens` and ends; returns its pages."""
    lease = cache.open(tokens, options.get("namespace"))
    assert lease.reserve(allocator, len(tokens) - lease.committed, LIMIT, cache.evict)
    lease.commit(len(tokens) - lease.committed)
    pages = list(lease.pages)
    cache.close(tokens, lease, **options)
    return pages


def world(pages: int = 20, **options) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(pages, SIZE)
    return allocator, PrefixCache(allocator, **options)


# -- allocator and leases ---------------------------------------------------------------------------------------------


def test_the_trash_page_is_never_handed_out_and_counts_are_exact() -> None:
    allocator = PageAllocator(5, SIZE)
    pages = allocator.take(4)
    assert sorted(pages) == [1, 2, 3, 4] and TRASH not in pages and allocator.free == 0
    assert allocator.take(1) is None and allocator.take(0) == []
    allocator.hold(2)
    allocator.release(2)
    assert (allocator.references(2), allocator.free) == (1, 0)
    allocator.release(2)
    assert (allocator.references(2), allocator.free) == (0, 1)
    for wrong in (2, TRASH):
        with pytest.raises(InvariantError, match=f"page {wrong}"):
            allocator.release(wrong)
        with pytest.raises(InvariantError, match=f"page {wrong}"):
            allocator.hold(wrong)
    with pytest.raises(ConfigError, match="cache pages"):
        PageAllocator(1, SIZE)


def test_committed_and_allocated_rows_are_kept_apart() -> None:
    allocator, lease = PageAllocator(9, SIZE), PageLease(SIZE, [])
    assert lease.reserve(allocator, 5, LIMIT, never)
    assert (lease.committed, lease.allocated, allocator.free) == (0, 8, 6)
    lease.commit(5)
    assert lease.reserve(allocator, 3, LIMIT, never) and lease.allocated == 8
    assert lease.reserve(allocator, 4, LIMIT, never) and lease.allocated == 12
    with pytest.raises(InvariantError, match="committed rows"):
        lease.commit(8)
    with pytest.raises(InvariantError, match="committed rows"):
        lease.commit(-1)
    np.testing.assert_array_equal(lease.table_row(5), [*lease.pages, TRASH, TRASH])
    lease.release(allocator)
    assert (allocator.free, lease.allocated, lease.committed) == (8, 0, 0)


def test_B21_no_page_is_reserved_at_or_past_the_context_limit() -> None:
    allocator, lease = PageAllocator(9, SIZE), PageLease(SIZE, [])
    assert lease.reserve(allocator, 100, 10, never)
    assert len(lease.pages) == 3  # rows 0 … 9
    lease.commit(10)
    assert lease.reserve(allocator, 100, 10, never) and len(lease.pages) == 3


def test_a_reservation_that_fails_takes_nothing() -> None:
    allocator, lease = PageAllocator(4, SIZE), PageLease(SIZE, [])
    assert not lease.reserve(allocator, 13, LIMIT, never)
    assert (allocator.free, lease.pages) == (3, [])


def test_rounds_in_flight_of_the_overlapped_loop() -> None:
    assert rows_in_flight(0, 8) == 8  # no overlap: the round that is dispatched
    assert rows_in_flight(1, 8) == 16
    assert rows_in_flight(2, 61) == 183


# -- prefix cache -----------------------------------------------------------------------------------------------------


def test_B27_a_hit_ends_before_the_last_token_and_at_a_pages_edge() -> None:
    allocator, cache = world()
    tokens = list(range(12))
    pages = fill(cache, allocator, tokens)
    assert cache.size == 3
    for prompt, hit in (
        (tokens, 2),  # all is known: the last page is computed anew, for the logits of its last row
        ([*tokens, 99], 3),  # the hit ends exactly at the page's edge
        (tokens[:11], 2),
        (tokens[:4], 0),
        (tokens[:5], 1),
        ([*tokens[:8], 77, 78, 79, 80, 81], 2),
        ([5, *tokens], 0),
        ([1], 0),
    ):
        lease = cache.open(prompt)
        assert (lease.pages, lease.shared, lease.committed) == (pages[:hit], hit, hit * SIZE), prompt
        lease.release(allocator)


def test_B27_shared_pages_are_never_where_the_second_request_writes() -> None:
    allocator, cache = world()
    fill(cache, allocator, list(range(12)))
    lease = cache.open([*range(12), 50])
    assert lease.reserve(allocator, rows_in_flight(1, 8), LIMIT, cache.evict)
    assert all(allocator.references(page) == 2 for page in lease.pages[: lease.shared])
    assert all(allocator.references(page) == 1 for page in lease.pages[lease.shared :])
    assert lease.committed == lease.shared * SIZE


def test_B27_a_drafter_that_reads_the_next_token_is_keyed_by_the_pair() -> None:
    """Row 3 of a page depends on token 4 for EAGLE: the same page before another token is another page."""
    allocator, cache = world(lookahead=1)
    fill(cache, allocator, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.open([0, 1, 2, 3, 4, 9, 9]).shared == 1
    assert cache.open([0, 1, 2, 3, 9, 9, 9]).shared == 0
    assert cache.open([0, 1, 2, 3, 4, 5, 6, 7, 8]).shared == 2
    fill(cache, allocator, [20, 21, 22, 23])  # what follows the page is unknown, so it cannot be offered
    assert cache.size == 2


def test_B27_a_sliding_layer_prefills_its_last_window_again() -> None:
    allocator, cache = world(recomputed=6)
    fill(cache, allocator, list(range(12)))
    assert cache.open([*range(12), 50]).shared == 1  # rows 7 … 12 are computed
    assert cache.open([*range(12), 50, 51]).shared == 2
    assert cache.open([*range(12), *range(50, 56)]).shared == 3
    assert cache.open([0, 1, 2]).shared == 0


def test_B27_without_the_drafters_rows_there_is_no_hit_until_a_request_brings_them() -> None:
    allocator, cache = world()
    tokens = list(range(9))
    first = fill(cache, allocator, tokens)
    cache.forget_drafter()
    assert cache.open(tokens).shared == 0
    second = fill(cache, allocator, tokens)
    assert cache.size == 2 and second[:2] != first[:2]
    lease = cache.open(tokens)
    assert lease.pages == second[:2]
    lease.release(allocator)
    assert allocator.free == allocator.capacity - 2  # the first request's pages were given back
    fill(cache, allocator, list(range(30, 39)), drafted=False)
    assert cache.open(list(range(30, 39))).shared == 0


def test_namespaces_share_nothing() -> None:
    allocator, cache = world()
    fill(cache, allocator, list(range(9)), namespace="eagle")
    assert cache.open(list(range(9)), "none").shared == 0
    assert cache.open(list(range(9)), "eagle").shared == 2


def test_the_least_recently_used_leaf_goes_first_and_held_pages_stay() -> None:
    allocator, cache = world(7)
    old, young = list(range(9)), list(range(40, 49))
    fill(cache, allocator, old)
    fill(cache, allocator, young)
    lease = cache.open(old)  # used again, and held
    assert cache.evict(1) == 1
    assert (cache.open(young).shared, lease.shared) == (1, 2)
    assert cache.evict(10) == 0  # both leases hold what is left
    lease.release(allocator)
    assert cache.evict(10) == 2  # the leaf and then its parent
    assert cache.open(old).shared == 0


def test_reserving_evicts_what_nobody_holds() -> None:
    allocator, cache = world(6)
    fill(cache, allocator, list(range(16)))
    assert allocator.free == 1
    lease = cache.open(list(range(50, 60)))
    assert lease.reserve(allocator, 10, LIMIT, cache.evict)
    assert len(lease.pages) == 3 and cache.size == 2


def test_clear_gives_back_all_but_what_requests_hold() -> None:
    allocator, cache = world()
    fill(cache, allocator, list(range(12)))
    lease = cache.open([*range(12), 1])
    cache.clear()
    assert allocator.free == allocator.capacity - 3 and cache.size == 0
    lease.release(allocator)
    assert allocator.free == allocator.capacity


# -- random walks -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Live:
    tokens: list[int]
    lease: PageLease


class Model:
    """The naive side: what every row of every page was computed from, and who holds each page."""

    def __init__(self, lookahead: int, pages: int, recomputed: int = 1):
        self.allocator = PageAllocator(pages, SIZE)
        self.lookahead, self.recomputed = lookahead, recomputed
        self.cache = PrefixCache(self.allocator, lookahead=lookahead, recomputed=recomputed)
        self.written: dict[tuple[int, int], tuple[int, ...]] = {}
        self.live: list[Live] = []
        self.hits = self.failures = 0

    def row(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[: index + 1 + self.lookahead])

    def start(self, tokens: list[int]) -> None:
        lease = self.cache.open(tokens)
        assert lease.committed <= max(len(tokens) - self.recomputed, 0)
        for index in range(lease.committed):
            page = lease.pages[index // SIZE]
            assert self.written[page, index % SIZE] == self.row(tokens, index), "a hit that is not of this prompt"
        self.hits += lease.shared
        self.live.append(Live(list(tokens), lease))

    def grow(self, one: Live, extra: list[int], flight: int) -> None:
        """Prefills or decodes: every row but the newest token's is committed; scratch rows are written behind."""
        one.tokens += extra
        rows = len(one.tokens) - 1 - one.lease.committed
        if not one.lease.reserve(self.allocator, rows + flight, LIMIT, self.cache.evict):
            self.failures += 1
            self.stop(one)
            return
        start = one.lease.committed
        for index in range(start, min(start + rows + flight, LIMIT)):
            page = one.lease.pages[index // SIZE]
            assert self.allocator.references(page) == 1 and page != TRASH, "a write into a page that others hold"
            inside = index < start + rows
            self.written[page, index % SIZE] = self.row(one.tokens, index) if inside else ("scratch",)
        one.lease.commit(rows)
        self.cache.insert(one.tokens, one.lease)

    def stop(self, one: Live) -> None:
        self.live.remove(one)
        self.cache.close(one.tokens, one.lease)

    def check(self) -> None:
        held = collections.Counter(page for one in self.live for page in one.lease.pages)
        held.update(node.page for node in self.cache._nodes())
        counts = [self.allocator.references(page) for page in range(self.allocator.capacity + 1)]
        assert counts == [held[page] for page in range(self.allocator.capacity + 1)]
        assert self.allocator.free == counts.count(0) - 1  # the trash page is not free either
        assert self.cache.size == sum(1 for _ in self.cache._nodes())

    def drain(self) -> None:
        for one in list(self.live):
            self.stop(one)
        self.cache.clear()
        assert self.allocator.free == self.allocator.capacity


@pytest.mark.parametrize(("lookahead", "recomputed"), [(0, 1), (1, 1), (0, 7)])
def test_a_random_walk_agrees_with_the_naive_model(lookahead: int, recomputed: int) -> None:
    rng = np.random.default_rng(lookahead + recomputed)
    model = Model(lookahead, 40, recomputed)
    tokens = lambda least, most: rng.integers(0, 2, int(rng.integers(least, most))).tolist()  # noqa: E731
    for _ in range(3000):
        action = rng.random()
        if action < 0.3 and len(model.live) < 6:
            model.start(tokens(1, 24))
        elif action < 0.85 and model.live:
            one = model.live[int(rng.integers(len(model.live)))]
            room = LIMIT - len(one.tokens)
            model.grow(one, tokens(0, 9)[:room], flight=int(rng.integers(0, 9)))
        elif model.live:
            model.stop(model.live[int(rng.integers(len(model.live)))])
        model.check()
    assert model.hits > 50 and model.failures > 10  # the walk went where it matters
    model.drain()


def test_B33_counts_return_to_zero_after_1000_random_cancels() -> None:
    rng = np.random.default_rng(9)
    model, cancelled = Model(0, 60), 0
    while cancelled < 1000:
        if len(model.live) < 5:
            model.start(rng.integers(0, 2, int(rng.integers(1, 20))).tolist())
        one = model.live[int(rng.integers(len(model.live)))]
        if rng.random() < 0.5:
            model.grow(one, rng.integers(0, 2, 3).tolist()[: LIMIT - len(one.tokens)], flight=8)
        else:
            model.stop(one)
            cancelled += 1
    model.drain()
    assert all(model.allocator.references(page) == 0 for page in range(60))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("soge"), st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 5)),
        max_size=30,
    )
)
def test_any_sequence_of_requests_keeps_the_model(steps: list[tuple[str, list[int], int]]) -> None:
    """s: start, o: stop, g: grow, e: evict."""
    model = Model(0, 14)
    for what, tokens, number in steps:
        if what == "s":
            model.start(tokens)
        elif what == "e":
            model.cache.evict(number)
        elif model.live:
            one = model.live[number % len(model.live)]
            if what == "o":
                model.stop(one)
            else:
                model.grow(one, tokens[: LIMIT - len(one.tokens)], number)
        model.check()
    model.drain()
