"""Records of stored features: what int8 keeps and loses, round trips, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import ConfigError, DataError
from jaxspec.training.featurestore.codec import Layout, dequantise, encode_rows, quantise, reconstruction_error
from jaxspec.training.featurestore.shards import Reader, file_bytes, write_shard
from jaxspec.training.featurestore.storage import Storage
from tests.training.stored import arrays


def sink_like(rows: int = 12, width: int = 64) -> np.ndarray:
    """float32 [2, rows, width]: ordinary rows, and a first one whose largest channel is SmolLM2's 24,891."""
    features = np.random.default_rng(0).normal(size=(2, rows, width)).astype(np.float32)
    features[:, 0] *= 300
    features[:, 0, 5] = 24891.0
    features[:, 3, 7] = 900.0  # a channel that is large in an ordinary row costs its group alone
    return features


def test_a_group_of_32_channels_has_a_scale_of_its_own_and_half_of_it_bounds_the_error():
    features = sink_like()
    codes, scales = quantise(jnp.asarray(features))
    assert codes.dtype == jnp.int8 and scales.dtype == jnp.bfloat16 and scales.shape == (2, 12, 2)
    tops = np.abs(features).reshape(2, 12, 2, 32).max(-1)
    stored = np.asarray(scales, np.float32)
    assert (stored >= tops / 127).all() and (stored <= tops / 127 * (1 + 2**-7)).all()
    back = np.asarray(dequantise(codes, scales, jnp.asarray(features[:, 0])))
    error = np.abs(back - features).reshape(2, 12, 2, 32).max(-1)
    assert (error[:, 1:] <= stored[:, 1:] * 0.5001).all()
    assert error[0, 3, 1] < 0.02 < error[0, 3, 0]  # channel 7's group, and the one beside it


def test_row_0_is_exact_in_bfloat16_and_the_rest_costs_less_than_a_percent():
    features = sink_like()
    made = encode_rows(jnp.asarray(features), None, "int8")
    back = np.asarray(dequantise(made["codes"], made["scales"], made["first"]))
    np.testing.assert_array_equal(back[:, 0], features[:, 0].astype(ml_dtypes.bfloat16).astype(np.float32))
    features[:, 3, 7] = 1.0
    cost = reconstruction_error(jnp.asarray(features))
    assert cost["relative"] < 0.01 and cost["largest"] <= 0.5 / 127 * 1.01 and cost["first"] < 2**-8
    whole = sink_like().reshape(2, 1, -1)  # a scale a sequence, as one a row would be for the first: ruin
    scale = np.abs(whole).max() / 127
    assert np.sqrt(((np.rint(whole / scale) * scale - whole)[..., 64:] ** 2).mean()) > 0.5


def test_zero_and_tiny_groups_stay_finite():
    features = jnp.zeros((1, 3, 32)).at[0, 1, 0].set(1e-40).at[0, 2, 3].set(3.0)
    codes, scales = quantise(features)
    back = np.asarray(dequantise(codes, scales, features[:, 0]))
    assert np.isfinite(back).all() and back[0, 2, 3] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("storage", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("teacher", [0, 16])
def test_a_record_comes_back_padded_and_as_long_as_was_said(storage, teacher):
    layout, ids = Layout(64, teacher, storage), np.arange(9, dtype=np.int32)
    given = arrays({"input_ids": ids, "loss_mask": ids > 3}, layout)
    features = jnp.asarray(given["features"])[None]
    hidden = None if not teacher else jnp.asarray(given["teacher"])[None]
    made = {name: np.asarray(array)[0] for name, array in encode_rows(features, hidden, storage).items()}
    record = layout.encode(5, {**given, **made})
    assert len(record) == layout.record_bytes(9)
    back = layout.decode(record)
    assert back["example_id"] == 5 and (back["input_ids"] == ids).all() and (back["loss_mask"] == (ids > 3)).all()
    batch = layout.stack([back], 12, 2)
    assert {name: (array.shape[1:], array.dtype) for name, array in batch.items()} == layout.fields(12)
    if storage == "int8":
        rows = np.asarray(dequantise(*(jnp.asarray(batch[name]) for name in ("codes", "scales", "first"))))
        np.testing.assert_allclose(rows[0, :9], given["features"], rtol=0.01)
    else:
        rows = batch["features"].astype(np.float32)
        np.testing.assert_array_equal(rows[0, :9], given["features"].astype(layout.dtype).astype(np.float32))
    assert not rows[0, 9:].any() and not rows[1].any()
    if teacher:
        np.testing.assert_array_equal(batch["teacher"][0, :9], given["teacher"].astype(layout.dtype))


def test_what_is_no_record_of_this_store_is_refused():
    layout = Layout(32, 0, "float32")
    example = {"input_ids": np.arange(4, dtype=np.int32), "loss_mask": np.ones(4, bool)}
    record = layout.encode(0, arrays(example, layout))
    for wrong in (record[:-1], b"", record + b"0", b"xxxx" + record[4:]):
        with pytest.raises(DataError, match=r"features\.path"):
            layout.decode(wrong)
    with pytest.raises(DataError, match=r"features\.path"):
        Layout(64, 0, "float32").decode(record)
    given = arrays(example, layout)
    given["features"][2, 3] = np.nan
    with pytest.raises(DataError, match=r"example 7: features that are no numbers"):
        layout.encode(7, given)
    with pytest.raises(ConfigError, match=r"features\.storage: int8, expected bfloat16, since 40 channels"):
        Layout(40, 0, "int8")


def test_a_file_is_never_larger_than_estimated_and_the_same_twice(tmp_path):
    storage, sizes = Storage(tmp_path), [10, 70_000, 5, 300_000]
    records = [bytes(size) for size in sizes]
    one, two = write_shard(storage, "a.arrayrecord", records), write_shard(storage, "b.arrayrecord", records)
    assert one["sha256"] == two["sha256"] and one["bytes"] == storage.size("a.arrayrecord")
    assert one["bytes"] <= file_bytes(sizes) <= one["bytes"] + 4 * 65536
    many = write_shard(storage, "c.arrayrecord", [bytes(100)] * 3000)
    assert many["bytes"] <= file_bytes([100] * 3000)
    reader = Reader(tmp_path / "a.arrayrecord")
    assert len(reader) == 4 and reader.read([2, 1]) == [records[2], records[1]]
    reader.close()
    content = bytearray((tmp_path / "a.arrayrecord").read_bytes())
    content[100_000] ^= 1
    (tmp_path / "a.arrayrecord").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.arrayrecord\): damaged"):
        Reader(tmp_path / "a.arrayrecord").read(range(4))


def test_without_the_library_one_error_says_so(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(DataError, match=r"features\.mode: no array-record .* pip install array-record"):
        write_shard(Storage(tmp_path), "a.arrayrecord", [])
