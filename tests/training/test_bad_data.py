"""Data files that are broken in ways a reader must survive: one DataError naming the file, or a counted row."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from jaxspec.errors import CheckpointError, ConfigError, DataError
from jaxspec.training.directory import check, locked
from jaxspec.training.packed import packed
from jaxspec.training.records import BadRow, conversations


@pytest.mark.parametrize(
    ("line", "says"),
    [(b'{"messages": "\xe9"}', "UTF-8"), (b"[" * 100_000, "nested too deeply"), (b'{"a": ', "no JSON")],
)
def test_broken_lines_name_file_and_line(tmp_path, line, says):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2.*{says}"):
        list(conversations(path))


def test_a_lone_surrogate_is_a_dropped_row(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}\n')
    ((_, row),) = conversations(path)
    assert isinstance(row, BadRow) and row.reason == "content is not Unicode text"


def test_broken_token_files_name_the_file(tmp_path):
    alone = tmp_path / "alone.npz"
    with alone.open("wb") as file:
        np.save(file, np.arange(3))
    good = tmp_path / "good.npz"
    np.savez_compressed(good, tokens=np.arange(4000, dtype=np.uint16), offsets=[0, 4000], prompt_lengths=[1])
    torn = tmp_path / "torn.npz"
    with zipfile.ZipFile(good) as source:
        info = source.infolist()[0]
    data = bytearray(good.read_bytes())
    data[info.header_offset + 60 : info.header_offset + 80] = b"\xff" * 20
    torn.write_bytes(data)
    wide = tmp_path / "wide.npz"
    np.savez(wide, tokens=np.arange(10) + 2**32, offsets=[0, 10], prompt_lengths=[1])
    for path in (alone, torn, wide):
        with pytest.raises(DataError, match=path.name):
            packed(path)
    assert len(packed(good)[0]) == 4000


def test_a_run_directory_that_cannot_exist_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file" / "run", tmp_path / ("n" * 300)):
        with pytest.raises(ConfigError, match=r"run\.directory"):
            check(place, fresh=False)
            with locked(place):
                raise AssertionError("the lock must not be had")


def test_an_export_folder_of_somebody_else_is_refused_before_training(tmp_path):
    from jaxspec.checkpoints.atomic import check_replaceable

    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        check_replaceable(tmp_path)
