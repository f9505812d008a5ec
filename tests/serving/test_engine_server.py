"""The server over the engine, through gRPC: where answers end, what they say, what cancelling frees, what is counted.

The table target speaks a text that is known by hand; the lane of a prompt's last token decides how many drafts a round
accepts: 0, 1, 3 or all 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.serving.client import Answer, Client
from jaxspec.serving.engine import Engine
from jaxspec.serving.facts import Facts, Loaded
from jaxspec.serving.grammar import GrammarCompiler
from jaxspec.serving.server import Server
from jaxspec.serving.text import Codec
from tests.helpers.scripted_runner import PATIENCE
from tests.helpers.worlds import LANE, by_lane, script, scripted, spoken_table, table_target

pytestmark = pytest.mark.ci

M, LANES, POSITIONS = 4, 4, 64
VOCAB, END, EOS_CODE = LANES * LANE, 40, 6
ACCEPTED = (0, 1, 3, M)
CODES = np.random.default_rng(0).integers(0, EOS_CODE, (LANES, POSITIONS))
CODES[:, END] = EOS_CODE
TABLE = spoken_table(CODES)
EOS = [lane * LANE + EOS_CODE for lane in range(LANES)]


class Letters:
    """A codec: id i is the letter A + i."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in ids)


def spoken(lane: int, start: int, count: int = POSITIONS) -> list[int]:
    """What follows a prompt of `start` tokens, to the end of the context."""
    return [lane * LANE + int(code) for code in CODES[lane, start : min(start + count, POSITIONS)]]


def prompt(lane: int, length: int) -> list[int]:
    return [(7 * index + length) % EOS_CODE for index in range(length - 1)] + [lane * LANE]


@contextlib.contextmanager
def served(engine: Engine, codec: Codec, grammars: GrammarCompiler | None = None) -> Iterator[Server]:
    """A server on a loopback port, in a thread, around a warm engine."""
    facts = Facts(
        "table", "scripted", "scripted", engine.vocab_size, engine.max_context, engine.num_slots, engine.num_proposals
    )
    server = Server(lambda check: Loaded(engine, codec, facts, grammars), say=lambda line: None, drain_seconds=5.0)
    thread = threading.Thread(target=lambda: asyncio.run(server.run()), name="test-server")
    thread.start()
    try:
        assert server.worker.wait_for(lambda: server.worker.facts is not None, PATIENCE)
        with Client(server.address) as client:
            client.wait_ready(PATIENCE)
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def idle(server: Server) -> bool:
    return server.worker.wait_for(lambda: server.worker.load() == (0, 0, 0), PATIENCE)


@pytest.fixture(scope="module")
def engine() -> Engine:
    draft = scripted(TABLE, M, script(TABLE, M, by_lane(ACCEPTED)))
    made = Engine(
        table_target(TABLE, eos=EOS), draft, num_slots=4, max_context=POSITIONS, prefill_chunk=8, page_size=4,
        slot_buckets=(4,), max_logprobs=3, codec=Letters(), pause_drafting=False, cache_fill=float("nan"),
    )  # fmt: skip
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with served(engine, Letters()) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected


def check_end(answer: Answer, ids: list[int], reason: str) -> None:
    assert (answer.token_ids, answer.finish_reason) == (ids, reason)
    assert answer.usage["completion_tokens"] == len(ids)
    assert [one["token_id"] for one in answer.logprobs] == ids


@pytest.mark.parametrize("lane", range(LANES))
def test_B15_B16_a_stop_string_ends_text_ids_logprobs_and_usage(client, lane):
    start, codec = 3, Letters()
    answer = spoken(lane, start, 30)
    whole = codec.decode(answer)
    jobs = []
    for at in (0, 1, 3, 4, 5, 6, 11):
        for size in (1, 2, 3, 6):
            jobs.append([whole[at : at + size]])
    jobs += [[whole[9:12], whole[4:6]], [whole[7:9], whole[8:9]], ["zz", whole[13:15]]]

    def ask(stops: list[str]) -> None:
        got = client.complete(
            prompt(lane, start), stop=stops, max_new_tokens=30, ignore_eos=True, logprobs=0, timeout=PATIENCE
        )
        cut, begin = min((whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole)
        check_end(got, answer[:cut], "stop")
        assert got.text == whole[:begin]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, jobs))


@pytest.mark.parametrize("lane", range(LANES))
def test_B17_stop_and_limit_in_one_block(client, lane):
    start = 5
    answer = spoken(lane, start, 30)
    for at in (2, 5):
        stop = answer[at]
        first = answer.index(stop)
        for limit in (0, 1, first, first + 1, first + 2, 9):
            got = client.complete(
                prompt(lane, start), stop_token_ids=[stop], max_new_tokens=limit, ignore_eos=True, logprobs=0
            )
            stops = limit > first
            check_end(got, answer[: first + 1 if stops else limit], "stop" if stops else "length")
            assert got.text == Letters().decode(answer[: first if stops else limit])


@pytest.mark.parametrize("lane", range(LANES))
def test_B19_an_end_of_sequence_at_every_slot_of_a_block(client, lane):
    for index in range(M + 3):
        start = END - index
        answer = spoken(lane, start)
        got = client.complete(prompt(lane, start), logprobs=0)
        check_end(got, answer[: index + 1], "stop")
        assert got.text == Letters().decode(answer[:index])
        going_on = client.complete(prompt(lane, start), ignore_eos=True, logprobs=0)
        check_end(going_on, answer, "length")
        assert going_on.context_limit and going_on.text == Letters().decode(answer)
        early = client.complete(prompt(lane, start), min_new_tokens=index + 1, max_new_tokens=index + 1, logprobs=0)
        assert early.token_ids[:index] == answer[:index] and early.token_ids[index] != answer[index]


def test_penalties_and_bias_reach_the_logits(client):
    start = 4
    answer = spoken(0, start)
    banned = client.complete(prompt(0, start), logit_bias={answer[0]: -100.0}, max_new_tokens=1)
    assert banned.token_ids != answer[:1]
    once = client.complete(prompt(0, start), presence_penalty=2.0, repetition_penalty=9.0, max_new_tokens=12)
    again = client.complete(prompt(0, start), frequency_penalty=2.0, max_new_tokens=20, ignore_eos=True)
    assert once.token_ids != answer[:12] and again.token_ids != answer[:20]


def test_log_probabilities_are_those_of_the_table(client):
    asked = prompt(1, 9)
    got = client.complete(asked, max_new_tokens=7, logprobs=2, prompt_logprobs=1)
    for position, one in enumerate([*got.prompt_logprobs, *got.logprobs]):
        row = TABLE[(asked + got.token_ids)[position], position].astype(np.float64)
        normal = row - np.log(np.exp(row).sum())
        best = np.argsort(-normal, kind="stable")
        assert one["token_id"] == (asked + got.token_ids)[position + 1]
        assert one["logprob"] == pytest.approx(normal[one["token_id"]], abs=1e-4)
        assert one["rank"] == best.tolist().index(one["token_id"]) + 1
        count = 1 if position < len(asked) - 1 else 2
        assert [top["token_id"] for top in one["top"]] == best[:count].tolist()
    assert len(got.prompt_logprobs) == 8 and len(got.logprobs) == 7
    plain = client.complete(asked, max_new_tokens=7)
    assert plain.logprobs == plain.prompt_logprobs == [] and plain.token_ids == got.token_ids


def test_B27_n_answers_share_the_prompt(client, engine, server):
    asked = prompt(2, 21)
    before = client.status()
    answers = client.complete_all(asked, n=4, max_new_tokens=17, logprobs=0)
    after = client.status()
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    for answer in answers:
        check_end(answer, spoken(2, 21, 17), "length")
        assert answer.usage["prompt_tokens"] == 21
    assert len({(one.usage["rounds"], one.usage["accepted"], one.usage["proposed"]) for one in answers}) == 1
    assert after.prefix_hits - before.prefix_hits >= 3 and after.prefix_rows - before.prefix_rows >= 3 * 20
    with pytest.raises(RequestError, match=r"sampling\.n"):
        client.complete_all(asked, n=5)


def test_seeded_samples_differ_from_each_other_and_not_from_themselves(client):
    asked = {"n": 3, "seed": 5, "temperature": 5.0, "max_new_tokens": 12, "ignore_eos": True}
    first, second = (client.complete_all(prompt(0, 6), **asked) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert len({tuple(one.token_ids) for one in first}) == 3


@pytest.mark.parametrize("lane", range(LANES))
def test_B38_usage_counts_rounds_without_the_prefills_token(client, lane):
    rounds, accepted = 5, ACCEPTED[lane]
    usage = client.complete(prompt(lane, 6), max_new_tokens=1 + rounds * (accepted + 1), ignore_eos=True).usage
    assert (usage["rounds"], usage["accepted"], usage["proposed"]) == (rounds, rounds * accepted, rounds * M)
    assert usage["prompt_tokens"] == 6 and usage["queue_seconds"] >= 0 < usage["prefill_seconds"]


def test_times_to_the_first_token_and_per_token_are_in_the_usage(client):
    began = time.monotonic()
    first = None
    for response in client.generate(prompt(0, 30), max_new_tokens=20, ignore_eos=True):
        first = time.monotonic() - began if first is None else first
        usage = response.usage
    assert 0 < usage.queue_seconds + usage.prefill_seconds <= first


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"logprobs": 4}, "logprobs"),
        ({"grammar": {"regex": "a+"}}, "sampling.grammar"),
        ({"allowed_token_ids": [1]}, "sampling.allowed_token_ids"),
        ({"stop_token_ids": list(range(9)), "min_new_tokens": 1}, "stop_token_ids"),
    ],
)
def test_B08_what_the_engine_cannot_serve_is_refused_by_name(client, server, sampling, word):
    with pytest.raises(RequestError, match=word):
        client.complete([1, 2], **sampling)
    assert idle(server)


def test_B33_a_cancel_in_every_phase_frees_slot_and_pages(client, engine, server):
    holders = [client.generate(prompt(0, 30), max_new_tokens=30, ignore_eos=True) for _ in range(4)]
    firsts = [next(holder) for holder in holders]
    queued = client.generate(prompt(1, 5), max_new_tokens=30)
    pool = ThreadPoolExecutor(1)
    pending = pool.submit(list, queued)
    for holder in holders:
        holder.close()
        holder.close()
    assert [token for response in pending.result(PATIENCE) for token in response.token_ids] == spoken(1, 5, 30)
    assert len(firsts) == 4 and idle(server)
    assert engine.free_slots == 4
    engine.drop_prefixes()
    assert engine.held_pages == 0


def test_B33_random_cancels_leave_nothing_behind(engine, server):
    rng = random.Random(3)
    jobs = [(rng.randrange(LANES), rng.randint(1, 30), rng.choice([0, 0, 1, 2, None])) for _ in range(120)]

    def ask(job: tuple[int, int, int | None]) -> None:
        lane, length, keep = job
        with Client(server.address) as client:
            heard: list[int] = []
            stream = client.generate(prompt(lane, length), max_new_tokens=25, ignore_eos=True)
            if keep == 0:  # a deadline that ends it in the queue, the prefill or a round
                with contextlib.suppress(Exception):
                    list(client.generate(prompt(lane, length), max_new_tokens=25, timeout=0.004))
                return
            for count, response in enumerate(stream, start=1):
                heard += response.token_ids
                if count == keep:
                    break
            stream.close()
            assert heard == spoken(lane, length, 25)[: len(heard)]
            assert keep is not None or len(heard) == min(25, POSITIONS - length)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, jobs))
    assert idle(server)
    assert engine.free_slots == 4
    engine.drop_prefixes()
    assert engine.held_pages == 0


def test_the_status_counts(client, engine, server):
    assert idle(server)
    before = client.status()
    assert (before.state, before.waiting, before.running) == ("serving", 0, 0)
    assert before.executables == engine.num_executables and before.compilations == 0
    assert before.pages == 4 * math.ceil(POSITIONS / 4)
    client.complete(prompt(0, 7), max_new_tokens=6, ignore_eos=True)
    after = client.status()
    assert after.rounds - before.rounds >= 6 and after.drafted_rounds - before.drafted_rounds >= 5
    assert after.rows - before.rows >= 5 * 4 * (M + 1)
    assert after.pages_held >= 1
