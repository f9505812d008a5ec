"""GGUF to a Hugging Face folder: row order, names, rope, tokenizer kinds, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxspec.checkpoints.cache import converted_gguf
from jaxspec.checkpoints.gguf import convert_gguf, read_fields, unpermute
from jaxspec.checkpoints.store import TensorFolder, read_config, read_json
from jaxspec.checkpoints.target import load_target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.errors import CheckpointError
from tests.helpers import tiny_gguf as tiny


def _convert(tmp_path: Path, arch: str, tensors: dict[str, np.ndarray] | None = None, **options: Any) -> Path:
    made = tiny.write_gguf(tmp_path / "m.gguf", arch, tensors or tiny.hf_tensors(arch), **options)
    return convert_gguf(made, tmp_path / "hf")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_under_their_names_and_in_their_order(arch: str, tied: bool, tmp_path: Path) -> None:
    tensors = tiny.hf_tensors(arch, tied=tied)
    folder = TensorFolder(_convert(tmp_path, arch, tensors))
    assert sorted(folder.names()) == sorted(tensors)
    for name, value in tensors.items():
        assert str(folder.dtype(name)) == "bfloat16"
        assert np.array_equal(folder.read(name).astype(np.float32), value), name
    target = load_target(tmp_path / "hf", "float32")
    assert target.config.family == arch and target.config.tie_word_embeddings is tied
    assert target.config.rope.theta == 1e6 and target.config.rms_norm_eps == 1e-5
    assert target.config.eos_token_ids == (2,) and target.config.bos_token_id == 1
    assert target.revision.startswith("sha256:")


def test_unpermuted_rows_give_the_scores_of_the_interleaved_rope() -> None:
    rng = np.random.default_rng(1)
    dim, angle = tiny.DIM, rng.uniform(0, 6, tiny.DIM // 2)
    cos, sin = np.cos(angle), np.sin(angle)

    def adjacent(x: np.ndarray) -> np.ndarray:
        even, odd = x[0::2], x[1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=1).reshape(-1)

    def halves(x: np.ndarray) -> np.ndarray:
        low, high = x[: dim // 2], x[dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin])

    stored_q, stored_k = rng.normal(size=(2, dim))
    q, k = unpermute(stored_q, 1), unpermute(stored_k, 1)
    assert np.isclose(adjacent(stored_q) @ stored_k, halves(q) @ k)
    assert not np.isclose(adjacent(stored_q) @ stored_k, halves(stored_q) @ stored_k)


@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F16]
)
def test_quantised_tensors_are_dequantised_before_they_are_reordered(kind: Any, tmp_path: Path) -> None:
    tensors = tiny.hf_tensors("llama")
    folder = TensorFolder(_convert(tmp_path, "llama", tensors, quantise=kind))
    for name, value in tensors.items():
        assert np.abs(folder.read(name).astype(np.float32) - value).max() <= (0.08 if kind.name == "Q4_1" else 0.01), (
            name
        )


def _llama3_factors(factor: float = 32.0, low: float = 1.0, high: float = 4.0, original: int = 8192) -> np.ndarray:
    out = []
    for i in range(tiny.DIM // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / tiny.DIM)
        smooth = (original / wavelength - low) / (high - low)
        out.append(1.0 if smooth > 1 else factor if smooth < 0 else 1 / ((1 - smooth) / factor + smooth))
    return np.asarray(out, np.float32)


def test_llama3_rope_factors_become_their_parameters(tmp_path: Path) -> None:
    fields = {"llama.rope.freq_base": 500000.0}
    config = read_config(_convert(tmp_path, "llama", fields=fields, raw={"rope_freqs.weight": _llama3_factors()}))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert load_target(tmp_path / "hf", "float32").config.rope.kind == "llama3"


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight: found factors up to 3 that no released Llama 3 uses"
    ):
        _convert(tmp_path, "llama", raw={"rope_freqs.weight": np.full(tiny.DIM // 2, 3.0, np.float32)})


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    assert read_config(_convert(tmp_path, "qwen3", fields=linear))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = linear | {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.original_context_length": 128}
    assert read_config(_convert(tmp_path, "qwen3", fields=yarn))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count: found 8"),
        ({"llama.attention.sliding_window": 64}, r"sliding_window: found 64"),
        (
            {"llama.rope.scaling.type": "longrope"},
            r"rope\.scaling\.type: found 'longrope', expected none, linear or yarn",
        ),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, r"original_context_length None"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            r"attn_factor: found 0\.5, expected 1 or none",
        ),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count: found 4, expected the head dimension 8"),
        ({"llama.block_count": None}, r"llama\.block_count: found none"),
        ({"llama.block_count": "one"}, r"llama\.block_count: found 'one', expected a number above 0"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count: found 0, expected a number above 0"),
        ({"llama.embedding_length": "x"}, r"llama\.embedding_length: found 'x', expected a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, r"layer_norm_rms_epsilon: found 'x', expected a number"),
        ({"llama.rope.freq_base": "x"}, r"rope\.freq_base: found 'x', expected a number"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "x"},
            r"metadata: found fields of another kind",
        ),
        (
            {"llama.block_count": 1},
            r"found tensor 'blk\.1\.\w+\.weight', expected the tensors of a dense llama model with 1",
        ),
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre: found 'tekken', expected one of gpt-2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model: found 'llama', expected 'gpt2'"),
        ({"tokenizer.ggml.tokens": tiny.TOKENS[:-1]}, r"tokenizer\.ggml\.tokens: found 264 .* expected 265"),
        ({"tokenizer.ggml.merges": ["h zz"]}, r"tokenizer\.ggml\.merges: .*; expected merges of its own tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type: found 2, expected 265"),
        ({"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_id: found 9999, expected below 265"),
        ({"split.count": 2}, r"split\.count: found 2, expected one file"),
    ],
)
def test_what_cannot_be_converted_is_one_clear_error(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        _convert(tmp_path, "llama", fields=fields)
    assert not (tmp_path / "hf").exists()


def test_unknown_architecture_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"general\.architecture: found 'gemma', expected one of llama, qwen2, qwen3"
    ):
        _convert(tmp_path, "gemma", tiny.hf_tensors("llama"))
    whole = (tmp_path / "m.gguf").read_bytes()
    for keep in (0, 3, 200, len(whole) - 50):
        (tmp_path / "cut.gguf").write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: found \d+ bytes that do not read as GGUF"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"gone\.gguf: found no such file"):
        read_fields(tmp_path / "gone.gguf")


def test_left_over_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found tensor 'blk\.0\.ffn_gate_inp\.weight'"):
        _convert(tmp_path, "llama", raw={"blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)})


TEXT = "hello world's 123  x=1\n\n\té café\U0001f642 don't <|im_end|>"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_tokenizer_round_trips_bytes_and_keeps_ids(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_convert(tmp_path, "llama", pre=pre))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert ids[-1] == 2
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(tiny.TOKENS))] == tiny.TOKENS


def test_digits_are_split_as_the_kind_says(tmp_path: Path) -> None:
    pieces = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        pieces[pre] = load_tokenizer(_convert(tmp_path, "llama", pre=pre)).tokenize("he123")
    assert pieces == {
        "gpt-2": ["he", "123"],
        "smollm": ["he", "1", "2", "3"],
        "qwen2": ["he", "1", "2", "3"],
        "llama-bpe": ["he", "123"],
    }


def test_bos_is_added_only_where_the_file_asks_for_it(tmp_path: Path) -> None:
    plain = load_tokenizer(_convert(tmp_path, "llama"))
    assert plain.encode("he") == plain.encode("he", add_special_tokens=False)
    with_bos = load_tokenizer(_convert(tmp_path, "llama", fields={"tokenizer.ggml.add_bos_token": True}))
    assert with_bos.encode("he") == [1, *plain.encode("he")]


def test_chat_template_travels(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_convert(tmp_path, "llama"))
    assert (
        tokenizer.decode(chat_ids(tokenizer, "hello")) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_stop_tokens(tmp_path: Path) -> None:
    folder = _convert(tmp_path, "qwen3", fields={"tokenizer.ggml.eot_token_id": 0})
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [2, 0]
    assert load_target(folder, "float32").config.eos_token_ids == (2, 0)


def test_a_gguf_file_is_a_target_and_converted_once(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "tiny.gguf", "qwen3", tiny.hf_tensors("qwen3"))
    first = load_target(path, "float32", cache_dir=tmp_path / "cache")
    assert first.name == "tiny" and first.directory is not None and first.directory.is_relative_to(tmp_path / "cache")
    stamp = (first.directory / "model.safetensors").stat().st_mtime_ns
    assert converted_gguf(path, tmp_path / "cache") == first.directory
    assert (first.directory / "model.safetensors").stat().st_mtime_ns == stamp
    tiny.write_gguf(path, "qwen3", tiny.hf_tensors("qwen3", seed=1))
    assert converted_gguf(path, tmp_path / "cache") != first.directory
