"""Faults of constrained decoding."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_FILE, _TESTS = "jaxspec/serving/grammar.py", "tests/serving/test_grammar.py"
GRAMMAR = [
    Mutant(
        "grammar-drafts-move-the-state",
        _FILE,
        "                    visit(node + 1, True, tail)\n                    self._back(1)\n",
        "                    visit(node + 1, True, tail)\n",
        (f"{_TESTS}::test_B25_the_state_is_that_of_the_emitted_tokens",),
        "a rejected draft was never said (B25)",
    ),
    Mutant(
        "grammar-one-mask-for-the-block",
        _FILE,
        "                    visit(node + 1, True, tail)\n                    self._back(1)\n",
        "                    self._back(1)\n",
        (f"{_TESTS}::test_rows_of_a_block_are_what_plain_decoding_would_see",),
        "every row has a mask of its own",
    ),
    Mutant(
        "grammar-goes-on-behind-its-end",
        _FILE,
        "            if self.finished:\n                return index",
        "            if False:\n                return index",
        (f"{_TESTS}::test_B23_a_schema_that_closes_inside_a_block_ends_the_answer",),
        "tokens behind the end are dropped, without an exception (B23)",
    ),
    Mutant(
        "grammar-mask-behind-the-end",
        _FILE,
        "                if self._matcher.is_stopped():\n                    return\n",
        "",
        (f"{_TESTS}::test_rows_of_a_block_are_what_plain_decoding_would_see",),
        "a matcher that ended is not asked again (B23)",
    ),
    Mutant(
        "grammar-marker-waits-for-the-next-round",
        _FILE,
        "visit(node + 1, *self._seen(tail, token))",
        "visit(node + 1, False, self._seen(tail, token)[1])",
        (f"{_TESTS}::test_a_marker_inside_the_block_switches_the_grammar_on",),
        "rows behind a drafted marker are bound already",
    ),
    Mutant(
        "grammar-tree-taken-for-a-chain",
        "jaxspec/serving/round_inputs.py",
        "parents = None if tree is None else",
        "parents = None if True else",
        ("tests/serving/test_engine_grammar.py::test_B23_B25_constrained_answers_are_those_of_plain_decoding",),
        "a node's mask is that of its own path",
    ),
    Mutant(
        "grammar-marker-in-one-token-only",
        _FILE,
        "text = tail + self._tokens.decode_bytes([token])",
        "text = self._tokens.decode_bytes([token])",
        (f"{_TESTS}::test_a_marker_may_span_tokens_and_false_starts",),
        "a marker may span tokens",
    ),
    Mutant(
        "grammar-rollback-keeps-the-grammar-on",
        _FILE,
        "        self._bound, self._tail = undone[0]",
        "        self._tail = undone[0][1]",
        (f"{_TESTS}::test_rollback_restores_every_earlier_state",),
        "taking the marker back unbinds the answer",
    ),
    Mutant(
        "grammar-shared-state",
        _FILE,
        "matcher.deep_copy()",
        "matcher",
        (f"{_TESTS}::test_compiled_grammars_are_kept_and_states_are_apart",),
        "two requests of one grammar have two states",
    ),
]
