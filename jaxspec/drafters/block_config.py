"""Configuration that the block drafters share, read from and written to the public config.json layouts."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models import fields
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Tap

log = logging.getLogger(__name__)


def build_target_layer_ids(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Evenly spread tap layers from 1 to N - 3, rounded to even as Python does; one draft layer taps N // 2."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    if num_layers < 4:
        raise ConfigError(
            f"target_layer_ids: the target has {num_layers} layers, expected at least 4; name them yourself"
        )
    return tuple(round(1 + i * (num_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What every block drafter is made of.

    `block_size` counts the rows fed (anchor included); `is_causal` None means: full layers see their whole block,
    sliding layers are causal in it with no window inside. `source_config` is the JSON text of an imported config,
    kept verbatim.
    """

    model: ModelConfig
    taps: tuple[Tap, ...]
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_hidden_size: int
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    source_config: str | None = None

    def __post_init__(self) -> None:
        vocab = self.model.vocab_size
        if not 0 <= self.mask_token_id < vocab:
            raise ConfigError(f"mask_token_id: found {self.mask_token_id}, expected 0 <= id < vocab_size = {vocab}")
        if not self.taps:
            raise ConfigError("target_layer_ids: found none, expected the target layers that this drafter reads")
        if len(set(self.taps)) != len(self.taps):
            raise ConfigError(f"target_layer_ids: found {list(self.taps)}, expected each layer once")
        for tap in self.taps:
            if not isinstance(tap, int) or not -1 <= tap < self.num_target_layers:
                raise ConfigError(
                    f"target_layer_ids: found {tap!r}, expected 0 <= id < {self.num_target_layers} layers"
                )

    @property
    def layer_masks(self) -> tuple[tuple[int, bool, int], ...]:
        """(context window, causal inside the block, window inside the block) per layer; 0 = no window."""

        return tuple(self.mask_of(window) for window in self.model.layer_windows)

    def mask_of(self, window: int | None) -> tuple[int, bool, int]:
        """The same for a layer with this window (None: a full layer)."""
        if self.is_causal is None:
            return (window or 0, window is not None, 0)
        return (window or 0, self.is_causal, window or 0)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig) -> BlockConfig:
        """Reads nested (`dflash_config`) and flat keys alike. Raises ConfigError where both are given and differ,
        where the layer ids or the mask token are missing (never guessed), and where the target does not fit."""
        key = NestedKeys(config)
        model = ModelConfig.from_hf(config)
        if model.hidden_size != target.hidden_size:
            raise ConfigError(
                f"hidden_size: the drafter has {model.hidden_size}, expected the target's {target.hidden_size}"
            )
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"vocab_size: the drafter has {model.vocab_size}, expected the target's {target.vocab_size}"
            )
        layers = key("num_target_layers", target.num_layers)
        if layers != target.num_layers:
            raise ConfigError(
                f"num_target_layers: the drafter was made for {layers}, the target has {target.num_layers}"
            )
        mask = key.required("mask_token_id", "the id that stands for an unknown token")
        mask = fields.integer("mask_token_id", mask, least=0)
        warn_mask_token(mask, model, target)
        block = fields.integer("block_size", key.required("block_size", "rows per block, anchor included"))
        if block > model.max_position:
            raise ConfigError(f"block_size: found {block}, expected at most {model.max_position} positions")
        softcap = key("final_logit_softcapping")
        if isinstance(softcap, (int, float)) and softcap <= 0:
            softcap = None  # some checkpoints say "off" so
        taps = fields.listing("target_layer_ids", key.required("target_layer_ids", "the target layers it reads"))
        return cls(
            model=model,
            taps=tuple(fields.integer("target_layer_ids", tap, least=-1) for tap in taps),
            block_size=block,
            mask_token_id=mask,
            num_target_layers=layers,
            target_hidden_size=target.hidden_size,
            is_causal=fields.flag("is_causal", config.get("is_causal")),
            input_embedding_scale=fields.positive("input_embedding_scale", key("input_embedding_scale", 1.0)),
            output_multiplier=fields.positive("output_multiplier", key("output_multiplier", 1.0)),
            final_logit_softcapping=fields.optional_positive("final_logit_softcapping", softcap),
            source_config=json.dumps(config),
        )

    def to_hf(self, architecture: str, method_keys: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of a fresh drafter: Qwen3 keys, `dflash_config` nested, rope in the old and the new layout."""
        model = self.model
        rope = {"rope_type": model.rope.kind, "rope_theta": model.rope.theta}
        if model.rope.kind != "default":
            rope |= {"factor": model.rope.factor, "original_max_position_embeddings": model.rope.original_max_position}
        if model.rope.kind == "llama3":
            rope |= {"low_freq_factor": model.rope.low_freq_factor, "high_freq_factor": model.rope.high_freq_factor}
        if model.rope.kind == "yarn":
            rope |= {"beta_fast": model.rope.beta_fast, "beta_slow": model.rope.beta_slow}
            rope |= {
                k: v
                for k in ("attention_factor", "mscale", "mscale_all_dim")
                if (v := getattr(model.rope, k)) is not None
            }
            rope |= {} if model.rope.truncate else {"truncate": False}
        nested = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.taps),
            **{name: value for name, value, default in self._scales() if value != default},
            **method_keys,
        }
        windows = {window for window in model.layer_windows if window}
        return {
            "architectures": [architecture],
            "attention_bias": model.qkv_bias,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "bos_token_id": model.bos_token_id,
            "dflash_config": nested,
            "eos_token_id": model.eos_token_ids[0] if model.eos_token_ids else None,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "hidden_size": model.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": model.intermediate_size,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
            "layer_types": ["sliding_attention" if window else "full_attention" for window in model.layer_windows],
            "max_position_embeddings": model.max_position,
            "max_window_layers": model.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": model.num_heads,
            "num_hidden_layers": model.num_layers,
            "num_key_value_heads": model.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "pad_token_id": model.pad_token_id,
            "rms_norm_eps": model.rms_norm_eps,
            "rope_parameters": rope,
            "rope_scaling": None
            if model.rope.kind == "default"
            else {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_theta": model.rope.theta,
            "sliding_window": max(windows) if windows else None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": bool(windows),
            "vocab_size": model.vocab_size,
        }

    def _scales(self) -> list[tuple[str, Any, Any]]:
        names = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
        return [(name, getattr(self, name), default) for name, default in names.items()]


class NestedKeys:
    """Looks a key up in the method's sub-dicts and at the top level; two different values are a contradiction."""

    SECTIONS = ("dflash_config", "dspark_config")

    def __init__(self, config: Mapping[str, Any]):
        sections = [fields.mapping(section, config.get(section)) for section in self.SECTIONS]
        self._places: list[Mapping[str, Any]] = [*sections, config]

    def __call__(self, key: str, default: Any = None) -> Any:
        found = [place[key] for place in self._places if place.get(key) is not None]
        if any(value != found[0] for value in found):
            raise ConfigError(
                f"{key}: found {found[0]!r} nested and {found[-1]!r} at the top level, expected one value"
            )
        return found[0] if found else default

    def required(self, key: str, meaning: str) -> Any:
        """The value. Raises ConfigError when it is absent: a guessed one would load cleanly and accept nothing."""
        value = self(key)
        if value is None:
            raise ConfigError(f"{key}: missing in the drafter's config.json, expected {meaning}")
        return value


def special_tokens(draft: ModelConfig, target: ModelConfig) -> dict[str, set[int]]:
    """The ids that a mask token should not be."""
    return {
        "eos_token_id": {*draft.eos_token_ids, *target.eos_token_ids},
        "bos_token_id": {id for id in (draft.bos_token_id, target.bos_token_id) if id is not None},
        "pad_token_id": {id for id in (draft.pad_token_id, target.pad_token_id) if id is not None},
    }


def warn_mask_token(mask: int, draft: ModelConfig, target: ModelConfig) -> None:
    """An existing checkpoint keeps its mask token even where it doubles as a special one, but not silently."""
    for name, ids in special_tokens(draft, target).items():
        if mask in ids:
            log.warning("mask_token_id %d is also %s: the drafter was trained so, or its config is wrong", mask, name)


def fresh_config(
    target: ModelConfig,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int | None,
    target_layer_ids: tuple[int, ...] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    layer_types: tuple[str, ...] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
) -> BlockConfig:
    """Config of a new drafter for `target` (Qwen3-style layers with q/k norm; sizes default to the target's).

    Raises ConfigError for a mask token that is missing or doubles as pad, eos or bos.
    """
    from jaxspec.models.config import layer_windows

    if mask_token_id is None:
        raise ConfigError("drafter.mask_token_id: missing, expected an id of the vocabulary that no text uses")
    windows = layer_windows(
        {
            "layer_types": list(layer_types) if layer_types else ["full_attention"] * num_layers,
            "sliding_window": sliding_window,
        },
        num_layers,
    )
    model = dataclasses.replace(
        target,
        family="qwen3",
        num_layers=num_layers,
        num_heads=num_heads or target.num_heads,
        num_kv_heads=num_kv_heads or target.num_kv_heads,
        head_dim=head_dim or target.head_dim,
        intermediate_size=intermediate_size or target.intermediate_size,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        layer_windows=windows,
    )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"drafter.num_kv_heads: found {model.num_kv_heads}, expected a divisor of {model.num_heads} heads"
        )
    for name, ids in special_tokens(model, target).items():
        if mask_token_id in ids:
            raise ConfigError(
                f"drafter.mask_token_id: {mask_token_id} is also {name}, expected an id that no text uses"
            )
    return BlockConfig(
        model=model,
        taps=tuple(target_layer_ids) if target_layer_ids else build_target_layer_ids(target.num_layers, num_layers),
        block_size=block_size,
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        is_causal=is_causal,
    )
