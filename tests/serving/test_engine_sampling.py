"""Every sampling feature through the engine, with a drafter, beside others, and after a preemption: as by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import RequestError
from jaxspec.serving.engine import Engine
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import LANE, by_lane, random_table, script, scripted, table_target

pytestmark = pytest.mark.ci

M, LANES, POSITIONS, EOS = 4, 4, 96, 31
TABLE = random_table(LANES, POSITIONS, seed=11)
VOCAB = LANES * LANE


class Letters:
    """A codec: id i is the letter A + i."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in ids)


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    made = {}
    for name, options in {"roomy": {}, "preempting": {"num_pages": 31}}.items():
        draft = scripted(TABLE, M, script(TABLE, M, by_lane((0, 1, 3, M))))
        target = table_target(TABLE, eos=[EOS])
        made[name] = Engine(
            target, draft, num_slots=4, max_context=POSITIONS, prefill_chunk=8, page_size=4, slot_buckets=(4,),
            codec=Letters(), max_logprobs=3, cache_fill=float("nan"), **options,
        )  # fmt: skip
    return made


def ends_of(params: SamplingParams) -> set[int]:
    return set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})


def by_hand(prompt: list[int], params: SamplingParams) -> tuple[list[int], list[np.ndarray], str]:
    """Greedy decoding with each rule spelled out: ids, the raw rows that they came from, and the reason."""
    rules, emitted, raw = params.rules, [], []
    ends = ends_of(params)
    while True:
        if len(emitted) == min(params.max_new_tokens, POSITIONS - len(prompt)):
            return emitted, raw, "length"
        token, position = (prompt + emitted)[-1], len(prompt) + len(emitted) - 1
        row = TABLE[token, position].astype(np.float64)
        raw.append(TABLE[token, position])
        if len(emitted) < rules.min_tokens:
            row[list(ends)] = -np.inf
        for index, value in rules.logit_bias.items():
            row[index] += value
        for index in range(VOCAB):
            if index in prompt or index in emitted:
                row[index] = row[index] / rules.repetition_penalty if row[index] > 0 else row[index] * (
                    rules.repetition_penalty
                )  # fmt: skip
            row[index] -= rules.frequency_penalty * emitted.count(index)
            row[index] -= rules.presence_penalty * (index in emitted)
        emitted.append(int(np.argmax(row)))
        if len(emitted) > rules.min_tokens and emitted[-1] in ends:
            return emitted, raw, "stop"
        text = Letters().decode(emitted)
        if len(emitted) > rules.min_tokens and any(stop in text for stop in params.stop):
            return emitted, raw, "stop"


def random_params(rng: random.Random) -> SamplingParams:
    most = rng.randint(1, 40)
    rules = LogitRules(
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.8]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-4, 4) for _ in range(rng.choice([0, 3]))},
        min_tokens=rng.choice([0, min(5, most)]),
    )
    stop = tuple("".join(chr(65 + rng.randrange(VOCAB)) for _ in range(rng.choice([1, 2]))) for _ in range(2))
    return SamplingParams(
        max_new_tokens=most,
        rules=rules,
        stop=stop if rules.min_tokens == 0 and rng.random() < 0.5 else (),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1]))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 2]),
    )


@pytest.mark.parametrize("name", [pytest.param("roomy", marks=REPEATS), "preempting"])
def test_B16_every_rule_equals_decoding_by_hand(engines, name):
    engine, rng = engines[name], random.Random(2)
    before = engine.preemptions
    asked = []
    for _ in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        asked.append((prompt, random_params(rng)))
    waiting, owners, answers = list(enumerate(asked)), {}, {}
    while waiting or engine.live:
        while waiting and engine.free_slots and rng.random() < 0.7:
            index, request = waiting.pop(0)
            owners[engine.admit(*request)] = index
        for event in engine.step():
            answers.setdefault(owners[event.handle], []).append(event)
    for index, (prompt, params) in enumerate(asked):
        tokens, raw, reason = by_hand(prompt, params)
        events = answers[index]
        assert [token for event in events for token in event.tokens] == tokens
        assert events[-1].finish_reason == reason
        if params.stop:
            by_id = reason == "stop" and tokens[-1] in ends_of(params) and len(tokens) > params.rules.min_tokens
            text = Letters().decode(tokens[:-1] if by_id else tokens)  # a stop id has no text
            cut = min((text.find(stop) for stop in params.stop if stop in text), default=len(text))
            assert "".join(event.text for event in events) == text[:cut]
        said = [item for event in events for item in event.logprobs]
        assert [item.token for item in said] == (tokens if params.logprobs is not None else [])
        for item, row in zip(said, raw, strict=False):
            row = row.astype(np.float64)
            normal = row - np.log(np.sum(np.exp(row - row.max()))) - row.max()
            assert item.logprob == pytest.approx(normal[item.token], abs=1e-4)
            best = np.argsort(-normal, kind="stable")[: params.logprobs]
            assert [token for token, _ in item.top] == best.tolist()
    assert engine.compile_count == 0
    assert (engine.preemptions > before) == (name == "preempting")


def test_prompt_logprobs_are_those_of_the_table(engines):
    engine = engines["roomy"]
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 3, 2, 1, 2, 3]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=True)
    for _ in range(2):  # a second time, when a prefix of the prompt is cached
        engine.admit(prompt, params)
        events = []
        while engine.live:
            events += engine.step()
        said = events[0].prompt_logprobs
        assert [item.token for item in said] == prompt[1:]
        for position, item in enumerate(said):
            row = TABLE[prompt[position], position].astype(np.float64)
            normal = row - np.log(np.sum(np.exp(row - row.max()))) - row.max()
            assert item.logprob == pytest.approx(normal[prompt[position + 1]], abs=1e-4)
        assert all(not event.prompt_logprobs for event in events[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": 4}, "logprobs: found 4, expected at most 3"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"stop": ("",)}, "stop: found"),
        ({"rules": LogitRules(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"rules": LogitRules(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"stop_token_ids": tuple(range(9))}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(engines, changes: dict[str, Any], message):
    rules = changes.get("rules", LogitRules(min_tokens=1) if "stop_token_ids" in changes else LogitRules())
    with pytest.raises(RequestError, match=message):
        engines["roomy"].admit([1, 2], SamplingParams(**{**changes, "rules": rules}))
    assert engines["roomy"].live == 0
