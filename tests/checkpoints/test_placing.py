"""Weights go to their devices one shard after the other: under a memory limit that a whole model would break."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.checkpoints import placing
from jaxspec.checkpoints.safetensors_file import write_safetensors
from jaxspec.checkpoints.store import TensorFolder
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten

MIB = 1 << 20
# Qwen3-8B's proportions at a 64th: the embedding is the largest tensor, the whole model 16 of it
CONFIG = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
ROOM = 2048 // 64 * MIB  # the 2 GB beside the two largest tensors
# In a process of its own. A device here is memory of the host, so what arrives on one is replaced by a stand-in with
# its shape and nothing behind it; only what the loader itself holds is counted.
LOAD = """
import resource, sys
import jax, numpy as np
from jaxspec.checkpoints import placing, target

class Arrived:
    dtype, sharding = np.dtype("float32"), None
    def __init__(self, shape): self.shape = shape
    def block_until_ready(self): return self

kept, keeps = [], False
def arrive(value, sharding=None):
    kept.append(value if keeps else None)
    return Arrived(value.shape)

jax.device_put = arrive
target.stack = lambda layers: layers[0]
jax.numpy.zeros(3).block_until_ready()  # what jax allocates once
size = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
limit = size() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for keeps in (False, True):  # as it is, and a control that holds what it read
    try:
        kept.clear()
        target.load_target(sys.argv[1], "float32", stacked=True)
        print("loaded", len(kept))
    except MemoryError:
        kept.clear()
        print("out of memory")
"""


def sparse(folder: Path) -> tuple[Path, int, int]:
    """A folder of zeros that take no room on the disk; bytes of its largest tensor and of all of them."""
    shapes = {
        name: leaf.shape
        for name, leaf in flatten(Decoder(ModelConfig.from_hf(CONFIG)).abstract_params(np.float32)).items()
    }
    table, end, largest = {}, 0, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end, largest = end + size, max(largest, size)
    head = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder, largest, end


@pytest.mark.ci
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of data segments are Linux's")
def test_the_host_holds_two_tensors_and_some_room_and_never_the_model(tmp_path: Path) -> None:
    folder, largest, whole = sparse(tmp_path)
    bound = 2 * largest + ROOM
    assert whole > 4 * bound
    command = [sys.executable, "-c", LOAD, str(folder), str(bound)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # 11 tensors a layer, embedding, norm and head
    assert done.stdout.splitlines() == ["loaded 223", "out of memory"], done.stdout + done.stderr[-600:]


def test_a_transfer_is_waited_for_before_the_next_tensor_is_read(monkeypatch: Any) -> None:
    """Transfers are asynchronous: one that still runs keeps its bytes on the host."""
    going: list[str] = []

    class Leaf:
        def block_until_ready(self) -> Leaf:
            going.pop()
            return self

    monkeypatch.setattr(jax, "device_put", lambda value, sharding=None: going.append("x") or Leaf())
    for _ in range(3):
        placing.place(
            lambda index: (going and pytest.fail("read while a transfer was going")) or np.zeros(2), (2,), None
        )
    assert not going


def test_a_shard_reads_its_own_part_and_equal_parts_are_read_once(monkeypatch: Any) -> None:
    """Four devices, rows over two of them: each half is read once and cast once, and no more than it."""
    whole, read = np.arange(24.0).reshape(4, 6), []

    def part(index: tuple[slice, ...]) -> np.ndarray:
        read.append(index)
        return whole[index]

    def four(shape: Any, sharding: Any, callback: Any) -> Any:
        parts = [callback((slice(2 * row, 2 * row + 2), slice(None))) for row in (0, 0, 1, 1)]
        return jax.device_put(np.concatenate([parts[0], parts[2]]))

    monkeypatch.setattr(jax, "make_array_from_callback", four)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1), ("x",))
    leaf = placing.place(part, (4, 6), NamedSharding(mesh, PartitionSpec("x")))
    assert read == [(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6))]
    np.testing.assert_array_equal(np.asarray(leaf), whole)


def test_parts_of_every_dtype_and_alignment(tmp_path: Path) -> None:
    """An odd header length leaves every tensor behind it on an odd byte."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    tensors = {
        f"{dtype.__name__}": rng.normal(size=(5, 7)).astype(dtype)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
    }
    tensors = {"odd": np.arange(3, dtype=np.uint8), **tensors, "empty": np.zeros((0, 4), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    folder = TensorFolder(tmp_path)
    for name, value in tensors.items():
        np.testing.assert_array_equal(folder.read_part(name, (slice(None),) * value.ndim), value)
        part = (slice(1, 3), slice(2, 6))[: value.ndim]
        found = folder.read_part(name, part)
        np.testing.assert_array_equal(found, value[part])
        assert found.flags.writeable and found.dtype == value.dtype


def test_equal_tensors_are_found_by_their_bytes(tmp_path: Path) -> None:
    one = np.arange(40, dtype=np.float32).reshape(8, 5)
    other = one.copy()
    other[-1, -1] += 1
    write_safetensors(tmp_path / "model.safetensors", {"a": one, "b": one, "c": other, "d": one.astype(np.float64)})
    folder = TensorFolder(tmp_path)
    assert placing.same_values(folder, "a", "b")
    assert not placing.same_values(folder, "a", "c") and not placing.same_values(folder, "a", "d")
