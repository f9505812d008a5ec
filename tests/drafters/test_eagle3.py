"""EAGLE-3: layouts, vocabulary maps, the recurrence in training and serving, and its loss."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.drafter import load_drafter, save_drafter
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters import vocabulary
from jaxspec.drafters.base import Rows, Sparse
from jaxspec.drafters.eagle3 import DEEPSPEC, SPECFORGE, Eagle3, Eagle3Objective
from jaxspec.drafters.eagle_config import default_layer_ids
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.layers import cast
from jaxspec.models.layout import uniform_layout
from tests.drafters import eagle_pairs as pairs
from tests.helpers.process import run_on_devices

pytestmark = pytest.mark.ci

TARGET = pairs.target()
KINDS = {
    "reduced": {},
    "whole": {"reduced": False},
    "deepspec": {"reduced": False, "layout": DEEPSPEC},
    "fc_norm": {"fc_norm": True, "norm_output": False},
}


def shared_of(drafter: Any) -> Any:
    return pairs.draft(drafter).shared(TARGET)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_vocabulary_maps_survive_a_cast_of_the_weights(dtype: Any) -> None:
    """bfloat16 holds whole numbers up to 256, float16 up to 2048: an id of a real vocabulary would be another one."""
    chosen = np.sort(np.random.default_rng(0).choice(150_000, 3000, replace=False))
    made = {name: jnp.asarray(value) for name, value in vocabulary.maps(chosen, 150_000).items()}
    low = cast({"fc": {"weight": jnp.ones((2, 2))}, **made}, dtype)
    assert low["fc"]["weight"].dtype == dtype
    np.testing.assert_array_equal(vocabulary.target_ids(low, len(chosen)), chosen)
    assert low["t2d"].dtype == jnp.bool_ and np.flatnonzero(low["t2d"]).tolist() == chosen.tolist()


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"), [(8, (1, 3, 4)), (32, (1, 15, 28)), (36, (1, 17, 32)), (30, (1, 14, 26))]
)
def test_B39_default_taps_are_what_enters_layers_2_half_and_n_minus_3(layers: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == expected


def test_B39_named_layer_ids_are_outputs_and_must_not_contradict_each_other() -> None:
    config = pairs.eagle3(TARGET).to_hf()
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert Eagle3.from_hf(config, TARGET.config).taps == (0, 1)
    with pytest.raises(ConfigError, match=r"found \[0, 1\] and \[1, 0\], expected one list"):
        Eagle3.from_hf({**config, "target_layer_ids": [1, 0]}, TARGET.config)
    with pytest.raises(ConfigError, match="found 2, expected ids of the target's 2 layers"):
        Eagle3.from_hf({**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, TARGET.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 63}, "vocab_size: the drafter has 63"),
        ({"target_hidden_size": 16}, "the drafter reads features of 16"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: found 2"),
        ({"draft_vocab_size": 65}, "draft_vocab_size: found 65"),
        ({"num_target_layers": 3}, "num_target_layers: the drafter was made for 3"),
    ],
)
def test_a_drafter_of_another_target_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3.from_hf({**pairs.eagle3(TARGET).to_hf(), **change}, TARGET.config)


def test_B43_names_and_shapes_of_a_released_size() -> None:
    """LLaMA-3.1-8B's drafter, as the contract lists it."""
    config = {
        "architectures": [SPECFORGE], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "draft_vocab_size": 32000,
        "tie_word_embeddings": False,
    }  # fmt: skip
    target = dataclasses.replace(TARGET.config, vocab_size=128256, hidden_size=4096, num_layers=32)
    drafter = Eagle3.from_hf(config, target)
    shapes = {name: leaf.shape for name, leaf in _flat(drafter.abstract_params()).items()}
    assert shapes == {
        "fc.weight": (4096, 12288),
        "midlayer.input_layernorm.weight": (4096,),
        "midlayer.hidden_norm.weight": (4096,),
        "midlayer.post_attention_layernorm.weight": (4096,),
        "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.k_proj.weight": (1024, 8192),
        "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096),
        "midlayer.mlp.gate_proj.weight": (14336, 4096),
        "midlayer.mlp.up_proj.weight": (14336, 4096),
        "midlayer.mlp.down_proj.weight": (4096, 14336),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
        "t2d": (128256,),
    }


def _flat(params: Any) -> dict[str, Any]:
    from jaxspec.models.layers import flatten

    return {name: leaf for name, leaf in flatten(params).items() if leaf is not None}


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_export_and_reload_give_bitwise_equal_logits(kind: str, tmp_path: Any) -> None:
    drafter = pairs.eagle3(TARGET, **KINDS[kind])
    made = pairs.draft(drafter)
    if drafter.layout == DEEPSPEC:
        made = dataclasses.replace(made, embedding=TARGET.embedding, head=TARGET.head)
    loaded = load_drafter(save_drafter(tmp_path / "out", made), TARGET)
    assert loaded.drafter.layout == drafter.layout and loaded.drafter.taps == drafter.taps
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"  # not that of a map
    assert ("d2t" in stored) == (kind in ("reduced", "fc_norm"))
    if "d2t" in stored:
        assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == np.bool_
        np.testing.assert_array_equal(np.arange(pairs.DRAFT_VOCAB) + stored["d2t"], np.flatnonzero(stored["t2d"]))
    batch = pairs.batch(TARGET)
    logits = []
    for one, weights, shared in (
        (drafter, made.params, made.shared(TARGET)),
        (_as(loaded, drafter), loaded.params, loaded.shared(TARGET)),
    ):
        states = jax.jit(one.training_states)(weights, shared, batch)
        logits.append(np.asarray(jax.jit(one.draft_logits)(weights, shared, states)))
    np.testing.assert_array_equal(*logits)


def _as(loaded: Any, drafter: Any) -> Any:
    return dataclasses.replace(loaded.drafter, objective_config=drafter.objective_config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "1 missing: fc.weight"),
        (lambda t: t.update({"fc.bias": t["norm.weight"]}), "1 left over: fc.bias"),
        (
            lambda t: t.update({"midlayer.hidden_norm.wight": t.pop("midlayer.hidden_norm.weight")}),
            "is midlayer.hidden_norm.wight",
        ),
        (lambda t: t.pop("d2t"), "no d2t, expected the map"),
        (lambda t: t.pop("lm_head.weight"), "1 missing: lm_head.weight"),
        (lambda t: t.update({"d2t": t["d2t"] + np.arange(len(t["d2t"]))}), "absolute target ids"),
        (lambda t: t.update({"d2t": t["d2t"] * 0}), "found different ids"),
    ],
)  # fmt: skip
def test_B40_B43_damaged_checkpoints_are_refused_by_name(change: Any, message: str, tmp_path: Any) -> None:
    folder = save_drafter(tmp_path / "out", pairs.draft(pairs.eagle3(TARGET)))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, TARGET)


def test_B42_its_own_head_proposes_and_the_targets_teaches(tmp_path: Any) -> None:
    """A head of its own is never taken for the target's, even over the whole vocabulary; without a draft_vocab_size
    the target's may stand in."""
    drafter = pairs.eagle3(TARGET, reduced=False)
    folder = save_drafter(tmp_path / "out", pairs.draft(drafter))
    loaded = load_drafter(folder, TARGET)
    assert loaded.head is None and loaded.shared(TARGET).head is TARGET.head
    states = jnp.ones((1, TARGET.config.hidden_size))
    own = loaded.drafter.draft_logits(loaded.params, loaded.shared(TARGET), states)
    without = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"
    }
    save_file(without, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_drafter(folder, TARGET)
    config = {
        name: value
        for name, value in json.loads((folder / "config.json").read_text()).items()
        if name != "draft_vocab_size"
    }
    (folder / "config.json").write_text(json.dumps(config))
    borrowed = load_drafter(folder, TARGET)
    theirs = borrowed.drafter.draft_logits(borrowed.params, borrowed.shared(TARGET), states)
    assert float(jnp.abs(own - theirs).max()) > 1e-3


def test_the_vocabulary_is_that_of_the_supervised_tokens() -> None:
    ids, mask = np.array([5, 5, 9, 9, 9, 1, 30]), np.array([1, 1, 1, 0, 0, 1, 1], bool)
    counts = vocabulary.count_supervised([(ids, mask)], 64)
    np.testing.assert_array_equal(vocabulary.most_frequent(counts, 3), [1, 5, 9])  # 1 before 30: the lower id
    np.testing.assert_array_equal(vocabulary.most_frequent(counts, 6), [0, 1, 2, 5, 9, 30])  # filled up
    made = vocabulary.maps(np.array([1, 5, 9]), 64)
    np.testing.assert_array_equal(made["d2t"], [1, 4, 7])
    np.testing.assert_array_equal(np.flatnonzero(made["t2d"]), [1, 5, 9])
    with pytest.raises(ConfigError, match="draft_vocab_size: found 65"):
        vocabulary.most_frequent(counts, 65)


# -- training equals serving ------------------------------------------------------------------------------------------


class Served:
    """One request over a paged cache whose unwritten rows are NaN, committed piece by piece."""

    def __init__(self, drafter: Any, params: Any, shared: Any, room: int):
        self.drafter, self.params, self.shared = drafter, params, shared
        self.table = jnp.arange(1, -(-room // 4) + 1)[None]
        fresh = drafter.init_state(int(self.table.max()) + 1, 4, jnp.float32, 1)
        self.state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), fresh)
        self.at = 0
        self._commit = jax.jit(self.drafter.commit)

    def commit(self, features: Any, tokens: Any, following: Any) -> None:
        count = len(tokens)
        layout = uniform_layout(jnp.full(1, self.at), jnp.full(1, count), self.table, count)
        rows = Rows(jnp.asarray(features), jnp.asarray(tokens), jnp.asarray(following))
        self.state = self._commit(self.params, self.shared, self.state, rows, layout)
        self.at += count

    def states(self, tokens: list[int]) -> list[np.ndarray]:
        """States behind the last committed row and behind each of these proposed tokens."""
        from jaxspec.drafters.recurrent import Scratch
        from jaxspec.models.cache import gather

        at = jnp.full(1, self.at)
        context = gather(self.state.pool, self.table, at)
        committed = jnp.arange(context[0].shape[1]) < at[:, None]
        rows: list[Any] = []
        states = [self.state.hidden[:, None]]
        for depth, token in enumerate(tokens, 1):
            attention = Scratch(context, committed, jnp.ones((1, 1, depth), bool), rows)
            out, _ = self.drafter.layer(
                self.params, self.shared, states[-1], jnp.full((1, 1), token), (at + depth - 1)[:, None], attention
            )
            states.append(out)
        return [np.asarray(x)[0, 0] for x in states]


@pytest.mark.parametrize("kind", KINDS)
def test_B32_B51_step_i_of_training_is_the_state_that_serving_has_after_i_proposals(kind: str) -> None:
    """Every row t, every step i: feature t with token t + 1 at RoPE t, then t + i; only committed K/V survive."""
    drafter = pairs.eagle3(TARGET, **KINDS[kind])
    params, shared, batch = pairs.params_of(drafter), shared_of(drafter), pairs.batch(TARGET, size=1)
    trained = np.asarray(jax.jit(drafter.training_states)(params, shared, batch))[:, 0]
    ids, features = np.asarray(batch.input_ids)[0], np.asarray(batch.features)[0]
    served = Served(drafter, params, shared, room=len(ids))
    steps, done = len(trained), 0
    for row in (2, 3, 7):
        served.commit(features[done : row + 1], ids[done : row + 1], ids[done + 1 : row + 2])
        done = row + 1
        states = served.states(ids[row + 2 : row + 1 + steps].tolist())
        np.testing.assert_allclose(np.stack(states), trained[:, row], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("reduced", [True, False])
def test_B13_q_is_the_law_that_each_token_was_drawn_from(reduced: bool) -> None:
    """Against the recurrence by hand; on a reduced vocabulary q is scattered to the target's ids, B40."""
    drafter = pairs.eagle3(TARGET, reduced=reduced)
    params, shared, batch = pairs.params_of(drafter), shared_of(drafter), pairs.batch(TARGET, size=1)
    ids, features = np.asarray(batch.input_ids)[0], np.asarray(batch.features)[0]
    served = Served(drafter, params, shared, room=len(ids) + 8)
    served.commit(features[:5], ids[:5], ids[1:6])
    one = jnp.ones(1)
    for temperature in (0.0, 0.8):
        sampling = SlotSampling(temperature * one, jnp.zeros(1, jnp.int32), one, 0 * one)
        from jaxspec.drafters.base import Slots

        slots = Slots(jnp.asarray(ids[5:6]), jnp.full(1, 5), served.table, jnp.ones(1, bool))
        keys = jax.random.split(jax.random.key(4), 1)
        proposal = jax.jit(drafter.propose)(params, shared, served.state, slots, keys, sampling)
        tokens = np.asarray(proposal.tokens)[0]
        states = served.states(tokens[:-1].tolist())
        logits = np.asarray(drafter.draft_logits(params, shared, jnp.asarray(np.stack(states))))
        allowed = np.arange(64) if not reduced else np.arange(20) + np.asarray(params["d2t"])
        assert set(tokens) <= set(allowed.tolist())
        assert isinstance(proposal.q, Sparse) == reduced
        for slot in range(len(tokens)):
            row = np.asarray(proposal.q.rows(jnp.full(1, slot)))[0]
            if temperature == 0:
                assert tokens[slot] == allowed[logits[slot].argmax()]
                continue
            expected = np.zeros(64)
            expected[allowed] = np.asarray(jax.nn.softmax(logits[slot] / temperature))
            np.testing.assert_allclose(row, expected, atol=1e-5)
            assert float(proposal.q.prob(proposal.tokens)[0, slot]) == pytest.approx(expected[tokens[slot]], abs=1e-5)


# -- the loss ---------------------------------------------------------------------------------------------------------


def naive_losses(drafter: Eagle3, params: Any, shared: Any, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cross-entropy, overlap and log-overlap of every step in plain numpy, from the states alone."""
    run = jax.jit(lambda p: drafter.draft_logits(p, shared, drafter.training_states(p, shared, batch)))
    logits = np.asarray(run(params), np.float64)
    head = np.asarray(shared.head, np.float64)
    ids = np.asarray(vocabulary.target_ids(params, drafter.config.draft_vocab))
    hidden, loss_mask = np.asarray(batch.teacher_hidden, np.float64), np.asarray(batch.loss_mask)
    steps, (size, length) = len(logits), loss_mask.shape
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    out = np.zeros((3, steps))
    for step in range(steps):
        ce, overlap, logs, known = 0.0, 0.0, 0.0, 0
        for row in range(size):
            last = np.flatnonzero(loss_mask[row])[-1]
            for t in range(length - step):
                if not loss_mask[row, t + step] or (drafter.objective_config.drop_last_row and t + step == last):
                    continue
                teacher = head @ hidden[row, t + 1 + step]
                if teacher.argmax() not in ids:
                    continue
                q = softmax(logits[step, row, t])
                ce -= (softmax(teacher[ids]) * np.log(q)).sum()
                both = np.minimum(softmax(teacher)[ids], q).sum()
                overlap, logs, known = overlap + both, logs + np.log(both), known + 1
        out[:, step] = ce / (size * length), overlap / max(known, 1), logs / max(known, 1)
    return out[0], out[1], out[2]


@pytest.mark.parametrize("lk", [None, "alpha", "lambda", "tv"])
def test_the_loss_is_the_papers_sum_in_plain_numpy(lk: str | None) -> None:
    mask = np.ones((2, 9), bool)
    mask[0, :3], mask[1, 4:6] = False, False
    batch = pairs.batch(TARGET, length=9, mask=mask)
    objective = Eagle3Objective(ttt_length=3, step_decay=0.7, lk=lk, kl_scale=0.9, kl_decay=2.0, chunk_rows=4)
    drafter = pairs.eagle3(TARGET, objective_config=objective)
    params, shared = pairs.params_of(drafter), shared_of(drafter)
    found = float(jax.jit(lambda p: drafter.objective(drafter.loss(p, shared, batch, jax.random.key(0))))(params))
    ce, overlap, logs = naive_losses(drafter, params, shared, batch)
    share = 0.9 * np.exp(-2.0 * overlap)
    each = {None: ce, "alpha": -logs, "tv": 1 - overlap, "lambda": share * ce + (1 - share) * (1 - overlap)}[lk]
    assert found == pytest.approx((0.7 ** np.arange(3) * each).sum(), rel=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_the_chunk_of_the_loss_nor_what_is_kept_changes_it_and_no_step_is_detached(kind: str) -> None:
    """In one slice (0) jax differentiates the loss; in chunks its gradient is made beside it."""
    mask = np.ones((2, 9), bool)
    mask[0, :3], mask[1, 4:6] = False, False
    batch = pairs.batch(TARGET, length=9, mask=mask)
    losses, grads = [], []
    for rows, kept in ((5, True), (64, False), (0, False)):
        objective = Eagle3Objective(ttt_length=3, chunk_rows=rows, keep_products=kept)
        drafter = pairs.eagle3(TARGET, objective_config=objective, **KINDS[kind])
        params, shared = pairs.params_of(drafter), shared_of(drafter)
        moving, fixed = _split(params)
        value, grad = jax.jit(
            jax.value_and_grad(lambda m, d=drafter, f=fixed, s=shared: d.objective(d.loss(_join(m, f), s, batch, None)))
        )(moving)
        losses.append(float(value))
        grads.append(grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    for found in grads[:2]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), found, grads[2])
    # the last step's loss alone moves fc, which only step 0 reads: through every state in between
    last = jax.jit(jax.grad(lambda m: drafter.loss(_join(m, fixed), shared, batch, None)["ce"][0][-1]))(moving)
    assert float(jnp.abs(last["fc"]["weight"]).max()) > 1e-6


def _split(params: Any) -> Any:
    from jaxspec.models.layers import split_trainable

    return split_trainable(params)


def _join(moving: Any, fixed: Any) -> Any:
    from jaxspec.models.layers import join_trainable

    return join_trainable(moving, fixed)


def test_B53_a_batch_without_supervision_has_no_loss_no_gradient_and_no_weight() -> None:
    batch = pairs.batch(TARGET, length=6, mask=np.zeros(6, bool))
    drafter = pairs.eagle3(TARGET, objective_config=Eagle3Objective(ttt_length=2, lk="lambda"))
    params, shared = pairs.params_of(drafter), shared_of(drafter)
    moving, fixed = _split(params)

    def run(moving: Any) -> Any:
        terms = drafter.loss(_join(moving, fixed), shared, batch, None)
        return drafter.objective(terms), terms

    (value, terms), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(moving)
    assert float(value) == 0.0 and all(float(jnp.abs(g).max()) == 0.0 for g in jax.tree.leaves(grads))
    assert sum(float(jnp.sum(terms[name][1])) for name in ("ce", "overlap", "log_overlap")) == 0.0


ONE_SUM = """
import re
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxspec.drafters.losses import weighed_rows

mesh = Mesh(np.array(jax.devices()).reshape(2, 1), ("data", "fsdp"))
compared = lambda common, goal: lambda logits, step: {"loss": jnp.sum((logits - goal) ** 2, axis=-1)}

def loss(rows, head, weights, goals):
    return weighed_rows(compared, "loss", rows, weights, head, goals, (), True)[0]

keys = jax.random.split(jax.random.key(0), 4)
shapes = (3, 2, 4, 5, 8), (24, 8), (3, 2, 4, 5), (3, 4, 5, 24)  # slices, steps, sequences, rows
arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
plain = jax.jit(jax.grad(loss, (0, 1)))(*arrays)
specs = P(None, None, "data"), P(), P(None, None, "data"), P(None, "data")
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*placed).compile()
for mine, theirs in zip(program(*placed), plain):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
name, sums = "", []
for line in program.as_text().splitlines():
    if line.endswith("{") and " (" in line:
        name = line
    if re.search(r" all-reduce(-start)?[(]", line):
        sums.append((name.startswith("ENTRY"), "24,8]" in line))
print(sums)
"""


@pytest.mark.ci
def test_devices_that_share_the_batch_add_up_the_heads_gradient_once() -> None:
    """Not behind each slice: what they send is the gradient, whatever the chunk."""
    assert run_on_devices(ONE_SUM, 2).strip() == "[(True, True)]"
