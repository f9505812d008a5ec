"""Model configuration derived from a Hugging Face `config.json` (old and new key layouts)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models import fields

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: kind, base and the scaling numbers that the kind reads (unused ones keep their default)."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (transformers 4).

        Raises ConfigError for a rope type outside `ROPE_KINDS` and for a scaling key that the type needs and lacks.
        """
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        scaling = fields.mapping(name, config.get(name))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope_parameters.rope_type: found {kind!r}, expected one of {', '.join(ROPE_KINDS)}; "
                "this model's rotary embedding is not supported"
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor: found {partial}, expected 1.0 (partial rotary is not supported)")
        needed = {
            "linear": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }
        for key in needed.get(kind, ()):
            if scaling.get(key) is None:
                raise ConfigError(f"rope_parameters.{key}: missing, expected a number (rope type {kind!r} needs it)")

        def number(key: str, default: float) -> float:
            value = scaling.get(key)
            return fields.positive(f"rope_parameters.{key}", default if value is None else value)

        def optional(key: str) -> float | None:
            return fields.optional_positive(f"rope_parameters.{key}", scaling.get(key))

        theta = scaling.get("rope_theta", config.get("rope_theta"))
        return cls(
            kind=kind,
            theta=fields.positive("rope_theta", 10000.0 if theta is None else theta),
            factor=number("factor", 1.0),
            original_max_position=int(number("original_max_position_embeddings", max_position)),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(scaling.get("truncate", True)),
        )

    def to_hf(self) -> dict[str, Any]:
        """`rope_parameters`, `rope_theta` and `rope_scaling`: both key layouts at once."""
        used = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        }
        numbers = {name: getattr(self, name) for name in used.get(self.kind, ())}
        if numbers:
            numbers["original_max_position_embeddings"] = self.original_max_position
        scaling = {"rope_type": self.kind} | {name: value for name, value in numbers.items() if value is not None}
        return {
            "rope_parameters": {**scaling, "rope_theta": self.theta},
            "rope_scaling": scaling if numbers else None,
            "rope_theta": self.theta,
        }


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. `layer_windows[i]` is None for full attention, else the window W of layer i (own row
    counted).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position: int
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Config of a Llama, Qwen2 or Qwen3 checkpoint. Raises ConfigError naming the first key that does not fit."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type: found {family!r}, expected one of {', '.join(FAMILIES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act: found {config['hidden_act']!r}, expected 'silu'")
        if config.get("quantization_config"):
            raise ConfigError(
                "quantization_config: found one, expected plain weights; dequantise the checkpoint, or use its GGUF"
            )
        read = functools.partial(fields.size, config)
        hidden, heads = read("hidden_size"), read("num_attention_heads")
        kv_heads = read("num_key_value_heads", heads)
        head_dim = read("head_dim", hidden // heads)
        layers = read("num_hidden_layers")
        if heads % kv_heads:
            raise ConfigError(
                f"num_key_value_heads: found {kv_heads}, expected a divisor of num_attention_heads {heads}"
            )
        if head_dim % 2:
            raise ConfigError(f"head_dim: found {head_dim}, expected an even number (rotary pairs)")
        max_position = read("max_position_embeddings", 2048)
        bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=read("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, max_position),
            qk_norm=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position=max_position,
            layer_windows=layer_windows(config, layers),
            eos_token_ids=fields.token_ids("eos_token_id", config.get("eos_token_id")),
            bos_token_id=_first("bos_token_id", config),
            pad_token_id=_first("pad_token_id", config),
        )

    def to_hf(self) -> dict[str, Any]:
        """config.json keys of a model without sliding layers; `from_hf` reads them back to the same."""
        return {
            "attention_bias": self.qkv_bias,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) > 1
            else next(iter(self.eos_token_ids), None),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position,
            "mlp_bias": self.mlp_bias,
            "model_type": self.family,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **self.rope.to_hf(),
        }


def layer_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Window per layer from `layer_types` / `use_sliding_window` / `max_window_layers` (Hugging Face meaning)."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", layers) if config.get("use_sliding_window") else layers
        first = fields.integer("max_window_layers", first, least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = [str(kind) for kind in fields.listing("layer_types", kinds)]
    if len(kinds) != layers:
        raise ConfigError(f"layer_types: found {len(kinds)} entries, expected num_hidden_layers = {layers}")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"layer_types: found {sorted(unknown)}, expected full_attention or sliding_attention")
    if "sliding_attention" in kinds and (not isinstance(window, int) or window < 1):
        raise ConfigError(
            f"sliding_window: found {window!r}, expected a positive integer (layer_types has sliding layers)"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first(key: str, config: Mapping[str, Any]) -> int | None:
    ids = fields.token_ids(key, config.get(key))
    return ids[0] if ids else None
