"""DFlash 2's parts: configuration, grouped dynamic convolution, candidate selector, warm start."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import grouped_conv, selector
from jaxspec.drafters.base import Sparse
from jaxspec.drafters.dflash2 import DFlash2, from_dflash
from jaxspec.drafters.grouped_conv import ConvConfig, GroupedConv, convolve
from jaxspec.drafters.registry import drafter_from_hf
from jaxspec.drafters.selector import Candidates, SelectorConfig
from jaxspec.errors import ConfigError
from jaxspec.models import layers as ly
from tests.drafters import family, tiny

pytestmark = pytest.mark.ci

# -- configuration and names ------------------------------------------------------------------------------------------


def test_B43_tensor_names_and_shapes_are_the_public_ones():
    """Of a layer and of the selector, as CONTRACTS 2.1 has them: H 16, V 24, 2 taps, 4 groups, rank 4."""
    shapes = {name: leaf.shape for name, leaf in ly.flatten(family.dflash2().abstract_params()).items()}
    own = {name: shape for name, shape in shapes.items() if "conv" in name or "selector" in name}
    conv = {
        f"layers.{layer}.{name}.{tensor}": shape
        for layer in range(2)
        for name in ("attention_conv", "mlp_conv")
        for tensor, shape in (("base_kernel", (2, 2, 16)), ("kernel_projection.weight", (2 * 2 * 4, 16)))
    }
    assert own == conv | {
        "candidate_selector.hidden_projection.weight": (4, 16),
        "candidate_selector.predecessor_codebook": (24, 4),
        "candidate_selector.successor_codebook": (24, 4),
    }
    assert shapes.keys() - own.keys() == ly.flatten(tiny.dflash(num_layers=2).abstract_params()).keys()


def test_the_released_size_gives_the_projection_of_its_header():
    """Muse: H 6656, 2 taps, groups of 16 channels: kernel_projection [1664, 6656]."""
    _, params = ly.abstract_module(GroupedConv, 6656, ConvConfig(2, 16))
    assert params["kernel_projection"]["weight"].shape == (1664, 6656)
    assert params["base_kernel"].shape == (2, 2, 6656)


def test_B45_config_is_read_nested_and_written_back_verbatim():
    config = family.draft2_hf()
    drafter = drafter_from_hf(config, tiny.TARGET)
    assert isinstance(drafter, DFlash2) and drafter.method == "dflash2"
    assert (drafter.conv, drafter.selector, drafter.num_proposals) == (family.CONV, family.SELECTOR, 3)
    assert drafter.to_hf() == config
    fresh = family.dflash2(is_causal=False)
    again = drafter_from_hf(fresh.to_hf(), tiny.TARGET)
    assert dataclasses.replace(again, config=fresh.config, objective_config=fresh.objective_config) == fresh


@pytest.mark.parametrize(
    "name", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "mask_token_id"]
)
def test_B46_a_missing_size_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        drafter_from_hf(family.draft2_hf(**{name: None}), tiny.TARGET)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conv_kernel_size", 5),
        ("conv_kernel_size", 0),
        ("conv_group_size", 5),
        ("selector_rank", 0),
        ("selector_top_k", 25),
    ],
)
def test_a_size_that_does_not_fit_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        drafter_from_hf(family.draft2_hf(**{name: value}), tiny.TARGET)


def test_logit_transform_is_float32_multiplier_then_softcap():
    config = dataclasses.replace(family.dflash2().config, output_multiplier=0.2, final_logit_softcapping=2.0)
    drafter = dataclasses.replace(family.dflash2(), config=config)
    hidden, head = jnp.asarray([[1.0]], jnp.bfloat16), jnp.asarray([[-100.0], [0.0], [100.0]], jnp.bfloat16)
    logits = drafter.block_logits(dataclasses.replace(tiny.shared(), head=head), hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], np.tanh(np.asarray([-100, 0, 100]) * 0.2 / 2) * 2, rtol=1e-6)


# -- convolution ------------------------------------------------------------------------------------------------------


def naive_conv(x, base, deltas):
    """Element by element: out[j, ch] = sum over taps of (base + delta of the row and group) x[j - tap, ch]."""
    out = np.zeros_like(x)
    blocks, size, width = x.shape
    for b, j, tap, channel in np.ndindex(blocks, size, base.shape[0], width):
        if j - tap >= 0:
            delta = deltas[b, j, tap, channel // (width // deltas.shape[-1])]
            out[b, j, channel] += (base[tap, channel] + delta) * x[b, j - tap, channel]
    return out


@pytest.mark.parametrize(("block", "taps"), [(5, 1), (5, 2), (8, 3), (16, 2)])
def test_convolution_equals_the_formula(block, taps):
    x, base, deltas = (
        family.random_rows(seed, *shape) for seed, shape in enumerate([(2, block, 12), (taps, 12), (2, block, taps, 3)])
    )
    found = jax.jit(convolve)(x, base, deltas)
    np.testing.assert_allclose(found, naive_conv(*(np.asarray(a, np.float64) for a in (x, base, deltas))), atol=1e-5)


def test_a_kernel_of_the_previous_row_stays_inside_its_block():
    """Blocks of 3: [x0 x1 x2][x3 x4 x5] -> [0 x0 x1][0 x3 x4]."""
    x = family.random_rows(0, 2, 3, 8)
    base = jnp.zeros((2, 8)).at[1].set(1)
    found = convolve(x, base, jnp.zeros((2, 3, 2, 2)))
    np.testing.assert_array_equal(found, jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :3])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_convolution_is_the_identity_bit_for_bit(dtype):
    graph, params = ly.abstract_module(GroupedConv, 16, family.CONV)
    params = grouped_conv.identity(
        {name: jax.tree.map(lambda x: jnp.ones(x.shape, dtype), params) for name in ("attention_conv", "mlp_conv")}
    )
    rows = family.random_rows(1, 2, 4, 16).astype(dtype)
    out, _ = jax.jit(lambda p, x: ly.bind(graph, p)(x, lambda y: y))(params["mlp_conv"], rows)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, rows)


def test_gradient_reaches_the_kernel_projection_of_a_fresh_convolution():
    graph, params = ly.abstract_module(GroupedConv, 16, family.CONV)
    fresh = grouped_conv.identity(
        {name: jax.tree.map(lambda x: jnp.zeros(x.shape), params) for name in ("attention_conv", "mlp_conv")}
    )
    rows = family.random_rows(1, 1, 4, 16)
    grads = jax.grad(lambda p: jnp.sum(ly.bind(graph, p)(rows, lambda y: y)[0] ** 2))(fresh["mlp_conv"])
    assert np.abs(grads["kernel_projection"]["weight"]).max() > 1e-3
    assert np.abs(grads["base_kernel"][:, 1]).max() > 1e-3


def test_both_sides_take_their_coefficients_from_the_row_before_any_convolution():
    graph, abstract = ly.abstract_module(GroupedConv, 8, ConvConfig(2, 4))
    params = jax.tree.map(lambda x: family.random_rows(x.size, *x.shape), abstract)
    rows = family.random_rows(3, 1, 4, 8)
    seen = []

    def sublayer(y):
        seen.append(y)
        return jnp.tanh(y)

    found, steps = ly.bind(graph, params)(rows, sublayer)
    deltas = np.asarray(rows[0] @ params["kernel_projection"]["weight"].T).reshape(1, 4, 2, 2, 2)  # side-major
    base = np.asarray(params["base_kernel"])
    prepared = naive_conv(np.asarray(rows), base[0], deltas[:, :, 0])
    np.testing.assert_allclose(seen[0], prepared, atol=1e-4)
    np.testing.assert_allclose(found, naive_conv(np.tanh(prepared), base[1], deltas[:, :, 1]), atol=1e-4)
    np.testing.assert_array_equal(steps["prepared"], seen[0])


# -- selector ---------------------------------------------------------------------------------------------------------


def selector_params(seed=0, vocab=24, rank=4, hidden=16):
    abstract = selector.abstract_params(SelectorConfig(rank), vocab, hidden, jnp.float32)
    return jax.tree.map(lambda x: family.random_rows(seed + x.shape[0] + x.shape[1], *x.shape), abstract)


def test_a_score_by_hand():
    """W = I, predecessor[1] = (2, 3), successor[2] = (5, 7), successor[4] = (11, 13), h = (17, 19), unary (.5, 1.5)."""

    def codes(**rows):
        ids = jnp.asarray([int(name[1:]) for name in rows])
        return jnp.zeros((6, 2)).at[ids].set(jnp.asarray(list(rows.values()), jnp.float32))

    params = {
        "candidate_selector": {
            "hidden_projection": {"weight": jnp.eye(2)},
            "predecessor_codebook": codes(_1=(2, 3)),
            "successor_codebook": codes(_2=(5, 7), _4=(11, 13)),
        }
    }
    candidates = Candidates(jnp.asarray([[[2, 4]]]), jnp.asarray([[[0.5, 1.5]]]))
    found = selector.scores(params, candidates, jnp.asarray([[[17.0, 19.0]]]), jnp.asarray([[1]]))
    expected = [0.5 + 2 * 17 * 5 + 3 * 19 * 7, 1.5 + 2 * 17 * 11 + 3 * 19 * 13]
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-6)


def test_a_fresh_selector_changes_no_score():
    params = selector.silent(selector_params())
    candidates = selector.top_candidates(family.random_rows(1, 2, 3, 24), 5)
    hidden = family.random_rows(2, 2, 3, 16)
    found = selector.scores(params, candidates, hidden, jnp.asarray([[1, 2, 3], [4, 5, 6]]))
    np.testing.assert_array_equal(found, candidates.unary)
    drafter = family.dflash2()
    fresh = drafter.init(jax.random.key(0))["candidate_selector"]
    assert not np.any(fresh["successor_codebook"])
    assert 0.01 < float(jnp.std(fresh["predecessor_codebook"])) < 0.03 and np.any(fresh["hidden_projection"]["weight"])


def test_rows_of_the_lattice_equal_the_scores_along_the_walk():
    params, hidden = selector_params(), family.random_rows(2, 5, 6, 16)
    candidates = selector.top_candidates(family.random_rows(1, 5, 6, 24), 4)
    anchors = jnp.asarray([3, 1, 4, 1, 5])
    table = selector.lattice(params, candidates, hidden, anchors)
    assert table.shape == (5, 6, 4, 4)
    np.testing.assert_array_equal(table[:, 0], jnp.broadcast_to(table[:, 0, :1], (5, 4, 4)))  # the anchor, K times
    path = selector.greedy_path(table, candidates.ids)
    previous = jnp.concatenate([anchors[:, None], path[:, :-1]], axis=1)
    realised = np.asarray(selector.scores(params, candidates, hidden, previous))
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(candidates.ids), realised.argmax(-1)[..., None], -1)[..., 0], path
    )
    chosen = np.asarray(candidates.ids)
    for r, slot in np.ndindex(5, 5):
        taken = int(np.flatnonzero(chosen[r, slot] == int(path[r, slot]))[0])
        np.testing.assert_allclose(table[r, slot + 1, taken], realised[r, slot + 1], rtol=1e-5, atol=1e-5)
    unary_only = chosen[..., 0]
    assert (np.asarray(path) != unary_only).any()  # the selector does change the path here


@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.2, 2.0), (0.196, 20.0)])
def test_ranking_before_and_after_the_logit_transform_gives_the_same_ids(multiplier, cap):
    drafter = family.dflash2()
    config = dataclasses.replace(drafter.config, output_multiplier=multiplier, final_logit_softcapping=cap)
    drafter = dataclasses.replace(drafter, config=config)
    raw = 3 * family.random_rows(4, 2, 3, 24)
    after = selector.top_candidates(drafter.transform_logits(raw), 3)
    before = drafter.candidates(raw)
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_array_equal(before.unary, after.unary)


def test_equal_logits_are_ranked_by_the_lowest_id():
    assert selector.top_candidates(jnp.asarray([[1.0, 2.0, 2.0, 2.0]]), 3).ids.tolist() == [[1, 2, 3]]


# -- the walk ---------------------------------------------------------------------------------------------------------


def tables(requests=4, slots=5, width=3, seed=5):
    ids = np.stack(
        [
            np.random.default_rng(seed + r * slots + s).permutation(24)[:width]
            for r in range(requests)
            for s in range(slots)
        ]
    )
    return family.random_rows(seed, requests, slots, width, width), jnp.asarray(
        ids.reshape(requests, slots, width), jnp.int32
    )


def test_walk_equals_a_walk_by_hand():
    """index = how many cumulative sums u has reached, at most K - 1."""
    table, ids = tables()
    greedy, heat = jnp.asarray([True, False, True, False]), jnp.asarray([0.0, 0.7, 5.0, 2.0])
    u = jnp.asarray(np.random.default_rng(1).random((4, 5)), jnp.float32)
    path = jax.jit(selector.walk)(table, ids, greedy, heat, u)
    for r in range(4):
        taken = 0
        for slot in range(5):
            row = np.asarray(table[r, slot, taken], np.float64)
            if greedy[r]:
                taken = int(row.argmax())
                probs = np.eye(3)[taken]
            else:
                probs = np.exp(row / float(heat[r]) - (row / float(heat[r])).max())
                probs /= probs.sum()
                taken = min(int((float(u[r, slot]) >= np.cumsum(probs)).sum()), 2)
            np.testing.assert_allclose(path.probs[r, slot], probs, atol=1e-6)
            assert int(path.tokens[r, slot]) == int(ids[r, slot, taken])


def test_B01_the_draws_law_is_q():
    """Over a fine grid of uniforms every first token comes up as often as q says."""
    table, ids = tables(requests=1, slots=1)
    grid = (jnp.arange(4000, dtype=jnp.float32) + 0.5) / 4000
    many = lambda x: jnp.broadcast_to(x, (4000, *x.shape[1:]))  # noqa: E731
    path = jax.jit(selector.walk)(many(table), many(ids), jnp.zeros(4000, bool), jnp.full(4000, 0.8), grid[:, None])
    for k in range(3):
        assert np.mean(np.asarray(path.tokens[:, 0]) == int(ids[0, 0, k])) == pytest.approx(
            float(path.probs[0, 0, k]), abs=5e-4
        )


def test_B06_B13_a_request_does_not_depend_on_its_batch_mates():
    """Alone, beside others, beside greedy ones, beside junk: the same bits. A greedy row's q is one-hot."""
    table, ids = tables()
    u = jnp.asarray(np.random.default_rng(2).random((4, 5)), jnp.float32)
    run = jax.jit(selector.walk)
    heat = jnp.asarray([0.9, 1.3, 0.0, 1.0])
    mixed = run(table, ids, jnp.asarray([False, False, True, False]), heat, u)
    junk = run(
        table.at[1].set(1e30), ids, jnp.asarray([False, True, True, True]), jnp.asarray([0.9, 0.0, 7.0, jnp.nan]), u
    )
    for r in (0, 2):
        np.testing.assert_array_equal(mixed.tokens[r], junk.tokens[r])
        np.testing.assert_array_equal(mixed.probs[r], junk.probs[r])
    np.testing.assert_array_equal(np.sort(mixed.probs[2], axis=-1), np.eye(3)[[2] * 5])
    everyone = run(table, ids, jnp.ones(4, bool), heat, u)
    np.testing.assert_array_equal(mixed.tokens[2], everyone.tokens[2])


def test_B40_q_scattered_to_the_vocabulary_leaves_no_stale_entry_of_an_earlier_round():
    """Two rounds over other candidates through one compiled function: each row holds its own K ids and nothing else."""
    scatter = jax.jit(lambda ids, probs, slot: Sparse(ids, probs, 24).rows(slot))
    for seed in (5, 50):
        table, ids = tables(seed=seed)
        path = selector.walk(table, ids, jnp.zeros(4, bool), jnp.ones(4), jnp.full((4, 5), 0.4))
        rows = np.asarray(scatter(ids, path.probs, jnp.asarray([0, 4, 2, 5])))
        for r, slot in enumerate((0, 4, 2)):
            assert set(np.flatnonzero(rows[r])) == set(np.asarray(ids[r, slot]).tolist())
            np.testing.assert_allclose(rows[r].sum(), 1.0, atol=1e-6)
        assert not rows[3].any()


# -- warm start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_warm_start_from_dflash_changes_nothing_bit_for_bit(dtype):
    """Hidden states, logits, greedy proposals, loss and the backbone's gradients (the selector's loss kept apart)."""
    drafter = tiny.dflash(layer_types=("sliding_attention", "full_attention"), sliding_window=5)
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.random_params(drafter))
    grown, warm = from_dflash(drafter, params, jax.random.key(1), family.CONV, family.SELECTOR)
    assert jax.tree.structure(warm) == jax.tree.structure(grown.abstract_params())
    shared = jax.tree.map(lambda x: x.astype(dtype), tiny.shared())
    batch = tiny.batch([[0, 3, 7], [2, 5, 11]])
    assert grown.config.is_causal is None and grown.config.layer_masks == drafter.config.layer_masks
    before = jax.jit(lambda p: drafter.training_hidden(p, shared, batch))(params)
    after = jax.jit(lambda p: grown.training_hidden(p, shared, batch))(warm)
    np.testing.assert_array_equal(after, before)
    served = jax.jit(lambda h: grown.candidates(ly.unembed(h, shared.head)).ids[..., 0])(after)
    np.testing.assert_array_equal(served, jnp.argmax(drafter.block_logits(shared, before), -1))
    proposals = []
    rng = np.random.default_rng(8)
    rows = [rng.normal(size=pool.shape) for pool in drafter.init_state(7, 4, dtype)]
    for one, weights in ((drafter, params), (grown, warm)):
        state = tuple(jnp.asarray(row, dtype) for row in rows)
        slots = tiny.slots([7, 9], [3, 6], tiny.page_tables(2, 3))
        proposals.append(
            jax.jit(lambda w, s, o=one, at=slots: o.propose(w, shared, s, at, tiny.keys(2), tiny.greedy(2)))(
                weights, state
            )
        )
    np.testing.assert_array_equal(proposals[0].tokens, proposals[1].tokens)
    np.testing.assert_array_equal(proposals[0].trace["draft_hidden"], proposals[1].trace["draft_hidden"])


def test_a_warm_start_keeps_the_base_loss_and_its_gradients():
    drafter = tiny.dflash()
    params, shared, batch = tiny.random_params(drafter), tiny.shared(), tiny.batch([[0, 3, 7], [2, 5, 11]])
    grown, warm = from_dflash(drafter, params, jax.random.key(1), family.CONV, family.SELECTOR)
    grown = dataclasses.replace(
        grown, objective_config=dataclasses.replace(grown.objective_config, selector_stop_gradient=True)
    )
    _, before, grads = family.terms(drafter, params, shared, batch)
    _, after, warm_grads = family.terms(grown, warm, shared, batch)
    np.testing.assert_array_equal(after["ce"], before["ce"])
    for name, grad in ly.flatten(grads).items():
        family.assert_close(ly.flatten(warm_grads)[name], grad, name)
