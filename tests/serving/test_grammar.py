"""Grammars over a byte-level tokenizer: masks of drafted blocks, and a state that moves by emitted tokens only."""

from __future__ import annotations

import builtins
import functools
import json
import re

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.decoding.processors import mask_words, unpack_mask
from jaxspec.errors import InvariantError, RequestError
from jaxspec.serving.grammar import Constraint, Grammar, GrammarCompiler

pytestmark = pytest.mark.ci

VOCAB = 300  # more rows than the tokenizer has ids, as real heads have
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
ANSWER = '{"a":true,"b":"yy"}'


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("{", '"'), ("t", "r"), ("u", "e"), ("tr", "ue"), ('"', "}"), ("<", "/")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("</think>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, [tokenizer().eos_token_id])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def allowed(words: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(unpack_mask, static_argnums=1)(words, VOCAB))


def one_mask(state: Constraint) -> np.ndarray:
    return state.masks([])[0]


def eos() -> int:
    return tokenizer().eos_token_id


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (JSON, ANSWER, '{"a":1'),
        (Grammar("regex", r"(ab|cd)+e"), "abcde", "abd"),
        (Grammar("ebnf", 'start: "x" ("," "x")*'), "x,x", "x,,"),
        (Grammar("ebnf", 'root ::= "a" | "b"+ "c"\n'), "bbc", "bbd"),
    ],
)
def test_masks_allow_what_the_grammar_does(grammar: Grammar, good: str, bad: str) -> None:
    state = compiler().start(grammar)
    for token in ids(good):
        assert allowed(one_mask(state))[token]
        assert state.advance([token]) == 1
    assert allowed(one_mask(state))[eos()] or state.finished
    state = compiler().start(grammar)
    *start, last = ids(bad)
    state.advance(start)
    mask = allowed(one_mask(state))
    assert not mask[last] and not mask[eos()] and not mask[len(tokenizer()) :].any()
    with pytest.raises(InvariantError, match="grammar"):
        state.advance([last])


def test_rows_of_a_block_are_what_plain_decoding_would_see() -> None:
    """Row k equals a fresh matcher's mask after the emitted tokens and d_1 … d_k."""
    tokens = ids(ANSWER)
    for start in range(len(tokens)):
        state = compiler().start(JSON)
        state.advance(tokens[:start])
        drafts = tokens[start : start + 4]
        masks = state.masks(drafts)
        assert masks.shape == (len(drafts) + 1, mask_words(VOCAB)) and masks.dtype == np.int32
        for row in range(len(drafts) + 1):
            fresh = compiler().start(JSON)
            fresh.advance(tokens[: start + row])
            if fresh.finished:
                assert allowed(masks[row]).all()
            else:
                np.testing.assert_array_equal(masks[row], one_mask(fresh))


def test_rows_of_a_tree_are_what_plain_decoding_would_see_on_their_paths() -> None:
    """Right tokens, wrong ones beside them that have children too, and a node that is none."""
    tokens = ids(ANSWER)
    for start in (0, 3, len(tokens) - 2):
        right = (tokens[start : start + 3] + ids("xx"))[:3]
        wrong = ids("q")[0]
        drafts, parents = [right[0], wrong, right[1], wrong, right[2], wrong], [0, 0, 1, 2, 3, -1]
        state = compiler().start(JSON)
        state.advance(tokens[:start])
        masks = state.masks(drafts, parents)
        assert masks.shape[0] == 7
        for row, path in enumerate([[], [0], [1], [0, 2], [1, 3], [0, 2, 4]]):
            fresh = compiler().start(JSON)
            fresh.advance(tokens[:start])
            taken = [drafts[node] for node in path]
            bound = fresh.masks(taken)[-1]
            np.testing.assert_array_equal(masks[row], bound)
        assert allowed(masks[6]).all()
        np.testing.assert_array_equal(masks[0], one_mask(state))  # nothing has moved
    free = compiler().start(Grammar("regex", r"[a-f]{3,9}", marker="<"))
    masks = free.masks(ids("<a<q"), [0, 1, 0, 3])
    assert allowed(masks[0]).all() and not allowed(masks[1])[ids("q")[0]]
    assert not allowed(masks[2])[ids("q")[0]] and allowed(masks[4]).all()


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_B25_the_state_is_that_of_the_emitted_tokens(accepted: int) -> None:
    """Four drafts, of which 0, 1, m - 1 or m stand; then the next mask is a fresh matcher's."""
    tokens = ids(ANSWER)
    state, drafts = compiler().start(JSON), tokens[:4]
    state.masks(drafts)
    state.masks([*drafts[:2], 5, 5])  # a rejected draft leaves no trace either
    emitted = [*drafts[:accepted], tokens[accepted]]
    assert state.advance(emitted) == len(emitted)
    fresh = compiler().start(JSON)
    for token in emitted:
        fresh.advance([token])
    np.testing.assert_array_equal(one_mask(state), one_mask(fresh))
    assert not state.finished


def test_rows_behind_an_impossible_draft_are_free_and_its_own_row_forbids_it() -> None:
    state = compiler().start(JSON)
    tokens = ids(ANSWER)
    masks = allowed(state.masks([tokens[0], ids("?")[0], tokens[1], tokens[2]]))
    assert not masks[1][ids("?")[0]] and not masks[1].all()
    assert masks[2:].all()


def test_B23_a_schema_that_closes_inside_a_block_ends_the_answer() -> None:
    tokens = ids(ANSWER)
    junk = ids("junk")
    for _ in range(100):
        state = compiler().start(JSON)
        state.advance(tokens[:-2])
        drafts = [*tokens[-2:], *junk]  # it closes at slot 2 of a block of 6
        masks = allowed(state.masks(drafts))
        assert masks[0][tokens[-2]] and masks[1][tokens[-1]] and masks[2:].all()
        assert state.advance([*drafts, junk[0]]) == 2
        assert state.finished
        assert allowed(state.masks(junk)).all()
        assert state.advance(junk) == 0


def test_B23_an_end_of_sequence_accepted_inside_the_block() -> None:
    state = compiler().start(Grammar("regex", "a+"))
    drafts = [*ids("aa"), eos(), *ids("aa")]
    masks = allowed(state.masks(drafts))
    assert not masks[0][eos()] and masks[1][eos()] and masks[2][eos()]
    assert state.advance(drafts) == 3
    assert state.finished


@pytest.mark.parametrize("marker", ["</think>", "go:"])
def test_a_marker_inside_the_block_switches_the_grammar_on(marker: str) -> None:
    state = compiler().start(Grammar("json_schema", JSON.text, marker))
    free, mark, bound = ids("ab{"), ids(marker), ids(ANSWER)
    masks = allowed(state.masks([*free, *mark, *bound[:2]]))
    first = len(free) + len(mark)
    assert masks[:first].all()
    fresh = compiler().start(JSON)
    for row in range(3):
        np.testing.assert_array_equal(masks[first + row], allowed(one_mask(fresh)))
        fresh.advance(bound[row : row + 1])
    assert allowed(one_mask(state)).all()  # nothing of it was emitted
    state.advance([*free, *mark[:-1]])
    assert allowed(one_mask(state)).all()
    state.advance(mark[-1:])
    np.testing.assert_array_equal(one_mask(state), one_mask(compiler().start(JSON)))


def test_a_marker_may_span_tokens_and_false_starts() -> None:
    state = compiler().start(Grammar("regex", "x+", "aab"))
    assert state.advance(ids("aaa")) == 3 and allowed(one_mask(state)).all()
    state.advance(ids("b"))
    assert allowed(one_mask(state)).sum() == 1
    short = compiler().start(Grammar("regex", "x+", "m"))
    short.advance(ids("am"))
    assert allowed(one_mask(short)).sum() == 1


def test_rollback_restores_every_earlier_state() -> None:
    tokens = [*ids("think"), *ids("</think>"), *ids(ANSWER)]
    for count in range(len(tokens) + 1):
        state = compiler().start(Grammar("json_schema", JSON.text, "</think>"))
        assert state.advance(tokens) == len(tokens) and state.finished
        state.rollback(count)
        fresh = compiler().start(Grammar("json_schema", JSON.text, "</think>"))
        fresh.advance(tokens[: len(tokens) - count])
        np.testing.assert_array_equal(state.masks([]), fresh.masks([]))
        assert state.advance(tokens[len(tokens) - count :]) == count and state.finished
    for wrong in (-1, len(tokens) + 1):
        with pytest.raises(InvariantError, match="take back"):
            state.rollback(wrong)


def test_random_walks_within_the_masks_give_valid_answers() -> None:
    """Tokens drawn from the masks of drafted blocks, whatever is drafted: the text always fits the grammar."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        state, answer = compiler().start(Grammar("regex", "(ab|c[de]{2,3})+")), []
        while len(answer) < 12:
            drafts = rng.choice(ids("abcde"), 3).tolist()
            masks = allowed(state.masks(drafts))
            emitted: list[int] = []
            for row in range(4):
                if row < 3 and masks[row][drafts[row]] and rng.random() < 0.8:
                    emitted.append(drafts[row])
                    continue
                choices = [token for token in np.flatnonzero(masks[row]) if token != eos()]
                emitted.append(int(rng.choice(choices)))
                break
            answer += emitted
            assert state.advance(emitted) == len(emitted)
        while not allowed(one_mask(state))[eos()]:
            token = int(np.flatnonzero(allowed(one_mask(state)))[0])
            answer.append(token)
            state.advance([token])
        assert re.fullmatch("(ab|c[de]{2,3})+", tokenizer().decode(answer))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"type": "nope"}'),
        Grammar("regex", "a("),
        Grammar("ebnf", "start: x"),
        Grammar("ebnf", "root ::= ("),
        Grammar("yaml", "a"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_one_line(grammar: Grammar) -> None:
    with pytest.raises(RequestError, match="grammar") as caught:
        compiler().start(grammar)
    assert "\n" not in str(caught.value)


def test_compiled_grammars_are_kept_and_states_are_apart() -> None:
    one, other = compiler().start(JSON), compiler().start(JSON)
    before = one_mask(other)
    one.advance(ids(ANSWER))
    np.testing.assert_array_equal(one_mask(other), before)
    np.testing.assert_array_equal(one_mask(compiler().start(JSON)), before)
    fresh = GrammarCompiler(tokenizer(), VOCAB, [eos()])
    for index in range(40):
        fresh.start(Grammar("regex", f"a{{{index + 1}}}"))
    assert len(fresh._compiled) == 32


def test_without_the_library_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(RequestError, match=r"jaxspec-decoding\[grammar\]"):
        GrammarCompiler(tokenizer(), VOCAB, [eos()])
