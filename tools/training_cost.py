"""What a features-given training step costs on paper: FLOP by part, and the peers that ANCHORS.md measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.training.step import StepSpec

PEAK_FLOPS = 989e12  # dense bf16 of an H200, which MFU is a share of


@dataclasses.dataclass(frozen=True)
class Peer:
    """The best peer's milliseconds, peak GiB and, where it is known, the floor in ms of forward and backward."""

    name: str
    forward_loss: float
    backward: float
    optimizer: float
    step: float
    gib: float
    floor: float | None

    @property
    def forward_backward(self) -> float:
        """What its context tokens/s are counted with."""
        return self.forward_loss + self.backward


PEERS = {
    "dflash": Peer("SpecForge DFlash b16", 53.1, 85.3, 19.4, 157.2, 17.3, 58.8),
    "dspark": Peer("SpecForge DSpark b7", 55.6, 71.5, 22.0, 149.0, 16.1, 31.5),
    "eagle3": Peer("SpecForge EAGLE-3", 63.6, 60.3, 7.6, 131.7, 14.0, None),
}


def needed_flops(spec: StepSpec, length: int) -> dict[str, float]:
    """FLOP of one sequence's forward and backward by part, in the fewest products: nothing is computed twice, frozen
    weights and features get no gradient."""
    drafter: Any = spec.drafter
    model = drafter.config.model
    hidden, vocab, heads = model.hidden_size, model.vocab_size, model.num_heads * model.head_dim
    kv = 2 * model.num_kv_heads * model.head_dim
    mlp = 3 * hidden * model.intermediate_size
    fuse = 2 * 2.0 * length * len(drafter.taps) * spec.model.config.hidden_size * hidden  # forward and weights
    if isinstance(drafter, Eagle3):
        steps, small = drafter.objective_config.ttt_length, drafter.config.draft_vocab
        pairs = steps * length * (length + 1) / 2 + length * steps * (steps - 1) / 2
        return {
            "fc": fuse,
            "projections": 3 * 2.0 * steps * length * (2 * hidden * (heads + kv) + heads * hidden),
            "mlp": 3 * 2.0 * steps * length * mlp,
            "attention": 3 * 4.0 * heads * pairs,
            "vocabulary": 3 * 2.0 * steps * length * hidden * small,
            "teacher": 2.0 * length * hidden * (vocab + (small if small < vocab else 0)),
        }
    block, layers = drafter.config.block_size, model.num_layers
    rows = spec.num_anchors * block
    pairs = spec.num_anchors * block * ((length - 1) / 2 + block)
    slots = spec.num_anchors * drafter.num_proposals
    parts = {
        "fc": fuse,
        "context k/v": 3 * 2.0 * layers * length * hidden * kv,
        "projections": 3 * 2.0 * layers * rows * hidden * (2 * heads + kv),
        "mlp": 3 * 2.0 * layers * rows * mlp,
        "attention": 3 * 4.0 * layers * heads * pairs,
        "vocabulary": 2 * 2.0 * slots * hidden * vocab,  # the head is frozen
    }
    if drafter.needs_teacher:
        parts["teacher"] = 2.0 * slots * hidden * vocab
    rank = drafter.heads.rank if hasattr(drafter, "heads") else 0
    return parts | ({"markov": 3 * 2.0 * slots * rank * vocab} if rank else {})
