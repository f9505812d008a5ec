"""Faults of the page allocator and the prefix cache."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TESTS = "tests/serving/test_pages.py"
_PAGES, _PREFIX = "jaxspec/serving/pages.py", "jaxspec/serving/prefix.py"
_USE = (
    "tests/serving/test_engine_prefix.py::test_B26_B27_a_prefix_hit_and_the_slots_last_owner_change_no_accept_length",
)
_RING, _SERVED = "jaxspec/drafters/ring.py", "tests/drafters/test_train_equals_serve.py"
PAGES = [
    Mutant(
        "pages-trash-handed-out",
        _PAGES,
        "range(num_pages - 1, TRASH, -1)",
        "range(num_pages - 1, TRASH - 1, -1)",
        (_TESTS,),
        "padding rows write to page 0",
    ),
    Mutant(
        "pages-no-reservation-for-the-lag",
        _PAGES,
        "return (lag + 1) * rows",
        "return rows",
        (f"{_TESTS}::test_rounds_in_flight_of_the_overlapped_loop",),
        "unread rounds have written rows that the host does not know of",
    ),
    Mutant(
        "pages-past-the-context",
        _PAGES,
        "min(self.committed + rows, limit)",
        "(self.committed + rows)",
        (f"{_TESTS}::test_B21_no_page_is_reserved_at_or_past_the_context_limit",),
        "no row is written at or past the limit (B21)",
    ),
    Mutant(
        "pages-commit-unchecked",
        _PAGES,
        "if rows < 0 or self.committed + rows > self.allocated:",
        "if rows < 0:",
        (f"{_TESTS}::test_committed_and_allocated_rows_are_kept_apart",),
        "rows without a page went to the trash page",
    ),
    Mutant(
        "prefix-takes-the-whole-prompt",
        _PREFIX,
        "usable = (len(prompt) - self._recomputed) // self._allocator.page_size",
        "usable = len(prompt) // self._allocator.page_size",
        (f"{_TESTS}::test_B27_a_hit_ends_before_the_last_token_and_at_a_pages_edge",),
        "a full hit leaves no row whose logits give the first token (B27)",
    ),
    Mutant(
        "prefix-forgets-the-pair",
        _PREFIX,
        "yield tuple(tokens[start : start + size + self._lookahead])",
        "yield tuple(tokens[start : start + size])",
        (f"{_TESTS}::test_B27_a_drafter_that_reads_the_next_token_is_keyed_by_the_pair",),
        "EAGLE's row t was computed from token t + 1 (B27)",
    ),
    Mutant(
        "prefix-hit-without-the-drafters-rows",
        _PREFIX,
        "if node is None or not node.drafted:",
        "if node is None:",
        (f"{_TESTS}::test_B27_without_the_drafters_rows_there_is_no_hit_until_a_request_brings_them",),
        "the drafter would start without its context (B27)",
    ),
    Mutant(
        "prefix-offers-uncommitted-pages",
        _PREFIX,
        "full = lease.committed // lease.page_size",
        "full = len(lease.pages)",
        (f"{_TESTS}::test_a_random_walk_agrees_with_the_naive_model",),
        "pages that are only reserved hold scratch rows",
    ),
    Mutant(
        "prefix-evicts-what-is-held",
        _PREFIX,
        "if self._allocator.references(node.page) > 1:",
        "if False:",
        (f"{_TESTS}::test_the_least_recently_used_leaf_goes_first_and_held_pages_stay",),
        "evicting a held page frees nothing and loses the prefix",
    ),
    Mutant(
        "prefix-hit-holds-nothing",
        _PREFIX,
        "            self._allocator.hold(node.page)\n            lease.pages.append(node.page)",
        "            lease.pages.append(node.page)",
        (f"{_TESTS}::test_a_random_walk_agrees_with_the_naive_model",),
        "a page in use could be evicted under its request",
    ),
    Mutant(
        "prefix-newest-goes-first",
        _PREFIX,
        "heapq.heappush(self._leaves, (node.used, next(self._entries), node))",
        "heapq.heappush(self._leaves, (-node.used, next(self._entries), node))",
        (f"{_TESTS}::test_the_least_recently_used_leaf_goes_first_and_held_pages_stay",),
        "eviction is of the least recently used",
    ),
    Mutant(
        "prefix-eagle-page-without-the-next-token",
        "jaxspec/drafters/recurrent.py",
        "return PrefixUse(lookahead=1)",
        "return PrefixUse()",
        _USE,
        "a page's last drafter row is another prompt's (B27)",
    ),
    Mutant(
        "prefix-ngram-skips-text",
        "jaxspec/drafters/ngram.py",
        "return PrefixUse(in_pages=False)",
        "return PrefixUse()",
        _USE,
        "what a hit skips is the text of the slot's last owner (B26)",
    ),
    Mutant(
        "prefix-ring-without-its-window",
        "jaxspec/drafters/block.py",
        "return PrefixUse(recomputed=max([1, *(window - 1 for window in windows)]))",
        "return PrefixUse()",
        _USE,
        "a ring holds nothing of what a hit skips",
    ),
    Mutant(
        "ring-reads-what-was-never-written",
        _RING,
        " & (positions >= ends[:, None] - (window - 1))",
        "",
        _USE,
        "behind a prefix hit a ring holds anything (B64)",
    ),
    Mutant(
        "ring-of-the-wrong-slot",
        _RING,
        "owners = jnp.arange(layout.starts.shape[0]) if layout.owners is None else layout.owners",
        "owners = jnp.arange(layout.starts.shape[0])",
        _USE,
        "a prompt's piece is not on the slot of its index",
    ),
    Mutant(
        "ring-context-at-the-start",
        "jaxspec/drafters/block.py",
        "at = anchors - first[:, None]",
        "at = anchors",
        (f"{_SERVED}::test_B51_B64_rings_of_sliding_layers_serve_what_was_trained",),
        "a ring's first row is not position 0",
    ),
]
