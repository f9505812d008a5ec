"""Grain input: order, epochs, padding, and a position that brings back exactly what would have followed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxspec.training.data import load_examples
from jaxspec.training.pipeline import BATCH_FIELDS, Batches, padded_length, steps_per_epochs
from tests.training import world


@pytest.fixture
def examples(tmp_path):
    return load_examples(world.write_data(tmp_path / "data.npz"))


def make(examples, **options):
    return Batches(examples, **{"seq_len": 24, "batch_size": 2, "seed": 3, **options})


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_each_epoch_has_every_example_once_in_its_own_order(examples):
    batches = take(make(examples, batch_size=1), 21)
    ids = np.array([batch["example_ids"].item() for batch in batches]).reshape(3, 7)
    epochs = np.array([batch["epochs"].item() for batch in batches]).reshape(3, 7)
    assert (np.sort(ids, axis=1) == np.arange(7)).all() and (epochs == np.arange(3)[:, None]).all()
    assert len({tuple(row) for row in ids.tolist()}) == 3
    plain = take(make(examples, batch_size=1, shuffle=False), 7)
    assert [batch["example_ids"].item() for batch in plain] == list(range(7))


def test_batches_have_one_shape_and_padding_is_unsupervised(examples):
    for batch in take(make(examples, accumulation=3), 5):
        assert batch["input_ids"].shape == (3, 2, 24) and batch["example_ids"].shape == (3, 2)
        assert set(BATCH_FIELDS) < set(batch) and batch["loss_mask"].dtype == bool
        for micro in range(3):
            for row in range(2):
                example = examples[batch["example_ids"][micro, row]]
                length = batch["lengths"][micro, row]
                assert length == len(example["input_ids"])
                np.testing.assert_array_equal(batch["input_ids"][micro, row, :length], example["input_ids"])
                np.testing.assert_array_equal(batch["loss_mask"][micro, row, :length], example["loss_mask"])
                assert (
                    not batch["loss_mask"][micro, row, length:].any()
                    and not batch["input_ids"][micro, row, length:].any()
                )


def test_a_finite_run_ends_with_padding_rows(examples):
    batches = list(make(examples, batch_size=4, epochs=1))
    assert len(batches) == steps_per_epochs(7, 1, 4) == 2
    assert batches[1]["lengths"].tolist()[0][3] == 0 and not batches[1]["loss_mask"][0, 3].any()
    assert steps_per_epochs(8, 3, 4) == 6


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 9])
def test_B56_position_is_exact_in_mid_epoch(examples, stop):
    first = make(examples)
    take(first, stop)
    saved = json.loads(json.dumps(first.get_state()))
    rest = take(first, 6)
    second = make(examples)
    take(second, 2)  # a position is absolute
    second.set_state(saved)
    for one, other in zip(rest, take(second, 6), strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])


def test_seeds_change_the_order(examples):
    orders = {
        tuple(int(batch["example_ids"][0, 0]) for batch in take(make(examples, seed=seed), 7)) for seed in range(4)
    }
    assert len(orders) > 1


def test_padded_length_is_the_longest_example_rounded_up(examples):
    assert padded_length(examples, 4096) == -(-examples.longest // 8) * 8
    assert padded_length(examples, 10) == 10
