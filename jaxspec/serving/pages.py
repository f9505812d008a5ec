"""Pages of the caches: who holds them, and how many rows of a request are real and how many are only reserved.

One page id stands for the same page of every pool, the target's and the drafter's, since both are reached through one
page table. Page 0 is the trash page: padding rows write there, and nobody owns it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from jaxspec.errors import ConfigError, InvariantError, problem

TRASH = 0


def check_pages(num_pages: int, least: int, max_context: int) -> None:
    """Raises ConfigError for fewer pages than one request may need."""
    if num_pages < least:
        wanted = f"at least {least}, for max_context {max_context}"
        raise ConfigError(problem("engine.num_pages", num_pages, wanted))


class PageAllocator:
    """Reference counts over pages 1 … num_pages - 1. A page is free when nobody holds it."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            sizes = f"{num_pages} pages of {page_size} rows"
            raise ConfigError(
                problem("cache pages", sizes, "at least one page beside the trash page, and one row each")
            )
        self.page_size = page_size
        self._references = np.zeros(num_pages, np.int64)
        self._free = list(range(num_pages - 1, TRASH, -1))  # low ids are handed out first

    @property
    def capacity(self) -> int:
        """Pages that can be held."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Holders of a page."""
        return int(self._references[page])

    def held_once(self, pages: Bool[np.ndarray, "N"]) -> int:
        """How many of the marked pages have one holder."""
        return int(np.count_nonzero(self._references[pages] == 1))

    def take(self, count: int) -> list[int] | None:
        """`count` fresh pages with one holder, or None (and nothing taken) where there are not so many."""
        if count > self.free:
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._references[pages] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more holder of a page that is held."""
        self._expect_held(page)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer; the last one frees the page."""
        self._expect_held(page)
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def _expect_held(self, page: int) -> None:
        if page == TRASH or not self._references[page]:
            raise InvariantError(problem(f"page {page}", "no holder", "a page that was taken"))


def rows_in_flight(lag: int, rows: int) -> int:
    """Rows past the committed ones that rounds may write which the host has not read yet: `rows` (m + 1, or a tree's
    nodes + 1) for each of the `lag` unread rounds and for the one that is dispatched next.
    """
    return (lag + 1) * rows


@dataclasses.dataclass(eq=False)
class PageLease:
    """The pages of one request, in the order of its rows.

    `committed` rows are history. The pages hold `allocated` rows, the rest of them scratch for rounds in flight. The
    first `shared` pages came from the prefix cache and are never written.
    """

    page_size: int
    pages: list[int]
    shared: int = 0
    committed: int = 0

    @property
    def allocated(self) -> int:
        """Rows that the pages have room for."""
        return len(self.pages) * self.page_size

    def table_row(self, width: int) -> Int[np.ndarray, "P"]:
        """The row of the page table, filled up with the trash page."""
        row = np.full(width, TRASH, np.int32)
        row[: len(self.pages)] = self.pages
        return row

    def commit(self, rows: int) -> None:
        """`rows` more rows are history. InvariantError where no page was reserved for them."""
        if rows < 0 or self.committed + rows > self.allocated:
            found = f"{self.committed} + {rows} rows on {len(self.pages)} pages"
            raise InvariantError(problem("committed rows", found, f"at most {self.allocated}"))
        self.committed += rows

    def reserve(self, allocator: PageAllocator, rows: int, limit: int, evict: Callable[[int], int]) -> bool:
        """Room for `rows` rows behind the committed ones, none at or past `limit` (the context's end).

        `evict(pages)` is asked for what the allocator lacks. False, and nothing taken, where even that is not enough:
        the request must wait, or another one be preempted.
        """
        wanted = -(-min(self.committed + rows, limit) // self.page_size) - len(self.pages)
        if wanted <= 0:
            return True
        if wanted > allocator.free:
            evict(wanted - allocator.free)
        taken = allocator.take(wanted)
        if taken is None:
            return False
        self.pages += taken
        return True

    def release(self, allocator: PageAllocator) -> None:
        """Gives every page back. A round in flight may still write to them: it runs before any later owner's."""
        for page in self.pages:
            allocator.release(page)
        self.pages, self.shared, self.committed = [], 0, 0
