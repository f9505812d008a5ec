"""Faults of the scheduling policy and of what turns drafting off."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TESTS = "tests/serving/test_scheduler.py"
_FILE, _ADAPTIVE = "jaxspec/serving/scheduler.py", "jaxspec/serving/adaptive.py"
_NEVER_SLOWER = (f"{_TESTS}::test_the_loaded_server_is_never_slower_than_without_a_drafter",)
SCHEDULER = [
    Mutant(
        "scheduler-prefill-takes-the-round",
        _FILE,
        "        if decoding:\n            rows = min(",
        "        if False:\n            rows = min(",
        (f"{_TESTS}::test_a_long_prompt_neither_stalls_answers_nor_starves",),
        "a round as long as a whole prompt stalls every answer",
    ),
    Mutant(
        "scheduler-first-prompt-takes-all",
        _FILE,
        "-(-rows // (len(by_need) - index))",
        "rows",
        (f"{_TESTS}::test_prefills_share_a_round_and_leave_decoding_its_rows",),
        "prefills share a round",
    ),
    Mutant(
        "scheduler-no-aging",
        _FILE,
        "-(priority + math.floor((now - arrived) / aging_seconds))",
        "-priority",
        (f"{_TESTS}::test_low_priority_is_served_under_a_flood_of_high_priority",),
        "a flood of important requests must not starve the others",
    ),
    Mutant(
        "scheduler-overtaken-for-ever",
        _FILE,
        "if now - request.arrived > self.limits.patience:",
        "if False:",
        (f"{_TESTS}::test_admission_waits_for_pages_and_keeps_them_for_who_waited_long",),
        "small requests would take every page that becomes free",
    ),
    Mutant(
        "scheduler-unbounded-queue",
        _FILE,
        "if len(self.waiting) >= limits.queue:",
        "if False:",
        (f"{_TESTS}::test_the_queue_is_bounded_and_what_never_fits_is_refused",),
        "the queue is bounded",
    ),
    Mutant(
        "scheduler-no-pages-for-the-lag",
        _FILE,
        "rows = min(request.prompt_rows + self.limits.rows_in_flight, self.limits.max_context)",
        "rows = request.prompt_rows",
        (f"{_TESTS}::test_a_prefix_hit_needs_no_prefill_and_no_pages",),
        "a request that cannot hold its first round is preempted at once",
    ),
    Mutant(
        "scheduler-deadline-at-arrival-only",
        _FILE,
        "late = [request for request in self.waiting if self._too_late(request, now)]",
        "late = []",
        (f"{_TESTS}::test_deadlines_are_refused_as_soon_as_they_cannot_be_met",),
        "a request that is late already takes nobody's place",
    ),
    Mutant(
        "scheduler-preempts-the-first-to-come",
        _FILE,
        "key=lambda one: (-one.priority, one.arrived, one.id)",
        "key=lambda one: (-one.priority, -one.arrived, one.id)",
        (f"{_TESTS}::test_preemption_takes_the_least_important_and_keeps_its_answer",),
        "the oldest must always get on, or two requests preempt each other for ever",
    ),
    Mutant(
        "scheduler-preempted-answer-lost",
        _FILE,
        "request.prompt_rows += request.emitted",
        "request.prompt_rows += 0",
        (f"{_TESTS}::test_preemption_takes_the_least_important_and_keeps_its_answer",),
        "what was said is part of the prompt when it goes on",
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
