"""What a config may say of the EAGLE drafters, which have one layer, no block and no heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxspec.config.schema import contradiction

if TYPE_CHECKING:
    from jaxspec.config.train import DrafterSection, ObjectiveSection

EAGLE = ("eagle", "eagle3")
DRAFTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle": {"num_layers": 1, "block_size": 1},
    "eagle3": {"num_layers": 1, "block_size": 1},
}
# EAGLE: SafeAILab's trainer. EAGLE-3: SpecForge's and DeepSpec's; chunk_blocks counts rows, since a row is a block.
OBJECTIVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle": {"ce_alpha": 0.1, "feature_alpha": 1.0, "feature_noise": 0.2, "gamma": None, "chunk_blocks": 1024},
    "eagle3": {"ttt_length": 7, "step_decay": 0.8, "gamma": None, "chunk_blocks": 1024},
}
# values that mean nothing to these methods; anything else is a misunderstanding
_DRAFTER_NEUTRAL = {
    "num_layers": 1, "block_size": 1, "mask_token_id": None, "layer_types": None, "sliding_window": None,
    "is_causal": None, "markov_rank": 0, "markov_head_type": "vanilla", "confidence_head": False,
    "confidence_head_with_markov": False, "sample_from_anchor": False,
}  # fmt: skip
_OBJECTIVE_NEUTRAL = {
    "gamma": None, "gamma_per_epoch": 0.0, "loss_type": "weighted_ce", "l1_alpha": 0.0, "confidence_alpha": 0.0,
}  # fmt: skip
_ONLY = {
    "eagle": ("feature_alpha", "feature_noise"),
    "eagle3": ("ttt_length", "step_decay"),
}


def check_drafter(drafter: DrafterSection) -> None:
    """Keys of the drafter. Raises ConfigError naming both."""
    neutral: dict[str, Any] = dict(_DRAFTER_NEUTRAL) if drafter.method in EAGLE else {}
    if drafter.method != "eagle3":
        neutral |= {"draft_vocab_size": None, "fc_norm": False, "norm_output": True}
    if drafter.method == "eagle":
        neutral["target_layer_ids"] = None
    for name, value in neutral.items():
        if getattr(drafter, name) != value:
            raise contradiction(
                "drafter.method",
                f"drafter.{name}",
                f"{drafter.method} has no such choice, so {name} can only be {_shown(value)}",
                f"leave drafter.{name} out",
            )


def check_objective(method: str, objective: ObjectiveSection) -> None:
    """Keys of the loss. Raises ConfigError naming both."""
    neutral: dict[str, Any] = dict(_OBJECTIVE_NEUTRAL) if method in EAGLE else {}
    if method == "eagle3":
        neutral["ce_alpha"] = 1.0
    if method == "eagle":
        neutral["lk"] = None
    if method != "eagle3":
        neutral["keep_products"] = True
    neutral |= {name: 0 for owner, names in _ONLY.items() if owner != method for name in names}
    for name, value in neutral.items():
        if getattr(objective, name) != value:
            raise contradiction(
                "drafter.method",
                f"objective.{name}",
                f"{method} has no such term, so {name} can only be {_shown(value)}",
                f"leave objective.{name} out",
            )
    if method == "eagle3" and (objective.ttt_length < 1 or objective.step_decay <= 0):
        name = "ttt_length" if objective.ttt_length < 1 else "step_decay"
        raise contradiction(
            "drafter.method",
            f"objective.{name}",
            "0 leaves eagle3 nothing to train",
            f"raise objective.{name}",
        )
    if method == "eagle" and objective.ce_alpha == 0 and objective.feature_alpha == 0:
        raise contradiction(
            "objective.ce_alpha", "objective.feature_alpha", "both are 0, so nothing is trained", "raise one of them"
        )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower()
