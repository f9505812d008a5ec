"""`make test-slow-identity`: 8 prompts x 512 tokens of SmolLM2, with and without drafters, token for token."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.checkpoints.target import load_target
from jaxspec.decoding.counters import repeated_bigram_share
from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from tests.decoding.smollm2_pair import fresh_draft, recorded
from tests.helpers.worlds import reciter

PROMPTS, NEW_TOKENS, SEED, BLOCK = 8, 512, 0, 5


def identity(prompt_count: int, new_tokens: int, record: Callable[[str, Any], None]) -> None:
    """Fresh DFlash and DSpark drafts (nearly all rejected), and one that recites the answer with a mistake a round
    (every accept length occurs), against decoding without a drafter. End-of-sequence ids are ignored."""
    target = load_target("smollm2", "float32")
    prompts = [record["prompt_ids"] for record in recorded()[:prompt_count]]
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    def answer(name: str, draft: Any) -> list[Any]:
        start = time.perf_counter()
        context = max(map(len, prompts)) + new_tokens
        done = generate(SlotRunner(target, draft, num_slots=prompt_count, max_context=context), prompts, params)
        record(f"{name}_seconds", round(time.perf_counter() - start, 1))
        return done

    plain = answer("none", None)
    share = repeated_bigram_share([one.tokens for one in plain])
    record("tokens", sum(len(one.tokens) for one in plain))
    record("repeated_bigram_share", round(share, 4))
    drafts = {method: fresh_draft(target, method, BLOCK, SEED) for method in ("dflash", "dspark")}
    known = [[*one.prompt_ids, *one.tokens] for one in plain]
    drafts["reciter"] = reciter(target.config.vocab_size, BLOCK, known)
    for name, draft in drafts.items():
        done = answer(name, draft)
        differing = sum(a.tokens != b.tokens for a, b in zip(plain, done, strict=True))
        m = draft.drafter.num_proposals
        accepted = collections.Counter(r for one in done for r in one.accepted)
        record(f"{name}_differing_answers", differing)
        record(f"{name}_tau", round(count(done, m).tau, 4))
        record(f"{name}_rounds_by_accepted", [accepted[r] for r in range(m + 1)])
        assert differing == 0, f"{name}: {differing} of {prompt_count} answers differ from decoding without a drafter"
    assert all(accepted[r] for r in range(BLOCK + 1)), accepted


@pytest.mark.slow("identity", covers=("jaxspec/decoding", "jaxspec/drafters", "jaxspec/models", "pallas_kernels"))
def test_B14_identity_on_a_real_model(record_property: Callable[[str, Any], None]) -> None:
    def record(name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        record_property(name, value)

    record("seed", SEED)
    record("prompts", PROMPTS)
    identity(PROMPTS, NEW_TOKENS, record)
