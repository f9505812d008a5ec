"""A closed loop on an engine, the device's busy time in a trace, and the simulated server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import InvariantError, RequestError
from jaxspec.evaluation.device_time import DeviceTrace, device_time, union_seconds
from jaxspec.evaluation.load import closed_loop
from jaxspec.evaluation.simulation import CHIPS, Trace, roofline, simulate
from jaxspec.models.config import ModelConfig
from jaxspec.serving.cost import AdditiveTable
from jaxspec.serving.engine import Engine
from tests.helpers.worlds import TINY, by_lane, random_table, script, scripted, table_target

M = 3


class Ticking:
    """A clock that engine steps move: a second a round."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __call__(self) -> float:
        return float(self._engine.rounds)


@pytest.fixture(scope="module")
def engine() -> Engine:
    table = random_table(2, 64, seed=3)
    options: dict[str, Any] = {"num_slots": 4, "slot_buckets": (4,), "max_context": 64, "prefill_chunk": 16}
    options |= {"page_size": 4, "rules": False, "max_logprobs": None, "pause_drafting": False, "overlap": False}
    return Engine(table_target(table), scripted(table, M, script(table, M, by_lane((2, 2)))), **options)


@pytest.mark.ci
def test_a_closed_loop_counts_what_came_within_its_window(engine: Engine) -> None:
    prompts = [[lane * 8 + 1] * 5 for lane in (0, 1)]
    for concurrency in (1, 4):
        report = closed_loop(engine, prompts, [12, 24, 36], concurrency, seconds=40, clock=Ticking(engine))
        assert (report.concurrency, report.seconds, report.rounds) == (concurrency, 40, 40)
        assert report.tau == 3.0 and report.proposed == M  # what the script accepts, and all were verified
        # a request's first token comes alone; the others three a round, less what its length trims
        assert 0.6 * 3 * 40 * concurrency < report.tokens <= 3 * 40 * concurrency
        assert report.tokens_per_second == report.tokens / 40
        assert report.ttft is not None and 1 <= report.ttft[0] <= 4
        assert report.tpot is not None and 0.3 <= report.tpot[0] <= 0.45
        assert report.drafted_rounds <= report.rounds and report.finished >= concurrency
        assert (report.compilations, engine.live, engine.held_pages) == (0, 0, 0)
    longer = closed_loop(engine, prompts, [12], 2, seconds=0, min_rounds=7, warm_rounds=5, clock=Ticking(engine))
    assert longer.rounds == 7 and longer.round_seconds == 1.0
    with pytest.raises(RequestError, match="concurrency: found 5"):
        closed_loop(engine, prompts, [12], 5, seconds=1)


# -- the device's time ------------------------------------------------------------------------------------------------


def test_the_union_of_overlapping_events() -> None:
    assert union_seconds([]) == 0
    assert union_seconds([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


def test_busy_time_is_that_of_the_devices_streams() -> None:
    event = lambda start, length: SimpleNamespace(start_ns=1e9 * start, duration_ns=1e9 * length)  # noqa: E731
    line = lambda name, *events: SimpleNamespace(name=name, events=events)  # noqa: E731
    device = SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("Stream #13(Compute)", event(10, 2), event(14, 1)),
            line("Stream #14(MemcpyD2H)", event(11, 2)),
            line("XLA Modules", event(0, 99)),  # made from the others: it covers the gaps between kernels
        ],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream of thought", event(0, 50))])
    found = device_time(SimpleNamespace(planes=[host, device]))
    assert (found.busy, found.span, found.events) == (pytest.approx(4), pytest.approx(5), 3)
    assert found.idle_share == pytest.approx(0.2)
    with pytest.raises(InvariantError, match="/host:CPU"):
        device_time(SimpleNamespace(planes=[host]))


@pytest.mark.ci
def test_a_cpu_has_no_device_time() -> None:
    with pytest.raises(InvariantError, match="no device events"), DeviceTrace():
        np.ones(3).sum()


# -- a simulated chip -------------------------------------------------------------------------------------------------


def traces(seed: int = 0, requests: int = 12, rounds: int = 60, m: int = 7) -> list[Trace]:
    """Requests of different ease; each slot's confidence is its chance."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(requests):
        ease = rng.uniform(0.3, 0.95)
        confidence = np.clip(ease + 0.15 * rng.normal(size=(rounds, m)), 0.02, 0.99).astype(np.float32)
        accepted = np.cumprod(rng.random((rounds, m)) < confidence, axis=1).sum(axis=1)
        found.append(Trace(confidence, accepted))
    return found


MODEL = ModelConfig.from_hf(
    {**TINY, "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
     "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
)  # fmt: skip


def test_a_roofline_grows_with_load_and_with_the_drafter() -> None:
    for chip in CHIPS.values():
        plain = roofline(MODEL, chip, context=512)
        drafted = roofline(MODEL, chip, context=512, draft_weights=10**8, proposals=7)
        rows = np.array([1, 8, 64, 512, 4096])
        for requests in (1, 16, 256):
            assert (np.diff(plain.step_seconds(requests, rows)) >= 0).all()
            assert (drafted.step_seconds(requests, rows) > plain.step_seconds(requests, rows)).all()
        assert float(plain.step_seconds(1, np.array(4096))) > 4 * float(plain.step_seconds(1, np.array(1)))


@pytest.mark.ci
def test_SIMULATED_scheduled_is_the_fastest_and_beats_static_where_rows_are_dear() -> None:
    plain = roofline(MODEL, CHIPS["TPU v5e"], context=512)
    drafted = roofline(MODEL, CHIPS["TPU v5e"], context=512, draft_weights=10**8, proposals=7)
    dear = []
    for requests in (1, 16, 64, 256):
        rate = {
            method: simulate(method, traces(), plain, drafted, requests) for method in ("none", "static", "scheduled")
        }
        assert rate["scheduled"] > 0.97 * max(rate.values())
        dear.append(
            float(
                drafted.step_seconds(requests, np.array(8 * requests))
                / plain.step_seconds(requests, np.array(requests))
            )
        )
        if dear[-1] >= 1.5:
            assert rate["scheduled"] > 1.05 * rate["static"]
    assert min(dear) < 1.5 < max(dear)


def test_a_simulated_round_brings_no_more_than_was_verified() -> None:
    everything = [Trace(np.full((8, M), 0.9, np.float32), np.full(8, M))]
    flat = roofline(MODEL, CHIPS["TPU v6e"], context=64)
    one = float(flat.step_seconds(4, np.array(4 * (M + 1))))
    assert simulate("static", everything, flat, flat, 4, rounds=10) == pytest.approx(4 * (M + 1) / one)
    assert simulate("none", everything, flat, flat, 4) == pytest.approx(4 / float(flat.step_seconds(4, np.array(4))))
    assert Trace.parse([[[0.5, 0.25], 1], [[1.0, 0.0], 2]]).confidence.shape == (2, 2)


def test_a_simulated_cut_costs_tokens() -> None:
    """Proposals that would stand, of a drafter that never says so: none is verified."""
    silent = [Trace(np.zeros((8, M), np.float32), np.full(8, M))]
    second = AdditiveTable(1.0, (1,), (0.0,), (1,), (0.0,))
    assert simulate("scheduled", silent, second, second, 4, rounds=40) == 4.0
