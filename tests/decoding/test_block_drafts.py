"""B13, B32: how a block drafter's proposals are drawn, and what of a round stays in its context."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.round import Program, Weights
from jaxspec.decoding.runner import SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Point, Rows, Shared, Slots
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflare import DFlare
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.recurrent import RecurrentState
from jaxspec.drafters.selector import SelectorConfig
from jaxspec.drafters.small_model import SmallModel
from jaxspec.models.layout import uniform_layout
from tests.decoding.enumeration import Case, _branches, output_law, target_law
from tests.decoding.test_enumeration import TOLERANCE, through_jaxspec
from tests.drafters import eagle_pairs as pairs
from tests.helpers.marks import REPEATS
from tests.helpers.worlds import position_of, rows_of, slot_of, tiny_draft, tiny_target

pytestmark = pytest.mark.ci


def accepted(case: Case, kind: str) -> float:
    """E[accepted proposals], enumerated over every branch of the served acceptance."""
    rows = _branches(case)
    r, _ = through_jaxspec("ratio", kind)(
        rows.p, rows.drafts, rows.q, rows.u, np.full(len(rows.weight), 0.5), np.full(len(rows.weight), case.m)
    )
    return float((r * rows.weight).sum())


def both_lawful(sampled: Case, argmax: Case) -> None:
    for case, kind in ((sampled, "dense"), (argmax, "point")):
        law = output_law(case, through_jaxspec("ratio", kind), case.m)
        np.testing.assert_allclose(law, target_law(case), atol=TOLERANCE)


def test_B13_a_flat_marginal_is_accepted_rarely_when_sampled_and_mostly_as_argmax() -> None:
    """The target gives .9 to b; the drafter's marginal gives b .3 and spreads the rest over ids of little mass."""
    p = np.array([0.02, 0.9, 0.02, 0.02, 0.02, 0.02])
    q = np.array([0.14, 0.3, 0.14, 0.14, 0.14, 0.14])
    tables = ((p, np.tile(p, (6, 1))), (q,))
    sampled, argmax = Case(*tables), Case(*tables, argmax=True)
    assert accepted(sampled, "dense") == pytest.approx(0.3 + 5 * 0.02, abs=1e-5)
    assert accepted(argmax, "point") == pytest.approx(0.9, abs=1e-5)
    both_lawful(sampled, argmax)


def test_B13_two_modes_are_accepted_more_when_sampled() -> None:
    """Two equally likely continuations, "a b" and "c d", with exact marginals: 1.5 sampled, 1.0 as argmax."""
    a, b, c, d = range(4)
    first = np.array([0.5, 0.0, 0.5, 0.0])
    second = np.zeros((4, 4))
    second[a, b] = second[c, d] = 1.0
    second[b] = second[d] = 0.25
    marginal = np.array([0.0, 0.5, 0.0, 0.5])
    p = (first, second, np.full((4, 4, 4), 0.25))
    q = (first, np.tile(marginal, (4, 1)))
    sampled, argmax = Case(p, q), Case(p, q, argmax=True)
    assert accepted(sampled, "dense") == pytest.approx(1.5, abs=1e-5)
    assert accepted(argmax, "point") == pytest.approx(1.0, abs=1e-5)
    both_lawful(sampled, argmax)


def proposal_of(draft: Any, target: Any, sampling: SlotSampling, count: int) -> Any:
    """One block of `count` requests with the same anchor and an empty context."""
    zeros = jnp.zeros(count, jnp.int32)
    table = 1 + jnp.arange(count, dtype=jnp.int32)[:, None]
    slots = Slots(zeros + 3, zeros, table, jnp.ones(count, bool))
    state = draft.drafter.init_state(count + 1, 8, jnp.float32)
    keys = jax.random.split(jax.random.key(1), count)
    shared = Shared(target.embedding, target.head)
    propose = jax.jit(lambda params: draft.drafter.propose(params, shared, state, slots, keys, sampling))
    return propose(draft.params)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


def mixed_sampling(count: int) -> SlotSampling:
    """The first half greedy, the second at temperature 1 with top_k 6."""
    half = jnp.arange(count) >= count // 2
    ones = jnp.ones(count, jnp.float32)
    return SlotSampling(half.astype(jnp.float32), 6 * half.astype(jnp.int32), ones, 0 * ones)


def test_B13_dflash_argmax_reports_a_point(target: Any) -> None:
    proposal = proposal_of(tiny_draft(target), target, mixed_sampling(8), 8)
    assert isinstance(proposal.q, Point)
    assert (np.asarray(proposal.tokens) == np.asarray(proposal.tokens)[0]).all()  # sampled rows get the argmax too
    np.testing.assert_array_equal(proposal.q.prob(proposal.tokens), 1.0)


@pytest.mark.parametrize("method", ["dflash", pytest.param("dspark", marks=pytest.mark.ci)])
def test_B01_B13_sampled_proposals_are_drawn_from_the_q_they_report(target: Any, method: str) -> None:
    """Greedy rows take the argmax; sampled ones follow the very array that acceptance reads (512 draws a slot).
    DSpark's q is the conditional one: it differs between rows whose earlier draws differ."""
    draft = tiny_draft(target, method, **({"draft_sampling": "sample"} if method == "dflash" else {}))
    count = 1024
    proposal = proposal_of(draft, target, mixed_sampling(count), count)
    assert isinstance(proposal.q, Dense)
    tokens, q = np.asarray(proposal.tokens), np.asarray(proposal.q.probs)
    half = count // 2
    assert (tokens[:half] == tokens[0]).all()
    np.testing.assert_array_equal(q[:half].argmax(-1), tokens[:half])
    assert (np.asarray(proposal.q.prob(proposal.tokens)) > 0).all()
    assert ((q[half:] > 0).sum(-1) <= 6).all()  # top_k shapes q as it shapes p
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
    for slot in range(tokens.shape[1]):
        expected = q[half:, slot].sum(0)
        seen = np.bincount(tokens[half:, slot], minlength=64)
        spread = np.sqrt((q[half:, slot] * (1 - q[half:, slot])).sum(0)) + 1e-9
        assert (np.abs(seen - expected) <= 5 * spread + 1e-3).all(), slot
    rows = {row.tobytes() for row in q[half:, 1]}
    assert (len(rows) > 1) == (method == "dspark")


def any_draft(target: Any, method: str) -> Draft:
    """A draft of any method, with random weights; its proposals are replaced, its context is what is looked at."""
    block = fresh_config(target.model.config, num_layers=1, block_size=5, mask_token_id=60, target_layer_ids=(0, 1))
    makers: dict[str, Any] = {
        "dflash": lambda: tiny_draft(target).drafter,
        "dspark": lambda: tiny_draft(target, "dspark").drafter,
        "dflash2": lambda: DFlash2(block, conv=ConvConfig(2, 8), selector=SelectorConfig(4, 4)),
        "dflare": lambda: DFlare(block),
        "ddtree": lambda: DDTree(DFlash(block), 9),
        "eagle": lambda: pairs.eagle(target, None),
        "eagle tree": lambda: pairs.eagle(target, pairs.STATIC),
        "eagle3": lambda: pairs.eagle3(target, None),
        "eagle3 tree": lambda: pairs.eagle3(target, pairs.STATIC),
        "small model": lambda: SmallModel(target.model, num_proposals=4),
    }
    drafter = makers[method]()
    params = target.params if method == "small model" else pairs.params_of(drafter)
    return Draft(drafter, params)


METHODS = ["dflash", "dflash2", "ddtree", "eagle3 tree", "small model"]
KIN = ["dspark", "dflare", "eagle", "eagle tree", "eagle3"]


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(method, marks=REPEATS) for method in KIN)])
@pytest.mark.ci
def test_B32_context_after_partial_acceptance_is_rebuilt_from_committed_features(target: Any, method: str) -> None:
    """A round whose proposals stand in part: the drafter's context K/V (and an EAGLE's state) equal those written by
    one commit of the target's cache-free features of the committed tokens. Nothing of the block, of the tree or of
    rejected rows is in it; the rows beyond are still NaN."""
    draft = any_draft(target, method)
    runner = SlotRunner(
        target, draft, num_slots=2, max_context=64, prefill_chunk=8, page_size=8, cache_fill=float("nan")
    )
    m, wanted, seen = runner.num_proposals, 2, set()
    prompt = np.random.default_rng(1).integers(0, 60, 11).tolist()
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    answer = oracle(target, prompt, 40)
    force(runner, np.array(prompt + answer))
    tokens: list[int] = []
    handle = runner.admit(prompt, params)
    slot = slot_of(runner, handle)
    for a in (wanted, 0, m, 1):
        runner.weights = dataclasses.replace(runner.weights, forced=jnp.int32(a))
        for event in runner.step():
            tokens += event.tokens
            seen |= {event.accepted} if event.from_round else set()
    assert tokens == answer[: len(tokens)]
    assert seen == {0, 1, wanted, m} or (method == "ddtree" and seen >= {0, 1, wanted})  # how deep it is, it decides
    length = position_of(runner, slot)
    assert length == len(prompt) + len(tokens) - 1
    sequence = jnp.asarray([*prompt, *tokens], jnp.int32)
    features = target.model.forward_sequences(target.params, sequence[None, :length], draft.drafter.taps).features[0]
    layout = uniform_layout(jnp.zeros(1, int), jnp.full(1, length), jnp.arange(1, 9)[None], length)
    empty = draft.drafter.init_state(9, 8, jnp.float32, 1)
    rows = Rows(features, sequence[:length], sequence[1 : length + 1])
    shared = Shared(target.embedding, target.head)
    rebuilt = draft.drafter.commit(draft.params, shared, empty, rows, layout)
    if isinstance(rebuilt, RecurrentState):
        np.testing.assert_allclose(runner._state.draft.hidden[slot], rebuilt.hidden[0], atol=2e-5)
    for pool, expected in zip(pools(runner._state.draft), pools(rebuilt), strict=True):
        got = np.concatenate(rows_of(runner, pool, slot), axis=1)
        fresh = np.asarray(expected)[1:].reshape(-1, *expected.shape[2:])
        fresh = np.concatenate([fresh[:, 0::2], fresh[:, 1::2]], axis=1)
        np.testing.assert_allclose(got[:length], fresh[:length], atol=2e-5)
        assert np.isnan(got[length:]).all()


def pools(state: Any) -> list[Any]:
    """The K/V of a drafter's state."""
    return [state.pool] if isinstance(state, RecurrentState) else list(state)


def oracle(target: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy answer by cache-free forwards of one padded shape."""
    size = len(prompt) + count
    model, params = target.model, target.params
    forward = jax.jit(lambda tokens: model.logits(params, model.forward_sequences(params, tokens).hidden))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), size):
        tokens[0, place] = int(np.argmax(np.asarray(forward(tokens))[0, place - 1]))
    return tokens[0, len(prompt) :].tolist()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Told(Weights):
    forced: Any  # a
    truth: Any  # the sequence


@dataclasses.dataclass(frozen=True)
class Forced(Program):
    """Proposals are replaced: a right ones on the way to the deepest node, all others wrong. The drafter's own propose
    still runs."""

    def propose(self, weights: Weights, state: Any, keys: Any) -> Any:
        proposal = super().propose(weights, state, keys)
        depths = jnp.broadcast_to(1 + jnp.arange(proposal.tokens.shape[1]), proposal.tokens.shape)
        on_the_way = jnp.ones(depths.shape, bool)
        if proposal.tree is not None:
            depths, request = proposal.tree.depths, jnp.arange(depths.shape[0])
            row = 1 + jnp.argmax(jnp.where(proposal.tree.valid, depths, 0), axis=1)
            on_the_way = jnp.zeros(depths.shape, bool)
            for _ in range(proposal.tree.max_depth):
                on_the_way = on_the_way.at[request, row - 1].max(row > 0)
                row = jnp.where(row > 0, proposal.tree.parents[request, row - 1], 0)
        right = on_the_way & (depths <= weights.forced)
        tokens = weights.truth[state.slots.positions[:, None] + depths]
        tokens = jnp.where(right, tokens, (tokens + 1) % 64)
        return dataclasses.replace(proposal, tokens=tokens + 0 * proposal.tokens)


def force(runner: SlotRunner, sequence: np.ndarray) -> None:
    """Makes a runner that has not compiled yet propose from `sequence`."""
    plain, weights = runner.program, runner.weights
    runner.program = Forced(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
    truth = jnp.asarray(np.pad(sequence, (0, 16)), jnp.int32)
    runner.weights = Told(weights.target, weights.draft, weights.shared, jnp.int32(0), truth)
