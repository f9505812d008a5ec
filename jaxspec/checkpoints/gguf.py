"""GGUF files turned into ordinary Hugging Face folders (bfloat16 safetensors, config, tokenizer), once.

Architectures: llama, qwen2, qwen3, dense only. The numbers are dequantised with the `gguf` package (numpy). Two things
are easy to get wrong and show only as a bad model: llama.cpp's converter interleaves the rows of q and k of Llama
models (not of Qwen's) for its own rotary layout, undone here; and Llama 3's rope scaling is stored as a tensor of
factors, not as parameters.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoints.gguf_tokenizer import tokenizer_files
from jaxspec.checkpoints.store import LazyTensor, write_folder
from jaxspec.errors import CheckpointError

__all__ = ["convert_gguf", "read_fields", "unpermute"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
# (factor, low_freq_factor, high_freq_factor, original context) that Llama 3.1 / 3.2 / 3.3 were released with.
_LLAMA3_ROPE = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192), (16.0, 1.0, 4.0, 8192))


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: [heads * D, ...] with rotary pairs adjacent -> halves apart
    (rotate-half).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _open(path: Path) -> Any:
    import gguf

    if not path.is_file():
        raise CheckpointError(f"{path}: found no such file, expected a GGUF file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OverflowError, OSError, UnicodeDecodeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: found {path.stat().st_size} bytes that do not read as GGUF ({error}), expected a whole GGUF file"
        ) from error


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Every key-value field of a GGUF file as plain Python values."""
    return _fields(_open(Path(path)))


def _fields(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def convert_gguf(path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder, atomically; returns the folder.

    Raises CheckpointError naming the field for another architecture, a split file, experts, an unknown rope scaling, a
    tokenizer other than byte-level BPE, or tensors that do not make up the model.
    """
    path = Path(path)
    reader = _open(path)
    fields = _fields(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(path, fields, tensors)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        found = f"found fields of another kind ({error})"
        raise CheckpointError(f"{path}: metadata: {found}, expected what llama.cpp's converter writes") from error
    named = {_hf_name(path, name, config): tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS}
    weights = {name: _lazy(named[name], _row_order(name, config)) for name in _in_layer_order(named)}
    files = tokenizer_files(
        fields, where=str(path), vocab_size=config["vocab_size"], max_length=config["max_position_embeddings"]
    )
    special = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }
    source = {
        "name": str(fields.get("general.name", path.stem)),
        "file": path.name,
        "revision": f"sha256:{_sha256(path)[:16]}",
        "licence": str(fields.get("general.license", "not stated")),
    }
    extra = {**files, "generation_config.json": {"_from_model_config": True, **special}, "jaxspec_source.json": source}
    return write_folder(out_dir, weights, config, extra)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _config(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture: found {arch!r}, expected one of {', '.join(_ARCHITECTURES)}"
        )
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: split.count: found {fields['split.count']}, expected one file; join the parts with llama.cpp's "
            "gguf-split --merge"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if fields.get(f"{arch}.{key}", 0):
            raise CheckpointError(
                f"{path}: {arch}.{key}: found {fields[f'{arch}.{key}']}, expected none (dense full-attention models "
                "only)"
            )

    def number(key: str, kind: Any, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
            found = "none" if value is None else "a list" if isinstance(value, list) else repr(value)
            raise CheckpointError(f"{path}: {arch}.{key}: found {found}, expected a number above 0 for all layers")
        return value

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: found no tensor token_embd.weight, expected the embedding")
    if len(tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path}: token_embd.weight: found one axis, expected [vocabulary, width]")
    hidden, heads = number("embedding_length", int), number("attention.head_count", int)
    kv_heads = number("attention.head_count_kv", int, heads)
    head_dim = number("attention.key_length", int, max(hidden // heads, 1))
    rotary = number("rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise CheckpointError(
            f"{path}: {arch}.rope.dimension_count: found {rotary}, expected the head dimension {head_dim}"
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length", int),
        "num_hidden_layers": number("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length", int),
        "rms_norm_eps": _short(number("attention.layer_norm_rms_epsilon", _NUMBER)),
        "rope_theta": _short(number("rope.freq_base", _NUMBER, 10000.0)),
        "rope_scaling": _rope_scaling(path, arch, fields, tensors, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors and arch != "qwen2",
        "torch_dtype": "bfloat16",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _stop_ids(fields),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    else:
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config


_NUMBER = (int, float)


def _short(value: float) -> float:
    """The shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _stop_ids(fields: dict[str, Any]) -> int | list[int] | None:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = list(dict.fromkeys(fields[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in fields))
    return ids[0] if len(ids) == 1 else ids or None


def _rope_scaling(
    path: Path, arch: str, fields: dict[str, Any], tensors: dict[str, Any], head_dim: int
) -> dict[str, Any] | None:
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    factor = fields.get(f"{arch}.rope.scaling.factor")
    original = fields.get(f"{arch}.rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{path}: {arch}.rope.scaling.type: found {kind!r}, expected none, linear or yarn")
    if _ROPE_FACTORS in tensors:
        if kind != "none":
            raise CheckpointError(f"{path}: found both {_ROPE_FACTORS} and rope scaling {kind!r}, expected one of them")
        return _llama3_scaling(
            path, _dequantize(tensors[_ROPE_FACTORS]), _short(fields.get(f"{arch}.rope.freq_base", 10000.0)), head_dim
        )
    if kind == "none":
        return None
    if not factor or (kind == "yarn" and not original):
        raise CheckpointError(
            f"{path}: {arch}.rope.scaling: found factor {factor} and original_context_length {original}, expected both "
            f"for {kind}"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"{arch}.rope.scaling.{key}" in fields:
                scaling[name] = _short(fields[f"{arch}.rope.scaling.{key}"])
        # llama.cpp multiplies its own length factor by this one, Hugging Face's attention_factor replaces it.
        extra = fields.get(f"{arch}.rope.scaling.attn_factor", 1.0)
        if extra != 1.0:
            raise CheckpointError(f"{path}: {arch}.rope.scaling.attn_factor: found {extra:g}, expected 1 or none")
    return scaling


def _llama3_scaling(path: Path, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters whose factors are those of the file; Meta's piecewise rule over wavelengths."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    for factor, low, high, original in _LLAMA3_ROPE:
        smooth = np.clip((original / wavelengths - low) / max(high - low, 1e-9), 0.0, 1.0)
        if factors.shape == frequencies.shape and np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{path}: {_ROPE_FACTORS}: found factors up to {float(factors.max()):g} that no released Llama 3 uses, "
        "expected one of those"
    )


def _hf_name(path: Path, name: str, config: dict[str, Any]) -> str:
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if kind in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        if block and block[2] in _BLOCK and int(block[1]) < config["num_hidden_layers"]:
            return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"
    raise CheckpointError(
        f"{path}: found tensor {name!r}, expected the tensors of a dense {config['model_type']} model with "
        f"{config['num_hidden_layers']} layers"
    )


def _in_layer_order(names: dict[str, Any]) -> list[str]:
    def key(name: str) -> tuple[int, str]:
        layer = name.removeprefix("model.layers.").split(".")[0]
        return (int(layer) if layer.isdigit() else -1, name)

    return sorted(names, key=key)


def _row_order(name: str, config: dict[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    if config["model_type"] == "llama" and ".self_attn.q_proj." in name:
        return lambda rows: unpermute(rows, config["num_attention_heads"])
    if config["model_type"] == "llama" and ".self_attn.k_proj." in name:
        return lambda rows: unpermute(rows, config["num_key_value_heads"])
    return lambda rows: rows


def _dequantize(tensor: Any) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise CheckpointError(
            f"{tensor.name}: found quantisation {kind} ({error}), expected one that the gguf package dequantises"
        ) from error


def _lazy(tensor: Any, order: Callable[[np.ndarray], np.ndarray]) -> LazyTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return LazyTensor(shape, bfloat16, lambda: order(np.asarray(_dequantize(tensor), np.float32)).astype(bfloat16))
