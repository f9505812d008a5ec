"""Constrained answers in the engine, drafted and beside free ones: ids as one matcher a token would have them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxspec.decoding.processors import mask_words
from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import RequestError
from jaxspec.serving.engine import Engine
from jaxspec.serving.grammar import Grammar
from tests.helpers.worlds import script, scripted, table_target
from tests.serving.test_grammar import JSON, VOCAB, compiler, eos, ids

pytestmark = pytest.mark.ci

M, POSITIONS = 3, 80
GRAMMARS = (JSON, Grammar("regex", r"(ab|cd)+e"), Grammar("regex", r"[a-f]{3,9}", marker="</think>"), None)


def table() -> np.ndarray:
    """Letters, and the end of a thinking block, are likely: grammars come to their end, and drafts are often right."""
    rng = np.random.default_rng(4)
    made = rng.normal(size=(VOCAB, POSITIONS, VOCAB)).astype(np.float32)
    made[:, :, ids("abcdef</think>")] += 1.5
    return made


TABLE = table()


@pytest.fixture(scope="module")
def engine() -> Engine:
    accepted = np.random.default_rng(1).integers(0, M + 1, (VOCAB, POSITIONS))
    draft = scripted(TABLE, M, script(TABLE, M, accepted))
    return Engine(
        table_target(TABLE, eos=[eos()]), draft, num_slots=3, max_context=POSITIONS, prefill_chunk=8, page_size=4,
        slot_buckets=(3,), num_pages=31, grammars=compiler(),
    )  # fmt: skip


def by_hand(prompt: list[int], room: int, grammar: Grammar | None) -> tuple[list[int], str]:
    """Greedy decoding with a fresh matcher a token."""
    emitted: list[int] = []
    while len(emitted) < room:
        row = TABLE[(prompt + emitted)[-1], len(prompt) + len(emitted) - 1].copy()
        if grammar is not None:
            state = compiler().start(grammar)
            state.advance(emitted)
            words = state.masks([])[0, : mask_words(VOCAB)].view(np.uint32)
            allowed = (words[np.arange(VOCAB) // 32] >> (np.arange(VOCAB) % 32)) & 1
            row[allowed == 0] = -np.inf
        emitted.append(int(np.argmax(row)))
        if emitted[-1] == eos():
            return emitted, "stop"
        if grammar is not None:
            state = compiler().start(grammar)
            state.advance(emitted)
            if state.finished:
                return emitted, "stop"
    return emitted, "length"


def test_B23_B25_constrained_answers_are_those_of_plain_decoding(engine):
    rng = random.Random(5)
    asked = []
    for index in range(40):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(max_new_tokens=rng.randint(1, 45))
        asked.append((prompt, params, GRAMMARS[index % len(GRAMMARS)]))
    waiting, owners, found, reasons, gone = list(enumerate(asked)), {}, {}, {}, set()
    while waiting or engine.live:
        while waiting and engine.free_slots and rng.random() < 0.7:
            index, (prompt, params, grammar) = waiting.pop(0)
            owners[engine.admit(prompt, params, grammar=grammar)] = index
        for event in engine.step():
            assert event.handle not in gone
            found.setdefault(event.handle, []).extend(event.tokens)
            if event.finish_reason is not None:
                reasons[event.handle] = event.finish_reason
        running = [handle for handle in owners if handle not in reasons and handle not in gone]
        if running and rng.random() < 0.02:
            gone.add(rng.choice(running))
            engine.cancel(max(gone))
            for handle in gone:
                engine.cancel(handle)
    stops = 0
    for handle, reason in reasons.items():
        prompt, params, grammar = asked[owners[handle]]
        assert (found[handle], reason) == by_hand(prompt, params.max_new_tokens, grammar)
        stops += reason == "stop" and grammar is not None
    assert stops > 5
    assert engine.preemptions > 0
    assert engine.compile_count == 0


def test_a_grammar_that_nobody_can_serve_is_refused(engine):
    with pytest.raises(RequestError, match=r"grammar.regex"):
        engine.admit([1], SamplingParams(), grammar=Grammar("regex", "(("))
    bare = Engine(table_target(TABLE), num_slots=1, max_context=16)
    with pytest.raises(RequestError, match="without grammars"):
        bare.admit([1], SamplingParams(), grammar=JSON)
    assert engine.free_slots == 3
