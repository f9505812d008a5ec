"""Names to files: local paths first, then the hub with one clear error per way it can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoints.hub import locate, resolve
from jaxspec.checkpoints.safetensors_file import write_safetensors
from jaxspec.errors import CheckpointError, HubError
from tests.helpers.loopback_hub import Hub, Repo, loopback_hub


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    write_safetensors(tmp_path / "weights", {"w": np.arange(6, dtype=np.float32)})
    return {
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "model.safetensors": (tmp_path / "weights").read_bytes(),
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "modeling_x.py": b"raise SystemExit",
        "onnx/config.json": b"{}",
        "README.md": b"# hello",
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repos = {
        "tiny/model": Repo({"main": files, "v1": {**files, "config.json": b'{"model_type": "qwen3"}'}}),
        "tiny/gated": Repo({"main": files}, gated=True),
        "tiny/pickle": Repo({"main": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}),
    }
    with loopback_hub(repos) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield hub


def test_fetches_only_json_safetensors_and_tokenizer(hub: Hub, files: dict[str, bytes]) -> None:
    found = locate("tiny/model")
    assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.fetched() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found.name == "tiny/model"
    assert found.revision == hub.repos["tiny/model"].commit("main")


def test_revision_picks_the_tag(hub: Hub) -> None:
    assert json.loads((resolve("tiny/model@v1") / "config.json").read_text()) == {"model_type": "qwen3"}
    assert locate("tiny/model@v1").revision != locate("tiny/model").revision


def test_absent_repository(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"tiny/nothing: found no such repository .* no local folder of that name"):
        resolve("tiny/nothing")


def test_absent_revision(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"tiny/model: found no revision 'v9'"):
        resolve("tiny/model@v9")


def test_gated_repository_says_what_to_do(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"tiny/gated: the repository is gated .*`hf auth login`"):
        resolve("tiny/gated")


def test_pickle_only_repository_is_refused_unfetched(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"tiny/pickle: found no \*\.safetensors"):
        resolve("tiny/pickle")
    assert hub.fetched() == ["config.json"]


def test_offline_and_not_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        HubError, match=r"tiny/model: not \(completely\) in the local cache, and HF_HUB_OFFLINE forbids"
    ):
        resolve("tiny/model")
    assert hub.requests == []


def test_offline_and_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve("tiny/model")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("tiny/model") == first
    assert hub.requests == []


def test_hub_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens there
    with pytest.raises(
        HubError, match=r"127\.0\.0\.1:9 cannot be reached .* not in the local cache; check the network"
    ):
        resolve("tiny/model")


def test_hub_that_is_down(hub: Hub) -> None:
    hub.failing = True
    with pytest.raises(HubError, match=r"tiny/model: .* cannot be reached \(.*503"):
        resolve("tiny/model")


def test_path_that_does_not_exist_is_no_hub_lookup(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for source in (
        "./gone",
        "../gone/x",
        "a/b/c",
        "~/no-such-folder-here",
        str(tmp_path / "gone"),
        "out/gone",
        "org/gone/",
    ):
        with pytest.raises(CheckpointError, match="found no such folder"):
            resolve(source)
    with pytest.raises(CheckpointError, match="found no such GGUF file"):
        resolve("models/gone.gguf")
    assert hub.requests == []


def test_local_folder_wins_over_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "model").mkdir(parents=True)
    assert resolve("tiny/model") == Path("tiny/model")
    assert hub.requests == []


@pytest.mark.parametrize("source", ["", "   ", "justaname", "org/name@", "org/na me", "org/na--me"])
def test_malformed_names(source: str) -> None:
    with pytest.raises(HubError, match=r"expected a folder, a \.gguf file"):
        resolve(source)


def test_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: found a file, expected a folder"):
        resolve(tmp_path / "model.safetensors")
