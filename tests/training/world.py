"""A training world that compiles in a second: a random two-layer target, packed random data, a small config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.store import write_folder
from jaxspec.checkpoints.target import Target
from jaxspec.config import TrainConfig, build
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import flatten

VOCAB, MASK_ID = 40, 39

MODEL = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
)


def target(dtype: Any = jnp.float32) -> Target:
    """The same random weights every time."""
    model = Decoder(MODEL)
    return Target("tiny", model, model.init(jax.random.key(11), dtype), "r1")


def write_data(path: Path, count: int = 7, seed: int = 0, longest: int = 22) -> Path:
    """A packed file of `count` random examples, lengths 12 to `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(12, longest + 1, count)
    tokens = rng.integers(2, MASK_ID, lengths.sum()).astype(np.uint16)
    np.savez(path, tokens=tokens, offsets=np.cumsum([0, *lengths]), prompt_lengths=rng.integers(2, 6, count))
    return path


def config(directory: Path, data: Path, method: str = "dflash", **changes: Any) -> TrainConfig:
    """A config; `changes` are dotted keys with `__` for the dot."""
    tree: dict[str, Any] = {
        "version": 1,
        "target": {"source": "tiny", "dtype": "float32"},
        "drafter": {
            "method": method, "num_layers": 1, "block_size": 4, "mask_token_id": MASK_ID, "target_layer_ids": [0, 1],
            "dtype": "float32",
        },
        "data": {"path": str(data), "max_length": 24, "num_anchors": 5},
        "optimizer": {"batch_size": 2, "warmup_ratio": 0.2, "learning_rate": 1e-2},
        "run": {"directory": str(directory), "steps": 10, "checkpoint_every": 0, "log_every": 2, "tensorboard": False},
    }  # fmt: skip
    if method == "dspark":
        tree["drafter"]["markov_rank"] = 4
    for name, value in changes.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    return build(TrainConfig, tree)


def folder(path: Path, tokenizer: Any, dtype: Any = jnp.float32) -> Path:
    """A random target as a folder, with a vocabulary that the tokenizer fits into; one id in twelve ends an answer."""
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = {
        "model_type": "qwen3", "vocab_size": len(tokenizer) + 8, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
        "eos_token_id": sorted({eos, *range(11, len(tokenizer), 12)}),
    }  # fmt: skip
    params = Decoder(ModelConfig.from_hf(config)).init(jax.random.key(3), dtype, 0.4)
    write_folder(path, {name: np.asarray(value) for name, value in flatten(params).items()}, config)
    tokenizer.save_pretrained(path)
    return path
