"""Train-then-serve (B51) for the drafters that feed themselves: every row of a sequence trains, no anchor is drawn.

EAGLE-3 reads the code of the token `LAG` further on and must find the row that tells, at every step. EAGLE's feature is
the target's hidden state itself, so its world adds the code to the state, in columns that the head does not read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import recurrent
from jaxspec.drafters.base import Batch, Shared
from jaxspec.drafters.draft_tree import DynamicTree
from jaxspec.drafters.eagle import Eagle, EagleObjective
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Objective
from jaxspec.drafters.eagle_config import EagleConfig, fresh_model
from jaxspec.models.decoder import FINAL, DecoderOutput
from tests.helpers.marks import REPEATS
from tests.oracle import world

pytestmark = pytest.mark.ci

METHODS = ("eagle3", "eagle")
STEPS = {"eagle3": 3, "eagle": 1}
LAGS = {"eagle3": 4, "eagle": 2}  # the last proposal needs the newest committed feature
USED = 15  # tokens 1 … 15: a reduced vocabulary whose offsets are not zero

_RNG = np.random.default_rng(3)
_BASIS = np.linalg.qr(_RNG.normal(size=(world.HIDDEN, world.HIDDEN)))[0].astype(np.float32)
_NEAR = np.linalg.qr(_RNG.normal(size=(16, 16)))[0].astype(np.float32)
HEAD_ROWS = np.zeros((world.VOCAB, world.HIDDEN), np.float32)
HEAD_ROWS[:16] = _NEAR @ _BASIS[:16]
FAR = np.zeros((world.VOCAB, world.HIDDEN), np.float32)
FAR[:16] = 2.0 * np.sign(_RNG.normal(size=(16, 8))).astype(np.float32) @ _BASIS[16:]


def eagle_state(tokens: Any, lag: int) -> Any:
    """Next token where the head reads it, the far one beside it: 15 + 9 columns hold 15 + 15 codes as sums."""
    far = jnp.asarray(FAR)[tokens[..., lag:]]
    near = 6.0 * jnp.asarray(HEAD_ROWS)[tokens[..., 1 : tokens.shape[-1] - lag + 1]]
    return near + far


@dataclasses.dataclass(frozen=True)
class StateDecoder(world.TableDecoder):
    """Its only feature is its final state; `late` hands out that of another row, the fault of B39 and B51."""

    late: int = 0

    def check_taps(self, taps: Any) -> None:
        assert taps == (FINAL,)

    def head(self, params: Any) -> Any:
        return jnp.asarray(HEAD_ROWS)

    def logits(self, params: Any, hidden: Any) -> Any:
        return hidden @ jnp.asarray(HEAD_ROWS).T

    def forward(self, params, tokens, positions, attention, caches=None, taps=()) -> DecoderOutput:
        table = params["table"]

        def state(rows: Any) -> Any:
            return 6.0 * jnp.asarray(HEAD_ROWS)[table[rows + 1]] + jnp.asarray(FAR)[table[rows + self.lag]]

        return DecoderOutput(state(positions), state(jnp.maximum(positions + self.late, 0)), caches)


SHARED = {"eagle3": world.SHARED, "eagle": Shared(world.TABLES["embedding"], jnp.asarray(HEAD_ROWS))}


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(1, 1 + USED, shape).astype(np.int32)


def make(method: str, tree: Any = None) -> Any:
    model = fresh_model(world.MODEL, intermediate_size=64)
    if method == "eagle":
        config = EagleConfig(model, (FINAL,), world.VOCAB, 1, world.HIDDEN)
        return Eagle(config, tree, 1, objective_config=EagleObjective(token_alpha=1.0, noise=0.0))
    config = EagleConfig(model, (0,), USED, 1, world.HIDDEN)
    objective = Eagle3Objective(ttt_length=STEPS[method], step_decay=1.0)
    return Eagle3(config, tree, STEPS[method], maps=("d2t", "t2d"), objective_config=objective)


def batch(rng: np.random.Generator, method: str, shift: int = 0, size: int = 12) -> Batch:
    lag, length = LAGS[method], world.LENGTH
    tokens = draw(rng, size, length + lag + 1)
    whole = eagle_state(tokens, lag) if method == "eagle" else world.features_of(tokens, lag)
    features = jnp.roll(whole, shift, axis=1)[:, 1:length]
    ids = tokens[:, 1:length]
    mask = np.broadcast_to(np.arange(length - 1) >= lag, ids.shape)
    return Batch(
        input_ids=jnp.asarray(ids),
        loss_mask=jnp.asarray(mask),
        features=features,
        anchors=jnp.zeros((size, 0), jnp.int32),
        keep=jnp.zeros((size, 0), bool),
        teacher_hidden=20.0 * world.TABLES["head"][tokens[:, 2 : length + 1]],
    )


def train(method: str, shift: int = 0, steps: int = 600) -> tuple[Any, float]:
    """Weights and accuracy on a fresh batch; stops at 100 % on two of them."""
    drafter, rng, optimizer = make(method), np.random.default_rng(5), world.OPTIMIZER
    counts = np.zeros(world.VOCAB)
    counts[1 : 1 + USED] = 1
    params = drafter.init(jax.random.key(5))
    params = drafter.with_vocabulary(params, counts) if method == "eagle3" else params
    moving, fixed = recurrent.ly.split_trainable(params)

    def loss(moving: Any, data: Batch) -> Any:
        terms = drafter.loss(recurrent.ly.join_trainable(moving, fixed), SHARED[method], data, jax.random.key(0))
        return drafter.objective(terms), terms["metric/accuracy"]

    @jax.jit
    def step(moving: Any, state: Any, data: Batch) -> Any:
        grads, _ = jax.grad(loss, has_aux=True)(moving, data)
        updates, state = optimizer.update(grads, state)
        return jax.tree.map(jnp.add, moving, updates), state

    def accuracy() -> float:
        hits, total = measure(moving, batch(rng, method, shift))
        return float(hits) / float(total)

    measure = jax.jit(lambda moving, data: loss(moving, data)[1])
    state = optimizer.init(moving)
    for index in range(steps):
        moving, state = step(moving, state, batch(rng, method, shift))
        if index % 50 == 49 and all(accuracy() == 1.0 for _ in range(2)):
            break
    return recurrent.ly.join_trainable(moving, fixed), accuracy()


def target(method: str, late: int = 0) -> world.Loaded:
    lag = LAGS[method]
    table = draw(np.random.default_rng(77), world.MODEL.max_position + lag + 40)
    decoder = StateDecoder(lag, late=late) if method == "eagle" else world.TableDecoder(lag)
    return world.Loaded(decoder, {"table": jnp.asarray(table), "model": {"layers": []}})


def serve(
    method: str, params: Any, drafter: Any = None, late: int = 0, prompts: Any = (6, 9, 13), new_tokens: int = 24
) -> Any:
    """tau counter of the weights on a world that training never saw; the text is the target's whatever they say."""
    drafter = make(method) if drafter is None else drafter
    return world.serve(drafter, params, LAGS[method], prompts, new_tokens, target(method, late))[1]


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[Any, float]]:
    return {method: train(method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_B51_training_reaches_100_percent_and_serving_accepts_100_percent(trained: Any, method: str) -> None:
    params, accuracy = trained[method]
    assert accuracy == 1.0
    counter = serve(method, params)
    assert world.acceptance(counter) == 1.0
    assert counter.tau == STEPS[method] + 1


def test_B51_the_same_weights_propose_the_answer_as_a_tree(trained: Any) -> None:
    tree = DynamicTree(top_k=3, depth=STEPS["eagle3"], nodes=8)
    counter = serve("eagle3", trained["eagle3"][0], make("eagle3", tree))
    assert counter.tau == STEPS["eagle3"] + 1


@pytest.mark.parametrize("shift", [pytest.param(-1, marks=REPEATS), 1])
def test_B51_control_features_shifted_by_one_in_training_are_useless_when_served(shift: int) -> None:
    params, _ = train("eagle3", shift, steps=150)
    assert world.acceptance(serve("eagle3", params)) < 0.5


@pytest.mark.parametrize("late", [-1, 1])
def test_B51_control_another_rows_feature_is_useless_to_eagle(trained: Any, late: int) -> None:
    """Its teacher is the feature itself, so a shift of both in training is none: the fault is planted in serving."""
    assert world.acceptance(serve("eagle", trained["eagle"][0], late=late)) < 0.5


def test_B39_control_eagle_weights_on_a_drafter_of_another_head(trained: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Eagle, "draft_logits", lambda self, params, shared, states: states @ world.TABLES["head"].T)
    assert world.acceptance(serve("eagle", trained["eagle"][0])) < 0.5


def test_B51_control_a_rows_own_token_in_place_of_the_next_one(trained: Any, monkeypatch: Any) -> None:
    """EAGLE's left shift left out when served: the newest feature is known, but not to the row that needs it."""
    extend = recurrent.RecurrentDrafter.extend

    def unshifted(self, params, shared, pool, rows, layout):
        layout = dataclasses.replace(layout, positions=layout.positions + 1)
        return extend(self, params, shared, pool, dataclasses.replace(rows, next_tokens=rows.tokens), layout)

    monkeypatch.setattr(recurrent.RecurrentDrafter, "extend", unshifted)
    assert world.acceptance(serve("eagle3", trained["eagle3"][0])) < 1.0


@pytest.mark.parametrize("method", METHODS)
def test_B51_control_the_state_of_the_row_before_the_newest(trained: Any, method: str, monkeypatch: Any) -> None:
    """A commit that keeps another row's state proposes for another position, however good the weights are."""
    commit = recurrent.RecurrentDrafter.commit

    def late(self, params, shared, state, rows, layout):
        shorter = dataclasses.replace(layout, lengths=jnp.maximum(layout.lengths - 1, 0))
        kept = commit(self, params, shared, state, rows, shorter)
        return dataclasses.replace(kept, pool=commit(self, params, shared, state, rows, layout).pool)

    monkeypatch.setattr(recurrent.RecurrentDrafter, "commit", late)
    assert world.acceptance(serve(method, trained[method][0])) < 0.5


def test_B40_control_offsets_read_as_absolute_ids(trained: Any) -> None:
    params = trained["eagle3"][0]
    wrong = {**params, "d2t": params["d2t"] - jnp.arange(USED, dtype=jnp.int32)}  # id = draft id + (offset - draft id)
    assert world.acceptance(serve("eagle3", wrong)) < 0.5
