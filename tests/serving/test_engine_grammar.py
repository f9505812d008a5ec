"""Constrained answers, by chains and trees, beside free ones and through gRPC: as one matcher a token has them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxspec.decoding.processors import mask_words
from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import RequestError
from jaxspec.serving.client import Client
from jaxspec.serving.engine import Engine
from jaxspec.serving.grammar import Grammar
from jaxspec.serving.server import Server
from jaxspec.serving.text import TokenizerCodec
from tests.helpers.scripted_runner import PATIENCE
from tests.helpers.worlds import ScriptedTree, script, scripted, table_target
from tests.serving.test_engine_server import idle, served
from tests.serving.test_grammar import ANSWER, JSON, VOCAB, compiler, eos, ids, tokenizer

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


@pytest.fixture(scope="module", params=["chain", "tree"])
def engine(request) -> Engine:
    accepted = np.random.default_rng(1).integers(0, M + 1, (VOCAB, POSITIONS))
    draft = scripted(TABLE, M, script(TABLE, M, accepted))
    if request.param == "tree":
        draft = dataclasses.replace(draft, drafter=ScriptedTree(draft.drafter))
    return Engine(
        table_target(TABLE, eos=[eos()]), draft, num_slots=3, max_context=POSITIONS, prefill_chunk=8, page_size=4,
        slot_buckets=(3,), num_pages=31, grammars=compiler(), codec=TokenizerCodec(tokenizer()), max_logprobs=2,
        pause_drafting=False,
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


def test_overlap_changes_neither_tokens_nor_accept_lengths(engine):
    """Round by round, with and without grammars, greedy and drawn with a seed."""
    rng, asked = random.Random(8), []
    for index in range(12):
        drawn = {"temperature": 0.8, "seed": index} if index % 3 == 2 else {}
        grammar = GRAMMARS[index % len(GRAMMARS)]
        asked.append(([rng.randrange(256) for _ in range(rng.randint(1, 30))], SamplingParams(**drawn), grammar))
    heard = {}
    for lag in (1, 0):
        engine.lag = lag
        engine.drop_prefixes()
        waiting, owners, events = list(enumerate(asked)), {}, {}
        while waiting or engine.live:
            while waiting and engine.free_slots:
                index, (prompt, params, grammar) = waiting.pop(0)
                owners[engine.admit(prompt, params, grammar=grammar)] = index
            for event in engine.step():
                said = event.tokens, event.accepted, event.proposed, event.finish_reason
                events.setdefault(owners[event.handle], []).append(said)
            assert len(engine._flights) <= lag
        heard[lag] = events
    engine.lag = 1
    assert heard[0] == heard[1]
    assert len({accepted for events in heard[0].values() for _, accepted, _, _ in events}) > 2


def test_a_grammar_that_nobody_can_serve_is_refused(engine):
    with pytest.raises(RequestError, match=r"grammar.regex"):
        engine.admit([1], SamplingParams(), grammar=Grammar("regex", "(("))
    bare = Engine(table_target(TABLE), num_slots=1, max_context=16)
    with pytest.raises(RequestError, match="without grammars"):
        bare.admit([1], SamplingParams(), grammar=JSON)
    assert engine.free_slots == 3


# -- through gRPC -----------------------------------------------------------------------------------------------------


def wire(grammar: Grammar | None) -> dict[str, Any]:
    return {} if grammar is None else {"grammar": {grammar.kind: grammar.text, "marker": grammar.marker}}


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.sum(np.exp(row - row.max())))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with served(engine, TokenizerCodec(tokenizer()), compiler()) as running:
        yield running


def test_B23_what_follows_the_end_of_a_grammar_is_not_heard_of(engine, server):
    """100 times; the table would go on, and so do the drafts of the block in which the answer closes."""
    before = engine.compile_count
    forms = (JSON, Grammar("regex", "(ab|cd)e"), Grammar("ebnf", 'start: "x" ("," "x")*'))
    jobs = [(form, [int(token) for token in np.random.default_rng(seed).integers(0, 256, 1 + seed % 20)])
            for seed in range(34) for form in forms][:100]  # fmt: skip

    def ask(job: tuple[Grammar, list[int]]) -> bool:
        form, prompt = job
        with Client(server.address) as client:
            got = client.complete(prompt, max_new_tokens=40, logprobs=0, timeout=PATIENCE, **wire(form))
        assert (got.token_ids, got.finish_reason) == by_hand(prompt, 40, form)
        assert [one["token_id"] for one in got.logprobs] == got.token_ids
        assert got.usage["completion_tokens"] == len(got.token_ids)
        shown = got.token_ids[:-1] if got.token_ids[-1] == eos() else got.token_ids
        assert got.text == tokenizer().decode(shown)
        return got.finish_reason == "stop"

    with ThreadPoolExecutor(6) as pool:
        stopped = sum(pool.map(ask, jobs))
    assert stopped > 60
    assert idle(server) and engine.compile_count == before


def test_B25_drafts_cancels_and_preemptions_leave_every_state_right(engine, server):
    """Streams that end early, and streams whose every token, mask and log probability is that of plain decoding."""
    rng, before = random.Random(6), engine.preemptions
    jobs = []
    for index in range(48):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        jobs.append(
            (prompt, rng.randint(10, 45), GRAMMARS[index % len(GRAMMARS)], rng.choice([None, None, None, 1, 3]))
        )

    def ask(job: tuple[list[int], int, Grammar | None, int | None]) -> bool:
        prompt, room, grammar, keep = job
        heard, said, reason = [], [], None
        with Client(server.address) as client:
            stream = client.generate(prompt, max_new_tokens=room, logprobs=2, timeout=PATIENCE, **wire(grammar))
            with contextlib.closing(stream):
                for count, response in enumerate(stream, start=1):
                    heard += response.token_ids
                    said += response.logprobs
                    reason = {0: None, 1: "stop", 2: "length"}[response.finish_reason]
                    if count == keep:
                        break
        expected, why = by_hand(prompt, room, grammar)
        assert heard == expected[: len(heard)] and (reason is None or (heard, reason) == (expected, why))
        assert reason is not None or keep is not None
        for index, (token, one) in enumerate(zip(heard, said, strict=True)):
            raw = log_softmax(TABLE[(prompt + heard)[len(prompt) + index - 1], len(prompt) + index - 1])
            assert one.token_id == token and one.logprob == pytest.approx(raw[token], abs=1e-4)
            best = np.argsort(-raw, kind="stable")
            assert one.rank == best.tolist().index(token) + 1
            assert [top.token_id for top in one.top] == best[:2].tolist()
        return reason is not None

    with ThreadPoolExecutor(6) as pool:
        ended = sum(pool.map(ask, jobs))
    assert 24 < ended < 48 and engine.preemptions > before
    assert idle(server)
    engine.drop_prefixes()
    assert engine.held_pages == 0


def test_a_forced_answer_comes_whole_and_a_wrong_grammar_is_refused(server):
    with Client(server.address) as client:
        got = client.complete(ids("ab"), max_new_tokens=40, grammar={"regex": ANSWER.replace("{", r"\{")})
        assert (got.text, got.finish_reason) == (ANSWER, "stop")
        for wrong in ({"regex": "(("}, {"json_schema": "{"}, {}):
            with pytest.raises(RequestError, match=r"sampling\.grammar"):
                client.complete(ids("ab"), grammar=wrong)
