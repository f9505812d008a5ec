"""Faults of the scheduling policy and of what turns drafting off."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TESTS = "tests/serving/test_scheduler.py"
_FILE, _ADAPTIVE = "jaxspec/serving/scheduler.py", "jaxspec/serving/adaptive.py"
_NEVER_SLOWER = (f"{_TESTS}::test_the_loaded_server_is_never_slower_than_without_a_drafter",)
_ENGINE_TESTS, _WORKER_TESTS = "tests/serving/test_engine_scheduler.py", "tests/serving/test_worker.py"
_ENGINE, _WORKER = "jaxspec/serving/engine.py", "jaxspec/serving/worker.py"
_PAGES = "jaxspec/serving/request_pages.py"
SCHEDULER = [
    Mutant(
        "scheduler-first-prompt-takes-all",
        _FILE,
        "-(-rows // (len(needs) - rank))",
        "rows",
        (f"{_TESTS}::test_prompts_share_a_chunk_and_each_gets_on",),
        "prefills share a round",
    ),
    Mutant(
        "scheduler-no-aging",
        _FILE,
        "-(priority + math.floor((now - arrived) / AGING_SECONDS))",
        "-priority",
        (f"{_TESTS}::test_low_priority_is_served_under_a_flood_of_high_priority",),
        "a flood of important requests must not starve the others",
    ),
    Mutant(
        "scheduler-overtaken-for-ever",
        _FILE,
        "if now - one.arrived > PATIENCE_SECONDS:",
        "if False:",
        (f"{_TESTS}::test_what_does_not_fit_is_overtaken_but_not_for_ever",),
        "small requests would take every page that becomes free",
    ),
    Mutant(
        "scheduler-whole-queue-searched",
        _FILE,
        "heapq.nsmallest(1 + OVERTAKING, waiting, key=order)",
        "sorted(waiting, key=order)",
        (f"{_TESTS}::test_what_does_not_fit_is_overtaken_but_not_for_ever",),
        "a long queue would cost every round the search of a page table",
    ),
    Mutant(
        "scheduler-slowest-prefill-counts",
        _ADAPTIVE,
        "self._fastest = min(self._fastest, seconds)",
        "self._fastest = seconds",
        (f"{_TESTS}::test_a_prompt_takes_as_many_of_the_fastest_rounds_as_it_has_chunks",),
        "after a hiccup requests would be refused that can be served",
    ),
    Mutant(
        "scheduler-newest-prompts-first",
        _ENGINE,
        "for request in self._requests(Phase.WAITING, Phase.PREFILL):",
        "for request in self._requests(Phase.WAITING, Phase.PREFILL)[::-1]:",
        (f"{_ENGINE_TESTS}::test_a_long_prompt_gets_on_beside_a_flood_of_short_ones_and_stalls_no_answer",),
        "short prompts that keep coming starve a long one",
    ),
    Mutant(
        "scheduler-preempts-the-first-to-come",
        _ENGINE,
        "self._preempt(self._requests(Phase.DECODING, Phase.PREFILL)[-1])",
        "self._preempt(self._requests(Phase.DECODING, Phase.PREFILL)[0])",
        (f"{_ENGINE_TESTS}::test_the_least_important_gives_way_then_the_youngest",),
        "the oldest must always get on, or two requests preempt each other for ever",
    ),
    Mutant(
        "scheduler-priority-ends-at-the-queue",
        _ENGINE,
        "key=lambda one: (urgency(one.priority, one.arrived, now), one.handle)",
        "key=lambda one: one.handle",
        (f"{_ENGINE_TESTS}::test_the_least_important_gives_way_then_the_youngest",),
        "an important request gives its pages to an older, unimportant one",
    ),
    Mutant(
        "scheduler-blocked-prompt-blocks-prompts-that-have-pages",
        _ENGINE,
        "                    blocked = True\n                    continue\n",
        "                    break\n",
        (f"{_ENGINE_TESTS}::test_an_important_prompt_without_pages_waits_for_those_that_have_them",),
        "each waits for the other, for ever",
    ),
    Mutant(
        "scheduler-promised-pages-given-twice",
        _PAGES,
        "for one in promised)",
        "for one in [])",
        (f"{_ENGINE_TESTS}::test_a_request_fits_if_its_prompt_and_first_rounds_do",),
        "pages that a request on a slot waits for are not free",
    ),
    Mutant(
        "scheduler-no-pages-for-the-lag",
        _PAGES,
        "rows = min(len(tokens) + rows_in_flight(self._lag, self._written), self._limit)",
        "rows = len(tokens)",
        (f"{_ENGINE_TESTS}::test_a_request_fits_if_its_prompt_and_first_rounds_do",),
        "a request that cannot hold its first round is preempted at once",
    ),
    Mutant(
        "scheduler-cached-pages-count-as-taken",
        _PAGES,
        " or wanted <= self._allocator.free + self._cache.evictable",
        "",
        (f"{_ENGINE_TESTS}::test_a_request_fits_if_its_prompt_and_first_rounds_do",),
        "pages that only the prefix cache holds would never be used again",
    ),
    Mutant(
        "scheduler-late-requests-are-run",
        _WORKER,
        "if now + least > ticket.deadline:",
        "if now > ticket.deadline:",
        (f"{_WORKER_TESTS}::test_a_deadline_that_cannot_be_met_is_refused_at_once",),
        "a request that is late already takes nobody's place",
    ),
    Mutant(
        "scheduler-worker-keeps-the-priority-to-itself",
        _WORKER,
        "ticket.grammar, priority=ticket.priority",
        "ticket.grammar, priority=0",
        (f"{_WORKER_TESTS}::test_priority_then_deadline_then_arrival",),
        "the engine would take the pages of anybody",
    ),
    Mutant(
        "scheduler-decode-time-from-arrival",
        _WORKER,
        "ticket.decode_seconds = elapsed - ticket.prefill_seconds",
        "ticket.decode_seconds = elapsed",
        (f"{_WORKER_TESTS}::test_seconds_of_queue_prefill_and_decoding_add_up",),
        "the time per token would hold the prompt's",
    ),
    Mutant(
        "adaptive-untested-slots-count-as-failures",
        _ADAPTIVE,
        "tested = index < np.minimum(verified, accepted + 1)[:, None]",
        "tested = index < verified[:, None]",
        (f"{_TESTS}::test_observed_acceptance_counts_what_was_tested",),
        "slots behind the first rejection say nothing",
    ),
    Mutant(
        "adaptive-never-tried-again",
        _ADAPTIVE,
        "self._tested[slots] = self._decay * self._tested[slots] + tested",
        "self._tested[slots] = self._tested[slots] + tested",
        (f"{_TESTS}::test_what_is_not_tried_any_more_drifts_back_and_is_tried_again",),
        "evidence fades",
    ),
    Mutant(
        "adaptive-always-drafts",
        _ADAPTIVE,
        "load.drafting, load.wait = better, load.period",
        "load.drafting, load.wait = True, load.period",
        _NEVER_SLOWER,
        "a drafter that loses is paused",
    ),
    Mutant(
        "adaptive-trials-at-a-fixed-pace",
        _ADAPTIVE,
        "load.period = min(2 * load.period, self._longest) if better == load.drafting else self._first",
        "load.period = self._first",
        (f"{_TESTS}::test_the_switch_tries_the_loser_again_and_less_and_less_often",),
        "trials of what loses get rarer",
    ),
    Mutant(
        "adaptive-request-never-pauses",
        _ADAPTIVE,
        "if self._accepted / self._seen < break_even:",
        "if False:",
        (f"{_TESTS}::test_a_request_pauses_and_is_tried_again_after_twice_as_long",),
        "a request whose drafts do not pay stops drafting",
    ),
]
