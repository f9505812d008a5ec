"""What makes rounds fast on a GPU, run on this CPU: answers are those of the engine without any of it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import fast
from jaxspec.decoding.fast import Fast, with_attention
from jaxspec.decoding.fit import shared_tables
from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.drafters.base import Slots
from jaxspec.drafters.ddtree import DDTree
from jaxspec.errors import ConfigError
from jaxspec.models.packed import is_packed
from jaxspec.serving.engine import Engine
from jaxspec.serving.requests import Shape
from pallas_kernels.rotate_write import api as rotate_write
from pallas_kernels.verify_attention import api as verify_attention
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import bigram_draft, loud, tiny_target

SIZES: dict[str, Any] = {"num_slots": 2, "max_context": 64, "prefill_chunk": 16, "page_size": 8, "slot_buckets": (2,)}
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=0.9, seed=5)
ASKED = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "narrowed": dataclasses.replace(SEEDED, top_k=5, top_p=0.8),
    "ruled": dataclasses.replace(GREEDY, rules=LogitRules(repetition_penalty=1.5, frequency_penalty=0.4)),
    "logprobs": dataclasses.replace(SEEDED, logprobs=2),
}


def answers(engine: Engine, prompts: dict[str, list[int]]) -> tuple[dict[str, Any], set[Shape]]:
    """Tokens and log probabilities by what was asked, two requests at a time; and the shapes that ran."""
    waiting, owners, shapes = list(prompts), {}, set()
    found: dict[str, Any] = {name: ([], []) for name in prompts}
    engine.warm_up()
    run = engine._run
    engine._run = lambda shape, inputs: (shapes.add(shape), run(shape, inputs))[1]
    while waiting or engine.live:
        if waiting and engine.free_slots:
            name = waiting.pop(0)
            owners[engine.admit(prompts[name], ASKED[name])] = name
        for event in engine.step():
            found[owners[event.handle]][0].extend(event.tokens)
            found[owners[event.handle]][1].extend(said.logprob for said in event.logprobs)
    return found, shapes


@pytest.fixture
def interpreted(monkeypatch):
    """The GPU's kernels on this CPU."""
    for module in (rotate_write, verify_attention):
        kernel = functools.partial(module.IMPLEMENTATIONS["gpu"], interpret=True)
        monkeypatch.setitem(module.IMPLEMENTATIONS, "gpu", kernel)


@pytest.mark.ci
@pytest.mark.parametrize("kernels", [pytest.param(False, marks=REPEATS), True], ids=["forms", "kernels"])
def test_fast_rounds_answer_as_plain_ones_do(kernels, monkeypatch, interpreted):
    target = tiny_target()
    draft = None if kernels else bigram_draft(target)
    rng = np.random.default_rng(4)
    names = ["greedy", "seeded"] if kernels else list(ASKED)
    prompts = {name: rng.integers(0, 60, 11 + 3 * index).tolist() for index, name in enumerate(names)}
    options = {**SIZES, "pause_drafting": False}
    if kernels:
        options |= {"rules": False, "max_logprobs": None}
    plain, shapes = answers(Engine(target, draft, **options), prompts)
    assert not any(shape.bare for shape in shapes)
    chosen = Fast("gpu" if kernels else "reference", packed=True, bare=not kernels, recycle=True)
    monkeypatch.setattr(Fast, "on", classmethod(lambda cls, *_: chosen))
    engine = Engine(target, draft, **options)
    assert is_packed(engine.weights.target["model"]["layers"])
    quick, shapes = answers(engine, prompts)
    assert {shape.bare for shape in shapes} == ({False} if kernels else {True, False})
    assert engine.compile_count == 0
    for name in names:
        assert quick[name][0] == plain[name][0]
        np.testing.assert_allclose(quick[name][1], plain[name][1], atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(("window", "causal"), [(None, None), (6, None), (6, True)])
def test_a_block_that_reads_its_pages_in_place_proposes_the_same(window, causal, interpreted):
    """Two requests whose contexts differ and one that is not live."""
    target = tiny_target()
    draft = bigram_draft(target)
    config = draft.drafter.config
    model = dataclasses.replace(config.model, layer_windows=(window,) * config.model.num_layers)
    drafter = dataclasses.replace(draft.drafter, config=dataclasses.replace(config, model=model, is_causal=causal))
    rng = np.random.default_rng(2)
    pools = tuple(
        jnp.asarray(rng.normal(size=pool.shape), pool.dtype) for pool in drafter.init_state(10, 4, jnp.float32)
    )
    slots = Slots(
        jnp.asarray([3, 4, 5]), jnp.asarray([9, 0, 5]), jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]], jnp.int32),
        jnp.asarray([True, False, True]),
    )  # fmt: skip
    shared = shared_tables(target, draft)
    params = loud(draft.params, 3.0)
    found = [
        jax.jit(lambda pools, each=each: each.block_hidden(params, shared, pools, slots))(pools)
        for each in (drafter, with_attention(drafter, "gpu"))
    ]
    np.testing.assert_allclose(found[1][::2], found[0][::2], rtol=0, atol=2e-5)


@pytest.mark.ci
def test_a_round_without_news_sends_nothing(monkeypatch):
    """Inputs lie on the device until they change, then in the same place; reports are written over read ones."""
    sent: list[Any] = []
    place = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *x, **y: (sent.append(x[0]), place(*x, **y))[1])
    monkeypatch.setattr(Fast, "on", classmethod(lambda cls, *_: Fast(recycle=True)))
    engine = Engine(tiny_target(), **{**SIZES, "page_size": 32}, rules=False, max_logprobs=None)
    engine.admit([1, 2, 3], GREEDY)
    for _ in range(4):
        engine.step()
    sent.clear()
    where = {shape: known[1].words.unsafe_buffer_pointer() for shape, known in engine._inputs.home._there.items()}
    for _ in range(8):
        engine.step()
    assert not sent
    engine.admit([4, 5], GREEDY)
    engine.step()
    assert sent
    assert where == {
        shape: known[1].words.unsafe_buffer_pointer() for shape, known in engine._inputs.home._there.items()
    }


def test_the_device_decides(caplog):
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    hopper = SimpleNamespace(platform="gpu", device_kind="H200", compute_capability="9.0")
    turing = SimpleNamespace(platform="gpu", device_kind="T4", compute_capability="7.5")
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v5e")
    with caplog.at_level(logging.INFO, logger=fast.__name__):
        assert Fast.on(cpu) == Fast()
        assert Fast.on(tpu) == Fast()
        assert Fast.on(hopper) == Fast("gpu", True, True, True)
        assert Fast.on(turing) == Fast("reference", True, True, True)
    assert "engine.attention: auto chose gpu on H200" in caplog.messages
    assert Fast.on(hopper, "reference", False, False) == Fast(recycle=True)
    assert Fast.on(tpu, "tpu").attention == "tpu"
    for device, name in ((cpu, "gpu"), (hopper, "tpu"), (turing, "gpu")):
        with pytest.raises(ConfigError, match=f"engine.attention: {name}, expected auto or reference"):
            Fast.on(device, name)
    with pytest.raises(ConfigError, match=r"engine\.attention: cudnn, expected one of auto, reference, gpu, tpu"):
        Fast.on(cpu, "cudnn")


def test_an_engine_names_what_it_cannot_run():
    with pytest.raises(ConfigError, match=r"engine\.attention: gpu, expected auto or reference: this is a CPU"):
        Engine(tiny_target(), **SIZES, attention="gpu")


def test_a_tree_over_a_block_reads_its_context_by_the_kernel_too():
    block = bigram_draft(tiny_target()).drafter
    assert with_attention(block, "gpu").attention == "gpu"
    assert with_attention(DDTree(block, tree_nodes=6), "gpu").inner.attention == "gpu"
    assert with_attention(object, "gpu") is object
