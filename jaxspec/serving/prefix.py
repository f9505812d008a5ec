"""Prefix cache: a radix tree over pages of tokens.

A hit is shared by reference and never written, so it ends at a page's edge; the rows behind it are computed anew, into
the request's own pages. It counts only as far as the drafter's rows exist too, because a page without them would leave
a hole in the drafter's context.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from jaxspec.serving.pages import PageAllocator, PageLease

Key = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Node:
    page: int
    key: Key
    parent: _Node | None
    drafted: bool  # whether the drafter's rows of the page exist
    used: int = 0
    children: dict[Key, _Node] = dataclasses.field(default_factory=dict)


Entry = tuple[int, int, _Node]  # when used, a number that breaks ties, a leaf


def _current(entry: Entry) -> bool:
    """Whether an entry still speaks of a leaf: it may be gone, have children, or have been used since."""
    used, _, node = entry
    return node.parent is not None and not node.children and node.used == used


class PrefixCache:
    """Committed pages of past and present requests, the least recently used leaves evicted first.

    `lookahead` is 1 for a drafter whose row t depends on token t + 1 (EAGLE): a page is then known by its tokens and
    the one behind them. `recomputed` rows at the end of a prompt are never taken from the cache: one, whose logits give
    the first token, or a sliding layer's window, whose ring is not in the pages.
    """

    def __init__(self, allocator: PageAllocator, *, lookahead: int = 0, recomputed: int = 1):
        self._allocator, self._lookahead = allocator, lookahead
        self._recomputed = max(recomputed, 1)
        self._roots: dict[Hashable, _Node] = {}
        self._leaves: list[Entry] = []
        self._pages = np.zeros(allocator.capacity + 1, bool)
        self._clock, self._entries, self._size = itertools.count(1), itertools.count(), 0

    @property
    def size(self) -> int:
        """Pages in the tree."""
        return self._size

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free: no request holds them, nor then those behind them."""
        return self._allocator.held_once(self._pages)

    def known(self, prompt: Sequence[int], namespace: Hashable = None, *, held: bool = False) -> int:
        """Pages that `open` would begin with; those of them that somebody else holds too."""
        found = list(self._prefix(prompt, namespace))
        return sum(self._allocator.references(node.page) > 1 for node in found) if held else len(found)

    def open(self, prompt: Sequence[int], namespace: Hashable = None) -> PageLease:
        """A lease that starts with the longest cached prefix of a prompt: its `committed` rows need no prefill.

        Requests of different `namespace`s (another drafter, say) share nothing.
        """
        lease = PageLease(self._allocator.page_size, [])
        for node in self._prefix(prompt, namespace):
            self._touch(node)
            self._allocator.hold(node.page)
            lease.pages.append(node.page)
        lease.shared = len(lease.pages)
        lease.committed = lease.shared * lease.page_size
        return lease

    def insert(
        self, tokens: Sequence[int], lease: PageLease, namespace: Hashable = None, *, drafted: bool = True
    ) -> None:
        """Makes the full pages of a request's committed rows available to others; `tokens` are prompt and answer.

        A page that is known already stays as it is, except one without the drafter's rows, which a page that has them
        replaces for later hits.
        """
        node = self._roots.setdefault(namespace, _Node(0, (), None, True))
        full = lease.committed // lease.page_size
        for key, page in zip(self._keys(tokens), lease.pages[:full], strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(page, key, node, drafted)
                self._hold(page)
                self._size += 1
            elif drafted and not child.drafted:
                self._hold(page)
                self._release(child.page)
                child.page, child.drafted = page, True
            self._touch(child)
            node = child

    def close(
        self, tokens: Sequence[int], lease: PageLease, namespace: Hashable = None, *, drafted: bool = True
    ) -> None:
        """Ends a request, finished, cancelled or preempted: its full pages stay for later ones until evicted."""
        self.insert(tokens, lease, namespace, drafted=drafted)
        lease.release(self._allocator)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no request holds, and says how many."""
        freed, held = 0, []
        while freed < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            if not _current(entry):
                continue
            node = entry[2]
            if self._allocator.references(node.page) > 1:
                held.append(entry)
                continue
            self._drop(node)
            freed += 1
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def forget_drafter(self) -> None:
        """The drafter's rows are gone (its pools were cleared, or other weights loaded); the target's stand."""
        for node in self._nodes():
            node.drafted = False

    def clear(self) -> None:
        """Drops every page; requests keep those that they hold."""
        for node in self._nodes():
            self._release(node.page)
        self._roots.clear()
        self._leaves.clear()
        self._size = 0

    # -- inside -------------------------------------------------------------------------------------------------------

    def _prefix(self, prompt: Sequence[int], namespace: Hashable) -> Iterator[_Node]:
        """The longest known prefix of which every page may be used."""
        usable = (len(prompt) - self._recomputed) // self._allocator.page_size
        node = self._roots.get(namespace)
        for key in itertools.islice(self._keys(prompt), max(usable, 0)):
            node = None if node is None else node.children.get(key)
            if node is None or not node.drafted:
                return
            yield node

    def _hold(self, page: int) -> None:
        self._allocator.hold(page)
        self._pages[page] = True

    def _release(self, page: int) -> None:
        self._allocator.release(page)
        self._pages[page] = False

    def _keys(self, tokens: Sequence[int]) -> Iterator[Key]:
        """Each full page's tokens, and those behind it that its rows depend on."""
        size = self._allocator.page_size
        for start in range(0, len(tokens) - size - self._lookahead + 1, size):
            yield tuple(tokens[start : start + size + self._lookahead])

    def _touch(self, node: _Node) -> None:
        node.used = next(self._clock)
        if not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._entries), node))
            if len(self._leaves) > 2 * self._size + 64:
                self._leaves = [entry for entry in self._leaves if _current(entry)]
                heapq.heapify(self._leaves)

    def _drop(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self._release(node.page)
        self._size -= 1
        if parent.parent is not None and not parent.children:
            heapq.heappush(self._leaves, (parent.used, next(self._entries), parent))

    def _nodes(self) -> Iterator[_Node]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node
