"""Kind 6.dflash2_modules_sglang: the grouped convolution and the selector over given rows, weights and uniforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.drafters import selector
from jaxspec.drafters.block_config import BlockConfig
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.grouped_conv import ConvConfig, GroupedConv, convolve
from jaxspec.drafters.selector import SelectorConfig
from jaxspec.evaluation.conformance.cases import Case, Tensors
from jaxspec.models import layers as ly
from jaxspec.models.config import ModelConfig

INPUTS = (
    "conv_base_kernel", "conv_kernel_projection", "conv_input", "conv_sublayer_output", "predecessor_codebook",
    "successor_codebook", "hidden_projection", "lm_head", "hidden_states", "anchor_token_ids", "uniforms",
    "temperatures", "greedy_mask",
)  # fmt: skip


def modules(case: Case) -> Tensors:
    """Both sides of one convolution; candidates, lattice, and the walks that are greedy, drawn and mixed."""
    drafter = _drafter(case)

    @jax.jit
    def run(given: dict[str, Array]) -> Tensors:
        return _convolution(drafter, given) | _paths(drafter, given)

    return run(case.arrays(*INPUTS))


def _convolution(drafter: DFlash2, given: dict[str, Array]) -> Tensors:
    rows, width = given["conv_input"].shape
    blocks = lambda x: x.reshape(-1, drafter.config.block_size, *x.shape[1:])  # noqa: E731
    flat = lambda x: x.reshape(rows, *x.shape[2:])  # noqa: E731
    params = {
        "base_kernel": given["conv_base_kernel"],
        "kernel_projection": {"weight": given["conv_kernel_projection"]},
    }
    graph, _ = ly.abstract_module(GroupedConv, width, drafter.conv)
    conv = ly.bind(graph, params)
    deltas = conv.deltas(blocks(given["conv_input"]))
    base = params["base_kernel"]
    return {
        "conv_prepared": flat(convolve(blocks(given["conv_input"]), base[0], deltas[..., 0, :, :])),
        "conv_output_coefficients": flat(deltas[..., 1, :, :]),
        "conv_finished": flat(convolve(blocks(given["conv_sublayer_output"]), base[1], deltas[..., 1, :, :])),
    }


def _paths(drafter: DFlash2, given: dict[str, Array]) -> Tensors:
    hidden, anchors = given["hidden_states"], given["anchor_token_ids"]
    params = {
        selector.NAME: {
            "hidden_projection": {"weight": given["hidden_projection"]},
            "predecessor_codebook": given["predecessor_codebook"],
            "successor_codebook": given["successor_codebook"],
        }
    }
    found = drafter.candidates(ly.unembed(hidden, given["lm_head"]))
    table = selector.lattice(params, found, hidden, anchors)
    tensors = {"candidate_ids": found.ids, "unary_logits": found.unary, "lattice_scores": table}
    everyone = jnp.ones(anchors.shape, bool)
    for name, greedy in (("mixed", given["greedy_mask"]), ("greedy", everyone), ("sampled", ~everyone)):
        path = selector.walk(table, found.ids, greedy, given["temperatures"], given["uniforms"])
        tensors |= {f"{name}_tokens": path.tokens, f"{name}_q_rows": path.probs}
    return tensors


def _drafter(case: Case) -> DFlash2:
    """The sizes as the case names them; of the backbone only width, block and logit transform matter here."""
    hidden, vocab = int(case.setting("hidden")), int(case.setting("vocab"))
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1}
    attention = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 1}
    model = ModelConfig.from_hf({"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e4, **sizes, **attention})
    cap = case.config.get("softcap")
    config = BlockConfig(
        model=model,
        taps=(0,),
        block_size=int(case.setting("block")),
        mask_token_id=0,
        num_target_layers=1,
        target_hidden_size=hidden,
        output_multiplier=float(case.config.get("output_multiplier") or 1.0),
        final_logit_softcapping=float(cap) if cap and cap > 0 else None,
    )
    return DFlash2(
        config,
        conv=ConvConfig(int(case.setting("taps")), int(case.setting("group"))),
        selector=SelectorConfig(int(case.setting("rank")), int(case.setting("top_k"))),
    )


KINDS = {"6.dflash2_modules_sglang": modules}
