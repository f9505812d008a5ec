"""Kind 4.anchor_sampler: the trainer's anchor rule with the random numbers given."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.training.anchors import sample_anchors, trim_width


def anchor_sampler(case: Case) -> Tensors:
    """Anchors of every requested width: DeepSpec's fixed one, and SpecForge's, which follows the fullest row."""
    uniforms, loss_mask = jnp.asarray(case.input("rand")), jnp.asarray(case.input("loss_mask"))
    found: Tensors = {}
    for width in case.setting("num_anchors"):
        anchors, keep = sample_anchors(uniforms, loss_mask, int(width))
        found[f"deepspec_anchors_{width}"], found[f"deepspec_keep_{width}"] = anchors, keep
        found[f"specforge_anchors_{width}"], found[f"specforge_keep_{width}"] = trim_width(anchors, keep)
    return found


KINDS = {"4.anchor_sampler": anchor_sampler}
