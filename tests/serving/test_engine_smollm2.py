"""The engine against the offline runner on a real target: the same ids, drafted and beside each other."""

from __future__ import annotations

from jaxspec.checkpoints.target import load_target
from jaxspec.checkpoints.tokenizer import load_tokenizer
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.serving.engine import Engine
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import bigram_draft

pytestmark = REPEATS


def test_four_prompts_equal_the_offline_runner():
    target = load_target("smollm2", "float32")
    draft, tokenizer = bigram_draft(target), load_tokenizer(target.directory)
    texts = ["The capital of France is", "def add(a, b):", "Once upon a time", "1 2 3 4 5 6 7"]
    prompts = [list(tokenizer.encode(text)) for text in texts]
    sizes = {"max_context": 64, "prefill_chunk": 16, "page_size": 8}
    lone = generate(SlotRunner(target, draft, num_slots=1, **sizes), prompts, SamplingParams(max_new_tokens=24))
    engine = Engine(target, draft, num_slots=4, slot_buckets=(4,), **sizes, rules=False, max_logprobs=None)
    handles = [engine.admit(prompt, SamplingParams(max_new_tokens=24)) for prompt in prompts]
    found: dict[int, list[int]] = {handle: [] for handle in handles}
    accepted = 0
    while engine.live:
        for event in engine.step():
            found[event.handle] += event.tokens
            accepted += event.accepted
    assert [found[handle] for handle in handles] == [list(one.tokens) for one in lone]
    assert accepted > 0
