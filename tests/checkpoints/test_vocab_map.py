"""Reduced draft vocabularies: offsets, not ids; range, order and mask checked at load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints.store import TensorFolder, read_config
from jaxspec.checkpoints.vocab_map import check_vocab_map, target_ids
from jaxspec.errors import CheckpointError


def _mask(ids: list[int], size: int = 12) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[ids] = True
    return mask


def test_B40_offsets_become_target_ids() -> None:
    d2t = np.asarray([5, 8, 8])
    assert target_ids(d2t, None, 12, where="x").tolist() == [5, 9, 10]
    assert target_ids(d2t, _mask([5, 9, 10]), 12, where="x").tolist() == [5, 9, 10]


def test_B40_all_zero_offsets_over_the_whole_vocabulary_are_the_identity() -> None:
    zero = np.zeros(12, np.int64)
    assert target_ids(zero, np.ones(12, bool), 12, where="x").tolist() == list(range(12))
    check_vocab_map({"draft_vocab_size": 12}, {"d2t": zero}, 12, where="x")
    check_vocab_map({}, {}, 12, where="x")


def test_B40_absolute_ids_are_recognised_as_such() -> None:
    with pytest.raises(CheckpointError, match="d2t: found absolute target ids, expected offsets"):
        target_ids(np.asarray([5, 9, 10]), _mask([5, 9, 10]), 12, where="x")


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        ([5, 9, 10], None, r"found target ids from 5 to 12, expected 0 to 11"),
        ([-1, 0, 0], None, r"found target ids from -1 to 2"),
        ([5, 2, 0], None, "do not ascend"),
        ([5, 4, 6], None, "do not ascend"),
        ([5, 8, 8], _mask([5, 9]), r"d2t and t2d: found different ids \(3 and 2 of them\)"),
        ([5, 8, 8], _mask([5, 9], 11), r"t2d: found shape \[11\], expected \[12\]"),
    ],
)
def test_B40_a_wrong_map_is_refused(d2t: list[int], t2d: np.ndarray | None, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        target_ids(np.asarray(d2t), t2d, 12, where="x")


def test_B40_map_and_config_must_agree() -> None:
    with pytest.raises(CheckpointError, match=r"draft_vocab_size: found 3 and no d2t"):
        check_vocab_map({"draft_vocab_size": 3}, {}, 12, where="x")
    with pytest.raises(CheckpointError, match=r"d2t: found shape \[2\], expected \[3\]"):
        check_vocab_map({"draft_vocab_size": 3}, {"d2t": np.zeros(2, np.int64)}, 12, where="x")


def test_B40_public_checkpoints_hold_offsets(root: Path) -> None:
    read = 0
    for draft in sorted((root / "tests" / "golden").glob("07_eagle3_*/draft")):
        folder, config = TensorFolder(draft), read_config(draft)
        if "d2t" not in folder.names():
            continue
        ids = target_ids(folder.read("d2t"), folder.read("t2d"), config["vocab_size"], where=str(draft))
        assert ids.shape == (config["draft_vocab_size"],) and folder.read("t2d")[ids].all()
        read += 1
    assert read > 0
