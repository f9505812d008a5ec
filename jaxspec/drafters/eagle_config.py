"""Configuration that the EAGLE drafters share, read from and written to the public config.json layouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import FINAL, Tap

_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """One layer over the target's features. `draft_vocab` is what the head covers; `source_config` is the JSON text of
    an imported config, kept verbatim."""

    model: ModelConfig
    taps: tuple[Tap, ...]
    draft_vocab: int
    num_target_layers: int
    target_hidden_size: int
    source_config: str | None = None

    def __post_init__(self) -> None:
        if self.model.num_layers != 1:
            raise ConfigError(f"num_hidden_layers: found {self.model.num_layers}, expected the 1 layer that EAGLE has")
        if not 0 < self.draft_vocab <= self.model.vocab_size:
            raise ConfigError(
                f"draft_vocab_size: found {self.draft_vocab}, expected 1 to vocab_size = {self.model.vocab_size}"
            )
        for tap in self.taps:
            if tap != FINAL and not (isinstance(tap, int) and -1 <= tap < self.num_target_layers):
                raise ConfigError(
                    f"eagle_aux_hidden_state_layer_ids: found {tap!r}, expected ids of the target's "
                    f"{self.num_target_layers} layers"
                )

    @property
    def block_size(self) -> int:
        """Rows of a draft block: every row of a sequence is one of its own, no anchor is drawn."""
        return 1

    @property
    def own_embedding(self) -> bool:
        """A drafter of another width cannot share the target's embedding."""
        return self.model.hidden_size != self.target_hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelConfig, taps: tuple[Tap, ...]) -> EagleConfig:
        """Raises ConfigError where the drafter was not made for this target."""
        model = ModelConfig.from_hf(config)
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"vocab_size: the drafter has {model.vocab_size}, expected the target's {target.vocab_size}"
            )
        width = config.get("target_hidden_size")
        width = model.hidden_size if width is None else width
        if width != target.hidden_size:
            raise ConfigError(
                f"target_hidden_size (or hidden_size): the drafter reads features of {width}, expected the target's "
                f"{target.hidden_size}"
            )
        layers = config.get("num_target_layers")
        if layers is not None and layers != target.num_layers:
            raise ConfigError(
                f"num_target_layers: the drafter was made for {layers}, the target has {target.num_layers}"
            )
        size = config.get("draft_vocab_size")
        return cls(
            model=model,
            taps=taps,
            draft_vocab=model.vocab_size if size is None else size,
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            source_config=json.dumps(config),
        )


def explicit_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Output ids that a config names, nested or at the top; ConfigError where two places differ."""
    places = (config.get("eagle_config") or {}, config)
    found = [tuple(place[name]) for place in places for name in _ID_KEYS if place.get(name) is not None]
    if any(ids != found[0] for ids in found):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids: found {list(found[0])} and {list(found[-1])}, expected one list"
        )
    return found[0] if found else None


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Outputs of layers 1, N // 2 - 1 and N - 4: what enters layers 2, N // 2 and N - 3, as EAGLE-3 captures them."""
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if min(ids) < 0:
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids: the target has {num_layers} layers, expected at least 4; name them "
            "yourself"
        )
    return ids


def fresh_model(target: ModelConfig, **sizes: int | None) -> ModelConfig:
    """One Llama layer with the target's sizes, or those given, whatever the target's family."""
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    model = dataclasses.replace(
        target,
        family="llama",
        num_layers=1,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        layer_windows=(None,),
        **given,
    )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"drafter.num_kv_heads: found {model.num_kv_heads}, expected a divisor of {model.num_heads} heads"
        )
    return model
