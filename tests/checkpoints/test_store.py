"""Safetensors folders: what is read, what is refused with which words, and atomic writing."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints import atomic, safetensors_file
from jaxspec.checkpoints.safetensors_file import DTYPES, LazyTensor, read_header, write_safetensors
from jaxspec.checkpoints.store import TensorFolder, match, read_config, write_folder
from jaxspec.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


def _folder(path: Path, **tensors: np.ndarray) -> Path:
    return write_folder(path, tensors, {"model_type": "toy"})


def _shards(path: Path) -> Path:
    path.mkdir()
    save_file({"a": np.ones((2, 3), np.float32)}, path / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros((4,), np.float16)}, path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_round_trips(code: str, tmp_path: Path) -> None:
    value = np.arange(12).reshape(3, 4).astype(DTYPES[code])
    folder = TensorFolder(_folder(tmp_path / "m", x=value, empty=value[:0], scalar=value[0, 0].reshape(())))
    read = folder.read("x")
    assert read.dtype == DTYPES[code] == folder.dtype("x")
    assert read.tobytes() == value.tobytes()
    assert folder.shape("empty") == (0, 4) and folder.read("empty").size == 0
    assert folder.read("scalar").shape == ()


def test_order_and_bytes_are_kept(tmp_path: Path) -> None:
    tensors = {"z": np.float32([1, 2]), "a": np.arange(3, dtype=np.uint8), "m": np.ones((2, 2), BF16)}
    folder = TensorFolder(write_folder(tmp_path / "m", tensors, {}, metadata={"format": "pt", "k": "v"}))
    assert folder.names() == ["z", "a", "m"]
    assert folder.metadata() == {"format": "pt", "k": "v"}


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"b": np.arange(5, dtype=np.int64), "a": np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)}
    read = load_file(_folder(tmp_path / "m", **tensors) / "model.safetensors")
    assert all(np.array_equal(read[name], value) for name, value in tensors.items())


def test_lazy_tensor_is_computed_when_written_and_its_shape_is_checked(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", {"x": LazyTensor((2,), BF16, lambda: np.ones(2, BF16))}, {})
    assert TensorFolder(tmp_path / "m").read("x").tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"tensor 'x': found float32 \(3,\), expected bfloat16 \(2,\)"):
        write_folder(tmp_path / "n", {"x": LazyTensor((2,), BF16, lambda: np.ones(3, np.float32))}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_sharded_folder(tmp_path: Path) -> None:
    folder = TensorFolder(_shards(tmp_path / "m"))
    assert folder.shapes() == {"a": (2, 3), "b": (4,)}
    assert folder.read("b").dtype == np.float16


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (_shards(tmp_path / "m") / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"missing shard model-00002-of-00002\.safetensors, expected all 2 shards"
    ):
        TensorFolder(tmp_path / "m")


def test_index_that_promises_too_much_or_too_little(tmp_path: Path) -> None:
    index = _shards(tmp_path / "m") / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["c"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: found a shard that lacks c"):
        TensorFolder(tmp_path / "m")
    save_file({"a": np.ones(1), "d": np.ones(1)}, tmp_path / "m" / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="holds d besides"):
        TensorFolder(tmp_path / "m")


def test_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    index = _shards(tmp_path / "m") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected a file name in the same folder"):
        TensorFolder(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_file_is_named_with_both_lengths(keep: int, tmp_path: Path) -> None:
    path = _folder(tmp_path / "m", x=np.ones((8, 8), np.float32)) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: .*(truncated|no safetensors header).*fetch the file again"
    ):
        TensorFolder(tmp_path / "m")


def test_longer_file_is_refused(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m", x=np.ones(4)) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"junk")
    with pytest.raises(CheckpointError, match="too long"):
        TensorFolder(tmp_path / "m")


def _raw(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{not json", b"", "header that is not JSON"),
        ([1, 2], b"", "header of type list"),
        ({"x": {"dtype": "F32", "shape": [2]}}, b"", "tensor 'x': found header entry"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000", "tensor 'x': found header entry"),
        ({"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"0000", "found dtype 'F99', expected one of"),
        (
            {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"0000",
            r"found 4 bytes, expected 8 for F32 \[2\]",
        ),
        ({"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"00", "starts at byte"),
    ],
)
def test_broken_header_is_one_clear_error(header: Any, data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(_raw(tmp_path / "x.safetensors", header, data))


def test_absent_folder_and_bad_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: found no such folder, expected a checkpoint folder"):
        read_config(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"config\.json: found no such file"):
        read_config(tmp_path)
    for text, words in (("{", "text that is not JSON"), ("[]", "JSON of type list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json: found {words}"):
            read_config(tmp_path)


def test_pickle_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"only pickle weights \(pytorch_model\.bin\), expected \*\.safetensors"):
        TensorFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="found no weights"):
        TensorFolder(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {name: np.ones(1)})
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors and no model\.safetensors\.index\.json"):
        TensorFolder(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert TensorFolder(tmp_path).names() == ["a"]


def test_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _folder(tmp_path / "m", x=np.zeros(4))

    def fail() -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device.*nothing was changed"):
        write_folder(old, {"y": np.ones(2), "x": LazyTensor((4,), np.dtype(np.float32), fail)}, {"new": True})
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "n", {"x": LazyTensor((4,), np.dtype(np.float32), _interrupt)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert read_config(old) == {"model_type": "toy"} and TensorFolder(old).names() == ["x"]


def _interrupt() -> np.ndarray:
    raise KeyboardInterrupt


def test_old_folder_comes_back_when_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _folder(tmp_path / "m", x=np.zeros(4))
    rename = Path.rename

    def stubborn(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(atomic.Path, "rename", stubborn)
    with pytest.raises(CheckpointError, match="Input/output error"):
        _folder(old, y=np.ones(1))
    assert TensorFolder(old).names() == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_existing_folder_is_replaced_whole(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", {"x": np.zeros(4)}, {"n": 1}, {"old.txt": "old"})
    write_folder(tmp_path / "m", {"y": np.zeros(4)}, {"n": 2}, {"note.json": {"é": 1}, "raw": b"\0"})
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["config.json", "model.safetensors", "note.json", "raw"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_somebody_elses_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="folder that is not a checkpoint"):
        _folder(tmp_path / "home", x=np.ones(1))
    with pytest.raises(CheckpointError, match="found a file, expected a folder or nothing"):
        _folder(tmp_path / "file", x=np.ones(1))
    assert (tmp_path / "home" / "photos").is_dir()


def test_unknown_dtype_is_refused_before_anything_appears(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'x': found dtype complex64"):
        _folder(tmp_path / "m", x=np.ones(2, np.complex64))
    assert list(tmp_path.iterdir()) == []


def test_B43_match_lists_everything_at_once() -> None:
    expected = {"a": (2, 3), "b.weight": (4,), "c": (1,)}
    found = {"a": (3, 2), "b.weights": (4,), "c": (1,), "model.rotary_emb.inv_freq": (8,), "d": (1,)}
    with pytest.raises(CheckpointError) as caught:
        match(expected, found, where="folder")
    text = str(caught.value)
    assert "1 missing: b.weight;" in text and "2 left over: b.weights, d;" in text
    assert "a (found [3, 2], expected [2, 3])" in text and "inv_freq" not in text
    assert "is b.weights meant to be b.weight?" in text
    match(expected, expected)


def test_fingerprint_changes_with_config_names_and_values(tmp_path: Path) -> None:
    value = np.zeros(100_000, np.float32)
    first = TensorFolder(_folder(tmp_path / "a", x=value)).fingerprint()
    assert TensorFolder(_folder(tmp_path / "b", x=value)).fingerprint() == first
    assert TensorFolder(_folder(tmp_path / "c", y=value)).fingerprint() != first
    assert TensorFolder(_folder(tmp_path / "d", x=value + 1)).fingerprint() != first
    assert TensorFolder(write_folder(tmp_path / "e", {"x": value}, {})).fingerprint() != first


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m", x=np.ones(64)) / "model.safetensors"
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="the file changed while it was read"):
        safetensors_file.read_tensor(header, "x")


@pytest.mark.parametrize(
    "config", [{"architectures": 5}, {"architectures": [["x"]]}, {"architectures": [{}]}, {"dflash_config": [1]}]
)
def test_a_config_of_other_types_is_named(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=next(iter(config))):
        read_config(tmp_path)


def test_a_header_that_claims_more_than_any_file_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        TensorFolder(tmp_path)
