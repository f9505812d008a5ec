"""The layout of vLLM's speculators: `speculators_model_type`, the layers' own config nested, and layer ids that count
the embedding (id = output id + 1).

Read and written by `jaxspec inspect` and `jaxspec convert` only. Its DSpark is read with DFlash's rows (the anchor row
predicts nothing), so one that predicts from the anchor cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.config import ModelConfig

_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "eagle3": "LlamaForCausalLMEagle3",
}
_WRITTEN = {
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
    "eagle3": "Eagle3Speculator",
}
_METHOD_KEYS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_LAYER = ("layers.0.", "midlayer.")  # theirs, EAGLE-3's own


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this layout."""
    return "speculators_model_type" in config


def read(
    config: Mapping[str, Any], names: Mapping[str, str], target: ModelConfig | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The config.json and the names (ours -> the file's) that the drafter would have in its own layout.

    Raises ConfigError for what jaxspec does not read in it.
    """
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"speculators_model_type: found {kind!r}, expected one of {', '.join(_ARCHITECTURES)}")
    if not isinstance(layer, Mapping):
        raise ConfigError("transformer_layer_config: missing, expected the config of the drafter's layers")
    own = {**layer, "architectures": [_ARCHITECTURES[kind]]}
    if target is not None:
        own["num_target_layers"] = target.num_layers
    if kind == "eagle3":
        if config.get("norm_before_residual"):
            raise ConfigError("norm_before_residual: found true, expected false: no method here norms the residual")
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None:
            own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": _outputs(ids), "use_aux_hidden_state": True}
        own["draft_vocab_size"] = config.get("draft_vocab_size") or layer["vocab_size"]
        own["target_hidden_size"] = config.get("target_hidden_size") or layer["hidden_size"]
        theirs, ours = _LAYER
        return own, {name.replace(theirs, ours, 1): stored for name, stored in names.items()}
    if config.get("draft_vocab_size") not in (None, layer["vocab_size"]):
        raise ConfigError(
            f"draft_vocab_size: found {config['draft_vocab_size']}, expected the whole vocabulary of "
            f"{layer['vocab_size']}: block drafters here have no reduced one"
        )
    if config.get("sliding_window_non_causal"):
        own["is_causal"] = False
    own["block_size"] = config.get("block_size")
    nested = {key: config[key] for key in _METHOD_KEYS if key in config}
    nested |= {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": _outputs(config.get("aux_hidden_state_layer_ids") or ()),
    }
    if kind == "dspark":
        nested |= {"projector_type": "dspark", "sample_from_anchor": bool(config.get("sample_from_anchor", False))}
    return {**own, "dflash_config": nested}, dict(names)


def write(drafter: Any, own: Mapping[str, Any], verifier: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json in this layout and the drafter's tensor names that are called otherwise in it (ours -> theirs).

    Args:
      own: config.json in the drafter's own layout (SpecForge's).
      verifier: {"name_or_path", "architectures"} of the target.

    Raises ConfigError naming what this layout has no place for.
    """
    kind = drafter.method
    if kind not in _WRITTEN:
        raise ConfigError(f"a {kind} drafter: speculators has no such model type, expected {', '.join(_WRITTEN)}")
    nested = own.get("dflash_config") or {}
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if nested.get(key) is not None:
            raise ConfigError(f"dflash_config.{key}: found {nested[key]}, but speculators has no key for it")
    if own.get("is_causal") is True:
        raise ConfigError("is_causal: found true, but speculators has causal blocks in sliding layers only")
    if getattr(drafter, "sample_from_anchor", False):
        raise ConfigError(
            "sample_from_anchor: found true, but a speculators DSpark is read with DFlash's rows, where the anchor row "
            "predicts nothing"
        )
    for key, plain in (("fc_norm", False), ("norm_output", True)):
        if own.get(key, plain) != plain:
            raise ConfigError(f"{key}: found {own[key]}, but speculators has no key for it")
    layer = {key: value for key, value in own.items() if key not in _NOT_OF_THE_LAYER}
    count = drafter.num_proposals
    common = {
        "architectures": [_WRITTEN[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": dict(verifier),
        },
    }
    if kind == "eagle3":
        ids = [tap + 1 for tap in drafter.taps]
        theirs, ours = _LAYER
        names = {name: name.replace(ours, theirs, 1) for name in _flat(drafter) if name.startswith(ours)}
        return common | {
            "draft_vocab_size": own["draft_vocab_size"],
            "target_hidden_size": own["target_hidden_size"],
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": ids,
        }, names
    keys = {key: nested[key] for key in _METHOD_KEYS if key in nested}
    return common | keys | {
        "draft_vocab_size": layer["vocab_size"],
        "block_size": drafter.config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
        "mask_token_id": drafter.config.mask_token_id,
        "sliding_window_non_causal": own.get("is_causal") is False,
        "sample_from_anchor": False,
    }, {}


_NOT_OF_THE_LAYER = (
    "architectures",
    "block_size",
    "dflash_config",
    "draft_vocab_size",
    "dtype",
    "eagle_config",
    "fc_norm",
    "is_causal",
    "norm_output",
    "num_target_layers",
    "target_hidden_size",
)


def _outputs(ids: Any) -> list[int]:
    return [int(layer) - 1 for layer in ids]


def _flat(drafter: Any) -> list[str]:
    import jax.numpy as jnp

    from jaxspec.models.layers import flatten

    return list(flatten(drafter.abstract_params(jnp.float32)))
