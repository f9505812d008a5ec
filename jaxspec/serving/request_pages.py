"""Pages of the requests on slots: opened with a known prefix, grown before each round, closed into the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.base import PrefixUse
from jaxspec.serving.pages import PageAllocator, PageLease, rows_in_flight
from jaxspec.serving.prefix import PrefixCache
from jaxspec.serving.requests import Request


class RequestPages:
    """Of up to `limit` rows a request. A round may write `written` rows for each, `lag` rounds ahead of the host.

    `prefix` says what of a known prefix may be skipped, if anything.
    """

    def __init__(self, num_pages: int, page_size: int, *, limit: int, written: int, lag: int, prefix: PrefixUse):
        self._allocator = PageAllocator(num_pages, page_size)
        self._cache = PrefixCache(self._allocator, lookahead=prefix.lookahead, recomputed=prefix.recomputed)
        self._limit, self._written, self._lag, self._share = limit, written, lag, prefix.in_pages
        self.hits = self.hit_rows = 0

    @property
    def capacity(self) -> int:
        """Pages that can be held."""
        return self._allocator.capacity

    @property
    def page_size(self) -> int:
        """Rows of each."""
        return self._allocator.page_size

    @property
    def held(self) -> int:
        """Pages that requests or the prefix cache hold."""
        return self._allocator.capacity - self._allocator.free

    def lease(self) -> PageLease:
        """Of no page yet."""
        return PageLease(self._allocator.page_size, [])

    def drop_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._cache.clear()

    def shares(self, params: SamplingParams) -> bool:
        """Whether a cached prefix may stand for a request's rows: not where each of the prompt's rows has something to
        say."""
        return self._share and params.rules == LogitRules() and not params.prompt_logprobs

    def known_rows(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Rows of a prompt that need no prefill now."""
        return self._cache.known(prompt) * self._allocator.page_size if self.shares(params) else 0

    def fits(self, prompt: Sequence[int], params: SamplingParams, promised: Iterable[Request] = ()) -> bool:
        """Whether a prompt's pages may be had now, by eviction too, beside those of requests that wait for theirs."""
        wanted = self._wanted(prompt, params) + sum(self._wanted(one.history, one.params) for one in promised)
        return wanted <= self._allocator.free or wanted <= self._allocator.free + self._cache.evictable

    def open(self, request: Request) -> bool:
        """Pages for the whole text of a request, those of a known prefix first; False, and none, if they are not to be
        had."""
        if self.shares(request.params):
            request.lease = self._cache.open(request.text)
        rows = len(request.text) - request.lease.committed + rows_in_flight(self._lag, self._written)
        if request.lease.reserve(self._allocator, rows, self._limit, self._cache.evict):
            self.hits += request.lease.committed > 0
            self.hit_rows += request.lease.committed
            return True
        request.lease.release(self._allocator)
        return False

    def reserve(self, request: Request) -> bool:
        """Room for the rows of the next round; False where other requests hold the pages."""
        rows = rows_in_flight(request.unread, self._written)
        return request.lease.reserve(self._allocator, rows, self._limit, self._cache.evict)

    def publish(self, request: Request) -> None:
        """The prompt has run: its full pages are there for others."""
        if self.shares(request.params):
            self._cache.insert(request.text, request.lease)

    def close(self, request: Request) -> None:
        """Gives the pages back; the full ones stay known to the prefix cache until they are evicted."""
        if self.shares(request.params):
            self._cache.close(request.tokens, request.lease)
        else:
            request.lease.release(self._allocator)

    def _wanted(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """Pages of a prompt and of the first rounds behind it, but for those that other requests hold anyway."""
        rows = min(len(tokens) + rows_in_flight(self._lag, self._written), self._limit)
        held = self._cache.known(tokens, held=True) if self.shares(params) else 0
        return -(-rows // self._allocator.page_size) - held
