"""Kind 5.dspark_block_sampling_sglang: DSpark's walk over given hidden rows, with given weights and SGLang's draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.drafters.base import Shared
from jaxspec.drafters.block_config import BlockConfig
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig, calibrate
from jaxspec.drafters.philox import gumbel_draw, uniforms
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.models.config import ModelConfig


def block_sampling(case: Case) -> Tensors:
    """Greedy and sampled walks of one block a request, their uniforms, and the calibrated confidences."""
    drafter, key = _drafter(case), int(case.setting("philox_key"))
    optional = [name for name in ("sts_temperatures",) if name in case.inputs]

    @jax.jit
    def walk(params: Any, given: dict[str, Array]) -> Tensors:
        head, rows, anchors = given["lm_head"], given["draft_hidden_rows"], given["anchor_tokens"]
        shared = Shared(head, head)  # the walk reads no input embedding
        hidden = rows.reshape(anchors.shape[0], -1, rows.shape[-1])[:, drafter.first_row :]
        requests = jnp.arange(anchors.shape[0])
        greedy = drafter.walk(params, shared, hidden, anchors)
        sampled = drafter.walk(params, shared, hidden, anchors, gumbel_draw(key, requests, given["step_temperatures"]))
        steps = [uniforms(key, requests, step, head.shape[0]) for step in range(hidden.shape[1])]
        found = {
            "base_logits": drafter.block_logits(shared, hidden),
            "gumbel_uniforms": jnp.stack(steps, axis=1),
            "greedy_tokens": greedy.tokens,
            "greedy_step_logits": greedy.logits,
            "sampled_tokens": sampled.tokens,
            "sampled_step_logits": sampled.logits,
        }
        if greedy.confidence_logits is not None:
            found["confidence_raw"] = greedy.confidence_logits
            found["confidence"] = calibrate(greedy.confidence_logits, given.get("sts_temperatures"))
        return found

    given = case.arrays("lm_head", "draft_hidden_rows", "anchor_tokens", "step_temperatures", *optional)
    return walk(_params(case), given)


def _drafter(case: Case) -> DSpark:
    """The heads as the inputs show them; of the backbone only the sizes matter here."""
    vocab, hidden = case.input("lm_head").shape
    confidence = case.inputs.get("confidence_proj_weight")
    from_anchor = bool(case.config.get("sample_from_anchor", True))
    heads = MarkovConfig(
        rank=case.inputs["markov_w1"].shape[1] if "markov_w1" in case.inputs else 0,
        kind=case.config.get("head", "vanilla"),
        confidence=confidence is not None,
        confidence_with_markov=confidence is not None and confidence.shape[1] > hidden,
    )
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1}
    attention = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 1}
    model = ModelConfig.from_hf({"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e4, **sizes, **attention})
    config = BlockConfig(
        model=model,
        taps=(0,),
        block_size=int(case.setting("gamma")) + (0 if from_anchor else 1),
        mask_token_id=0,
        num_target_layers=1,
        target_hidden_size=hidden,
    )
    return DSpark(config, heads=heads, sample_from_anchor=from_anchor)


def _params(case: Case) -> dict[str, Any]:
    """The checkpoint's tree from the inputs' flat names (`gate_proj_weight` is `markov_head.gate_proj.weight`)."""
    heads: dict[str, Any] = {"markov_head": {}, "confidence_head": {}}
    for name, value in case.inputs.items():
        if name in ("markov_w1", "markov_w2"):
            heads["markov_head"][name] = {"weight": value}
        elif name.endswith(("proj_weight", "proj_bias")):
            module, kind = name.rsplit("_", 1)
            place = heads["confidence_head"] if module == "confidence_proj" else heads["markov_head"]
            place.setdefault(module.removeprefix("confidence_"), {})[kind] = value
    return heads


KINDS = {"5.dspark_block_sampling_sglang": block_sampling}
