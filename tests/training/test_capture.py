"""Capture into a folder: resumable, estimated before it starts, described, checked; and DeepSpec's cache."""

from __future__ import annotations

import dataclasses
import json
import struct
import types

import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import ConfigError, DataError, ResumeError
from jaxspec.training.data import load_examples
from jaxspec.training.featurestore import capture, shards
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.featurestore.offline import Joined, open_records
from jaxspec.training.featurestore.storage import Storage
from jaxspec.training.pipeline import Batches
from tests.training import stored
from tests.training.stored import HIDDEN, WIDTH, TokenEncoder

LAYOUT = Layout(WIDTH, HIDDEN, "float32")


@pytest.fixture
def examples(tmp_path):
    return stored.examples(tmp_path)


def write(storage, examples, encoder=None, **options):
    lines: list[str] = []
    encoder = encoder or TokenEncoder(LAYOUT)
    say, each = options.pop("say", lines.append), options.pop("shard_examples", 3)
    about = options.pop("about", None) or stored.about(examples, LAYOUT)
    manifest = capture.capture_shards(
        storage, about, examples, lambda: encoder, shard_examples=each, say=say, **options
    )
    return manifest, lines


def content(storage):
    return {name: storage.read(name) for name in storage.names()}


def test_a_capture_goes_on_with_the_shards_that_are_whole_and_ends_in_the_same_bytes(tmp_path, examples):
    whole, lines = write(Storage(tmp_path / "whole"), examples)
    assert [(shard["first"], shard["count"]) for shard in whole["shards"]] == [(0, 3), (3, 3), (6, 1)]
    assert "7 examples" in lines[0] and "GiB in 3 shards" in lines[0]
    storage = Storage(tmp_path / "halves")
    with pytest.raises(RuntimeError, match="went away"):
        write(storage, examples, TokenEncoder(LAYOUT, fails=5))
    assert storage.names("shard-", ".arrayrecord") == ["shard-000000.arrayrecord"] and not storage.exists(
        "manifest.json"
    )
    with pytest.raises(DataError, match=r"not finished, expected manifest\.json; give the same .* again"):
        open_records(storage, stored.about(examples, LAYOUT), examples)
    (storage.root / ".shard-000001.arrayrecord.new-dead").write_bytes(b"half")  # as a kill leaves it
    second = TokenEncoder(LAYOUT)
    stops = iter([False, False, True])
    assert write(storage, examples, second, stop=lambda: next(stops))[0] is None and second.calls == 2
    third = TokenEncoder(LAYOUT)
    assert write(storage, examples, third)[0] == whole and third.calls == 1
    assert content(storage) == content(Storage(tmp_path / "whole"))
    assert not list(storage.root.glob(".*new*"))
    assert write(storage, examples, None)[1] == [f"{storage} is complete: 3 shards, 7 examples"]


def test_a_shard_that_lost_bytes_is_made_again_and_another_config_is_refused(tmp_path, examples):
    storage = Storage(tmp_path / "f")
    with pytest.raises(RuntimeError):
        write(storage, examples, TokenEncoder(LAYOUT, fails=6))
    shard = storage.local("shard-000000.arrayrecord")
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ResumeError, match=r"this changed: taps: the run has \[0, 1\], now \[1\]"):
        write(storage, examples, about=stored.about(examples, LAYOUT, taps=[1]))
    encoder = TokenEncoder(LAYOUT)
    write(storage, examples, encoder)
    assert encoder.calls == 3  # two for the short one, one for what was missing
    with pytest.raises(ResumeError, match="shard_examples"):
        write(storage, examples, shard_examples=2)


def test_a_small_disk_is_refused_before_anything_is_written(tmp_path, examples, monkeypatch):
    monkeypatch.setattr(Storage, "free", lambda self: 70 << 20)
    with pytest.raises(ConfigError, match=r"features\.path .*GiB free, expected .* GiB for 1\d\d tokens; set features"):
        write(
            Storage(tmp_path / "f"),
            examples,
            about=stored.about(examples, Layout(1 << 16, 0, "float32"), width=1 << 16),
        )
    assert not (tmp_path / "f").exists()


def test_the_manifest_is_checked_field_by_field(tmp_path, examples):
    storage = Storage(tmp_path / "f")
    write(storage, examples)
    wanted = stored.about(examples, LAYOUT)
    assert open_records(storage, wanted | {"target": "moved", "teacher": False}, examples).layout == LAYOUT
    for name, other in (("revision", "r2"), ("taps", [1, 0]), ("storage", "int8"), ("data", "x"), ("vocabulary", "v")):
        with pytest.raises(DataError, match=rf"{name}: the files have .*, the run wants"):
            open_records(storage, wanted | {name: other}, examples)
    path = storage.local("manifest.json")
    text = path.read_text()
    path.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match=r"of version 2, expected .* of version 1"):
        open_records(storage, wanted, examples)
    path.write_text(text.replace('"teacher": true', '"teacher": false'))
    with pytest.raises(DataError, match="teacher: the files have False, the run wants True"):
        open_records(storage, wanted, examples)
    path.write_text(text)
    storage.local("shard-000001.arrayrecord").unlink()
    with pytest.raises(DataError, match=r"shard-000001\.arrayrecord\): another file, or none"):
        open_records(storage, wanted, examples)
    with pytest.raises(DataError, match=r"features\.path: nothing at"):
        open_records(Storage(tmp_path / "none"), wanted, examples)
    with pytest.raises(ConfigError, match=r"features\.path: gs://b/f, expected a folder"):
        Storage("gs://b/f")


def test_batches_bring_the_features_of_their_examples_and_resume_in_mid_epoch(tmp_path, examples):
    storage = Storage(tmp_path / "f")
    write(storage, examples)
    records = open_records(storage, stored.about(examples, LAYOUT), examples)
    make = lambda threads: Batches(  # noqa: E731
        Joined(examples, records), seq_len=24, batch_size=2, accumulation=2, layout=LAYOUT, threads=threads
    )
    batches, plain = make(2), Batches(examples, seq_len=24, batch_size=2, accumulation=2)
    for step in range(5):
        if step == 3:
            state = batches.get_state()
            batches = make(0)
            batches.set_state(state)
        batch, expected = next(batches), next(plain)
        assert set(batches.fields) == batch.keys() - {"lengths"}
        for name, array in expected.items():
            np.testing.assert_array_equal(batch[name], array)
        length = batch["lengths"][1, 0]
        row = {"input_ids": batch["input_ids"][1, 0, :length], "loss_mask": batch["loss_mask"][1, 0, :length]}
        own = stored.arrays(row, LAYOUT)
        for name in ("features", "teacher"):
            np.testing.assert_array_equal(batch[name][1, 0, :length], own[name].astype(np.float32))
            assert not batch[name][1, 0, length:].any()
    other = dataclasses.replace(examples, tokens=examples.tokens[::-1].copy())
    with pytest.raises(DataError, match=r"example 2\): features of other tokens"):
        Joined(other, records)[2]


def write_cache(folder, examples, **changes):
    """A DeepSpec cache of the examples, in another order, each with one masked token behind it."""
    folder.mkdir()
    index, payload, layout = [], b"", Layout(WIDTH, HIDDEN, "bfloat16")
    for sample, number in enumerate(np.random.default_rng(0).permutation(len(examples))):
        example = examples[int(number)]
        own, length = stored.arrays(example, layout), len(example["input_ids"]) + 1
        pad = lambda array: np.concatenate([array, np.zeros((1, *array.shape[1:]), array.dtype)])  # noqa: E731
        parts = [
            pad(example["input_ids"]).astype("<i4"), pad(np.ones(length - 1, np.uint8)),
            pad(example["loss_mask"].astype(np.uint8)), pad(own["features"].astype(ml_dtypes.bfloat16)),
            pad(own["teacher"].astype(ml_dtypes.bfloat16)),
        ]  # fmt: skip
        offsets = []
        for part in parts:
            offsets.append(len(payload))
            payload += part.tobytes()
        index.append(struct.pack("<QIIQQQQQ", sample, 0, length, *offsets))
    (folder / "samples.idx").write_bytes(b"".join(index))
    (folder / "shard-00000.bin").write_bytes(payload)
    manifest = {
        "version": 2, "num_samples": len(examples), "num_shards": 1, "target_layer_ids": [0, 1], "hidden_size": HIDDEN,
        "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}], "target_model_name_or_path": "org/Tiny", **changes,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Storage(folder)


def test_a_deepspec_cache_gives_examples_and_their_features(tmp_path, examples):
    storage = write_cache(tmp_path / "cache", examples)
    layout = Layout(WIDTH, HIDDEN, "bfloat16")
    wanted = stored.about(examples, layout)
    records = open_records(storage, wanted, examples)
    assert records.layout == layout
    for index in range(len(examples)):
        row = Joined(examples, records)[index]
        np.testing.assert_array_equal(
            row["record"]["features"], stored.arrays(row, layout)["features"].astype(ml_dtypes.bfloat16)
        )
    again = load_examples(tmp_path / "cache")
    assert sorted(again[i]["input_ids"].tobytes() for i in range(7)) == sorted(
        examples[i]["input_ids"].tobytes() for i in range(7)
    )
    assert again.statistics.supervised == examples.statistics.supervised
    for name, value in (("taps", [0]), ("hidden_size", 8), ("target", "other"), ("storage", "int8")):
        with pytest.raises(DataError, match=r"features\.path \(manifest\.json\)"):
            open_records(storage, wanted | {name: value}, examples)
    (storage.root / "shard-00000.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"shard-00000\.bin\): 5 bytes, expected at least"):
        open_records(storage, wanted, examples)


@pytest.mark.parametrize(("field", "value"), [("version", 1), ("hidden_dtype", "float8_e4m3fn"), ("num_samples", 3)])
def test_another_cache_is_refused_by_field(tmp_path, examples, field, value):
    storage = write_cache(tmp_path / "cache", examples, **{field: value})
    with pytest.raises(DataError, match=r"features\.path \("):
        open_records(storage, stored.about(examples, Layout(WIDTH, HIDDEN, "bfloat16")), examples)
    with pytest.raises(DataError, match=r"data\.path: the folder"):
        (storage.root / "manifest.json").unlink()
        load_examples(storage.root)


def swapped(path):
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: path.write_bytes(b""), swapped, zeroed],
    ids=["gone", "cut", "another", "zeroed"],
)
def test_a_damaged_file_is_refused_at_the_start_and_the_same_capture_makes_it_anew(tmp_path, examples, damage):
    storage = Storage(tmp_path / "f")
    write(storage, examples)
    before = content(storage)
    damage(storage.local("shard-000001.arrayrecord"))
    with pytest.raises(DataError, match=r"features\.path \(shard-000001\.arrayrecord\): another file, or none"):
        open_records(storage, stored.about(examples, LAYOUT), examples)
    write(storage, examples)
    assert content(storage) == before


def test_a_zeroed_file_that_is_not_hashed_is_one_error(tmp_path, examples):
    storage = Storage(tmp_path / "f")
    write(storage, examples)
    zeroed(storage.local("shard-000001.arrayrecord"))
    with pytest.raises(DataError, match=r"damaged|records"):
        open_records(storage, stored.about(examples, LAYOUT), examples, hashed=False).record(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("shards", None), ("shard_examples", None), ("examples", -1), ("shards", [{}]), ("shards", [{"file": 3}])],
)
def test_a_manifest_with_odd_content_names_the_field(tmp_path, examples, name, value):
    storage = Storage(tmp_path / "f")
    write(storage, examples)
    path = storage.local("manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DataError, match=r"features\.path \(manifest\.json\)"):
        open_records(storage, stored.about(examples, LAYOUT), examples)


def test_a_path_that_is_no_folder_is_one_error(tmp_path, examples):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"features\.path: .*file.*, which cannot be read"):
        open_records(Storage(tmp_path / "file"), stored.about(examples, LAYOUT), examples)


def test_a_broken_side_file_is_a_missing_shard(tmp_path, examples):
    storage = Storage(tmp_path / "f")
    with pytest.raises(RuntimeError):
        write(storage, examples, TokenEncoder(LAYOUT, fails=6))
    storage.local("shard-000000.json").write_text("{")
    assert write(storage, examples)[0]["examples"] == 7


def test_a_disk_that_fills_up_is_one_error(tmp_path, monkeypatch):
    class Full:
        def __init__(self, path, options):
            pass

        def write(self, record):
            raise RuntimeError("write() failed: No space left on device")

        def close(self):
            raise RuntimeError("Failed to close chunk_writer")

    monkeypatch.setattr(shards, "require", lambda: types.SimpleNamespace(ArrayRecordWriter=Full))
    with pytest.raises(DataError, match=r"features\.path: .* which cannot be written .*a writable place with room"):
        shards.write_shard(Storage(tmp_path), "a.arrayrecord", [b"x"])
