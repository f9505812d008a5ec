"""Faults of the engine, its ragged round, and the server in front of it."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_ENGINE, _RAGGED = "jaxspec/serving/engine.py", "jaxspec/decoding/ragged.py"
_PAGES = "jaxspec/serving/request_pages.py"
_DRAFTING, _INPUTS = "jaxspec/serving/drafting.py", "jaxspec/serving/round_inputs.py"
_TABLES = "jaxspec/serving/slot_tables.py"
_ROWS = ("tests/serving/test_slot_tables.py::test_rows_are_those_of_tables_that_were_just_made",)
_FILE = "tests/serving/test_engine_rounds.py"
_SOAK = (f"{_FILE}::test_answers_are_those_of_a_walk_while_requests_give_way",)
_FULL = (f"{_FILE}::test_B38_no_proposal_is_cut_for_want_of_pages",)
_HISTORY = (f"{_FILE}::test_a_slots_next_owner_inherits_no_history",)
_PENALTIES = (f"{_FILE}::test_penalties_count_the_answer_alone_through_chunks_and_preemptions",)
_SEEDS = (f"{_FILE}::test_B10_seed_words_and_sample_index_enter",)
_PREFIX = (f"{_FILE}::test_B27_the_same_prompt_at_once_is_prefilled_once",)
ENGINE = [
    Mutant(
        "engine-last-token-needs-a-page",
        _TABLES,
        "room = request.lease.allocated + 1 - ",
        "room = request.lease.allocated - ",
        _FULL,
        "the last token of a round has no row in it: a proposal is cut wherever a page ends",
    ),
    Mutant(
        "engine-unread-rows-not-reserved",
        _PAGES,
        "rows_in_flight(request.unread, self._written)",
        "rows_in_flight(0, self._written)",
        _FULL,
        "a round in flight has used the rows that the next one counts on",
    ),
    Mutant(
        "engine-epoch-check-dropped",
        _ENGINE,
        "            if request.epoch != epoch or request.phase is Phase.ENDED:",
        "            if request.phase is Phase.ENDED:",
        _SOAK,
        "a round dispatched before a preemption reaches the request that began again (B25)",
    ),
    Mutant(
        "engine-ended-requests-go-on",
        _ENGINE,
        "            if request.epoch != epoch or request.phase is Phase.ENDED:",
        "            if request.epoch != epoch:",
        _SOAK,
        "the round in flight at an answer's end, or a cancel, is heard of (B16, B33)",
    ),
    Mutant(
        "engine-padding-piece-names-a-slot",
        _INPUTS,
        "slots = np.full(self.pieces, self.program.num_slots, np.int32)",
        "slots = np.zeros(self.pieces, np.int32)",
        _SOAK,
        "a padding piece moves the position of slot 0",
    ),
    Mutant(
        "engine-preempted-keeps-its-epoch",
        _ENGINE,
        "        request.epoch += 1\n",
        "",
        _SOAK,
        "rounds in flight still count for a request that gave its pages away",
    ),
    Mutant(
        "engine-next-owner-of-pages-in-the-same-round",
        _PAGES,
        "rows = len(request.text) - request.lease.committed + rows_in_flight(self._lag, self._written)",
        "rows = 1",
        _SOAK,
        "a prompt begins without pages for all of its rows",
    ),
    Mutant(
        "engine-logprobs-behind-the-stop",
        _ENGINE,
        "said = tuple(logprobs[: len(kept.tokens)])",
        "said = tuple(logprobs)",
        (f"{_FILE}::test_B16_log_probabilities_end_with_the_answer",),
        "log probabilities of tokens behind the end leak (B16)",
    ),
    Mutant(
        "engine-cancelled-event-heard",
        _ENGINE,
        "if event.handle != handle)",
        "if event.handle != -handle)",
        (f"{_FILE}::test_a_cancelled_request_of_no_tokens_is_not_heard_of",),
        "what waited for the next step is reported after a cancel",
    ),
    Mutant(
        "engine-sample-index-dropped",
        _TABLES,
        '        arrays["samples"][slot] = request.sample\n',
        "",
        _SEEDS,
        "the n answers to a seeded request are one and the same",
    ),
    Mutant(
        "engine-high-word-of-the-seed",
        _TABLES,
        "[slot] = request.seed & 0xFFFFFFFF, request.seed >> 32",
        "[slot] = request.seed & 0xFFFFFFFF, 0",
        _SEEDS,
        "seeds that differ above 2^32 are the same (B10)",
    ),
    Mutant(
        "tables-an-older-owner",
        _TABLES,
        "if self._owners[slot] is not request:",
        "if self._owners[slot] is None:",
        _ROWS,
        "a slot's next owner is served as the one before it asked",
    ),
    Mutant(
        "tables-older-pages",
        _TABLES,
        "if self._pages[slot] != request.lease.pages:",
        "if len(self._pages[slot]) != len(request.lease.pages):",
        _ROWS,
        "a preempted request writes into pages that are another one's now",
    ),
    Mutant(
        "tables-rows-of-nobody",
        _TABLES,
        "for slot in self._shown - here:",
        "for slot in here - self._shown:",
        _ROWS,
        "a row stays when its request is gone",
    ),
    Mutant(
        "engine-every-sample-prefills",
        _ENGINE,
        "if blocked or self._follows(request):",
        "if blocked:",
        _PREFIX,
        "n answers to a prompt prefill it n times",
    ),
    Mutant(
        "engine-pinned-is-paused",
        _DRAFTING,
        "if request.pinned or (wanted and request.switch.drafting)]",
        "if wanted and request.switch.drafting]",
        (f"{_FILE}::test_seeded_answers_do_not_depend_on_what_is_paused",),
        "a seeded request's ids depend on how fast the server is",
    ),
    Mutant(
        "engine-loser-drafts-on",
        _DRAFTING,
        "wanted = self.switch.drafting(len(decoding), prefill > 0)",
        "wanted = True",
        (f"{_FILE}::test_a_drafter_that_loses_at_this_load_is_paused_and_one_that_wins_is_not",),
        "a drafter that loses makes the server slower than none",
    ),
    Mutant(
        "engine-observed-never",
        _DRAFTING,
        "            self._observed.observe(*(np.array(column) for column in columns))\n",
        "            del columns\n",
        (f"{_FILE}::test_observed_acceptance_shortens_budgets_where_the_drafter_knows_nothing",),
        "without a confidence every budget stays at the prior",
    ),
    Mutant(
        "engine-pause-forgets-the-budget",
        _DRAFTING,
        "        confidence[[request.slot for request in paused]] = 0\n",
        "",
        (f"{_FILE}::test_a_request_whose_drafts_lose_is_paused_beside_one_whose_drafts_win",),
        "the budget pays for drafts that a paused request does not make",
    ),
    Mutant(
        "engine-read-past-the-door",
        _ENGINE,
        "self.drafting.time(flight, int(results.counts.sum()))",
        "self.drafting.time(flight, int(flight.output.words.sum()))",
        (f"{_FILE}::test_500_mixed_steps_compile_nothing_and_read_through_one_door",),
        "a second copy from the device in every round",
    ),
    Mutant(
        "ragged-history-inherited",
        _RAGGED,
        "anew = jnp.where(prefill.fresh & (prefill.counts > 0), prefill.slots, nobody)",
        "anew = jnp.full_like(prefill.slots, nobody)",
        _HISTORY,
        "a slot's next owner is penalised for the last one's words",
    ),
    Mutant(
        "ragged-every-piece-draws",
        _RAGGED,
        "ends = prefill.final & (prefill.counts > 0)",
        "ends = prefill.counts > 0",
        _PENALTIES,
        "tokens drawn at the edge of a chunk are counted as the answer's",
    ),
    Mutant(
        "engine-resumed-answer-is-prompt",
        _INPUTS,
        "answers[rows] = np.arange(piece.start, end) >= len(request.prompt)",
        "answers[rows] = False",
        _PENALTIES,
        "after a preemption the answer so far is forgotten by the penalties",
    ),
    Mutant(
        "serving-arrival-alone",
        "jaxspec/serving/worker.py",
        "choose(self._waiting, time.monotonic(), fits)",
        "next(filter(fits, self._waiting), None)",
        ("tests/serving/test_worker.py::test_priority_then_deadline_then_arrival",),
        "priority and deadline are accepted and ignored",
    ),
    Mutant(
        "serving-n-one-seed-one-answer",
        "jaxspec/serving/service.py",
        "functools.partial(sink, index), sample=index, **about)",
        "functools.partial(sink, index), **about)",
        ("tests/serving/test_server.py::test_n_answers_are_told_apart",),
        "n answers under one seed are the same",
    ),
    Mutant(
        "engine-resumed-draws-its-anchor-anew",
        _INPUTS,
        "forced[piece.index] = request.emitted[-1]",
        "forced[piece.index] = -1",
        ("tests/serving/test_engine.py::test_B25_a_seeded_answer_goes_on_from_its_anchor_after_a_preemption",),
        "a seeded answer must not depend on whether it was preempted",
    ),
]
