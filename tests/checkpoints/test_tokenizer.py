"""Tokenizers: clear errors for what is missing, ids in the target's own template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoints.gguf import convert_gguf
from jaxspec.checkpoints.tokenizer import chat_ids, eos_ids, load_tokenizer
from jaxspec.errors import CheckpointError, DataError
from tests.helpers import tiny_gguf as tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return convert_gguf(tiny.write_gguf(path / "m.gguf", "llama", tiny.hf_tensors("llama")), path / "hf")


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_file_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("tokenizer*"):
        if path.name != name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{name}: found no such file, expected a fast tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "1.0"}'])
def test_broken_tokenizer_is_one_clear_error(text: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_string_is_one_user_turn(tokenizer: Any) -> None:
    assert chat_ids(tokenizer, "he") == chat_ids(tokenizer, [{"role": "user", "content": "he"}])
    closed = chat_ids(tokenizer, [{"role": "user", "content": "he"}], add_generation_prompt=False)
    assert chat_ids(tokenizer, "he")[: len(closed)] == closed
    assert all(isinstance(token, int) for token in closed)


def test_special_tokens_in_a_template_become_their_ids(tokenizer: Any) -> None:
    assert chat_ids(tokenizer, "he")[0] == 1 and 2 in chat_ids(tokenizer, "he")


def test_no_template_and_refused_messages(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"the chat template refuses them .*roles must alternate"):
        chat_ids(tokenizer, "he")
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="found no chat_template"):
        chat_ids(tokenizer, "he")


def test_stop_tokens_each_once(tokenizer: Any) -> None:
    assert eos_ids(tokenizer) == (2,)
    assert eos_ids(tokenizer, (7, 2)) == (7, 2)
