"""Faults of penalties, bias, masks, log probabilities and the end of an answer."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_RULES, _END = "tests/decoding/test_processors.py", "tests/serving/test_ending.py"
_ROWS = (f"{_RULES}::test_every_row_of_a_block_equals_the_numpy_oracle",)
_PROCESSORS, _ENDING = "jaxspec/decoding/processors.py", "jaxspec/serving/ending.py"
SAMPLING = [
    Mutant(
        "sampling-row-forgets-the-drafts-before-it",
        _PROCESSORS,
        "counts, prompt = at_drafts(self.counts) + more,",
        "counts, prompt = at_drafts(self.counts) + 0 * more,",
        _ROWS,
        "row k's history holds d_1 … d_k",
    ),
    Mutant(
        "sampling-row-knows-its-own-draft",
        _PROCESSORS,
        "jnp.tri(rows, m, -1, dtype=bool)",
        "jnp.tri(rows, m, 0, dtype=bool)",
        _ROWS,
        "row k may not know d_(k+1), which it judges",
    ),
    Mutant(
        "sampling-min-tokens-by-the-round",
        _PROCESSORS,
        "self.emitted[:, None] + jnp.sum(before, axis=-1) <",
        "self.emitted[:, None] + 0 * jnp.sum(before, axis=-1) <",
        _ROWS,
        "each row counts the drafts before it",
    ),
    Mutant(
        "sampling-repetition-lifts-negative-logits",
        _PROCESSORS,
        "jnp.where(logits > 0, logits / repetition, logits * repetition)",
        "logits / repetition",
        _ROWS,
        "a negative logit over a penalty above 1 would rise",
    ),
    Mutant(
        "sampling-presence-counts-the-prompt",
        _PROCESSORS,
        "- presence * used",
        "- presence * (used | prompt)",
        _ROWS,
        "presence looks at the answer alone",
    ),
    Mutant(
        "sampling-history-of-rejected-drafts",
        _PROCESSORS,
        "real = (jnp.arange(tokens.shape[1]) < counts[:, None]).astype(jnp.int32)",
        "real = jnp.ones(tokens.shape, jnp.int32)",
        (f"{_RULES}::test_the_history_follows_the_accepted_tokens_and_no_other",),
        "a rejected draft was never said",
    ),
    Mutant(
        "sampling-chunk-padding-in-the-prompt",
        _PROCESSORS,
        "real = jnp.arange(tokens.shape[0]) < count\n",
        "real = jnp.arange(tokens.shape[0]) >= 0\n",
        _ROWS,
        "padding rows of a chunk are no history",
    ),
    Mutant(
        "sampling-min-tokens-against-the-grammar",
        _PROCESSORS,
        "jnp.where(possible, longer, logits) + bias",
        "longer + bias",
        (f"{_RULES}::test_grammar_masks_come_first_and_a_row_that_allows_nothing_is_left_alone",),
        "a row of -inf alone is NaN after the softmax",
    ),
    Mutant(
        "sampling-logprob-ties",
        "jaxspec/decoding/logprobs.py",
        "logits = jnp.where(logits == 0, 0.0, logits)",
        "logits = logits",
        (f"{_RULES}::test_logprobs_equal_numpy_with_ties",),
        "0 and -0 are one value",
    ),
    Mutant(
        "ending-stop-inside-one-token-only",
        _ENDING,
        "text = self._held + text\n",
        "text = text\n",
        (f"{_END}::test_B15_the_split_into_blocks_makes_no_difference",),
        "a stop string spans tokens and blocks (B15)",
    ),
    Mutant(
        "ending-first-listed-wins",
        _ENDING,
        "return text[: min(found)[1]], True",
        "return text[: found[0][1]], True",
        (f"{_END}::test_B15_the_split_into_blocks_makes_no_difference",),
        "of two stop strings the earlier ends the text, whatever their order",
    ),
    Mutant(
        "ending-shows-the-beginning-of-a-stop",
        _ENDING,
        "keep = max((_overlap(text, stop) for stop in self._stops), default=0)",
        "keep = 0",
        (f"{_END}::test_streamed_text_equals_a_search_over_the_whole",),
        "what was streamed cannot be taken back",
    ),
    Mutant(
        "ending-tokens-behind-the-end",
        _ENDING,
        "            if self.reason is not None:\n                break\n",
        "",
        (f"{_END}::test_B17_stop_and_length_in_one_block",),
        "ids end where the text ends (B16, B17)",
    ),
    Mutant(
        "ending-length-before-stop",
        _ENDING,
        "        if stopped or by_id:",
        "        if self.emitted < self._room and (stopped or by_id):",
        (f"{_END}::test_B17_stop_and_length_in_one_block",),
        "a stop exactly at max_tokens is a stop (B17)",
    ),
    Mutant(
        "ending-ids-behind-the-length",
        _ENDING,
        "tuple(tokens[: self._room - self.emitted])",
        "tuple(tokens)",
        (f"{_END}::test_B17_stop_and_length_in_one_block",),
        "an answer has no more ids than it may",
    ),
    Mutant(
        "ending-ids-before-min-tokens",
        _ENDING,
        "range(max(self._min_tokens - self.emitted, 0), len(kept))",
        "range(len(kept))",
        (f"{_END}::test_min_tokens_keep_both_kinds_of_stop_away",),
        "a stop id before min_tokens is an id like any other",
    ),
]
