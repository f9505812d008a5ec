"""Kinds 8: the acceptance functions of the served round, over given logits, drafts and uniforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.decoding.acceptance import Acceptance, cut_accept, greedy_accept, sampled_accept
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Proposal
from jaxspec.evaluation.conformance.cases import Case, Tensors

COMMON_INPUTS = ("target_logits", "uniform", "uniform_final")
SGLANG_INPUTS = (
    *COMMON_INPUTS,
    "greedy_candidates",
    "sampling_candidates",
    "cutoff_verify_lens",
    "prefix_lens",
    "temperatures",
    "draft_probs",
)
DEEPSPEC_INPUTS = (*COMMON_INPUTS, "draft_logits", "draft_tokens", "draft_counts")


def sglang(case: Case) -> Tensors:
    """Greedy, ratio and block acceptance, whole and cut at the scheduled lengths (which count the anchor)."""

    @jax.jit
    def accept(given: dict[str, Array]) -> Tensors:
        logits, cut = given["target_logits"], given["cutoff_verify_lens"] - 1
        p = probabilities(logits, given["temperatures"])
        drafts = given["greedy_candidates"][:, 1:]
        counts = jnp.full(drafts.shape[:1], drafts.shape[1], jnp.int32)
        whole = greedy_accept(logits, drafts, counts)
        kept = cut_accept(whole, drafts, cut)
        found = {
            "target_probs": p,
            "greedy_correct_len": whole.accepted,
            "greedy_bonus": whole.token,
            "greedy_cut_commit_lens": kept.accepted + 1,
            "greedy_cut_new_seq_lens": given["prefix_lens"] + kept.accepted + 1,
            **_cut("greedy", whole, kept),
        }
        drafts = given["sampling_candidates"][:, 1:]
        proposal = Proposal(drafts, Dense(given["draft_probs"]))
        for name, mode in (("token", "ratio"), ("block", "block")):
            whole = sampled_accept(p, proposal, given["uniform"], given["uniform_final"], counts, mode)
            found[f"{name}_correct_len"], found[f"{name}_bonus"] = whole.accepted, whole.token
            found[f"{name}_predicts"] = whole.tokens(proposal, fill=-1)
            found |= _cut(name, whole, cut_accept(whole, drafts, cut))
        return found

    return accept(case.arrays(*SGLANG_INPUTS))


def deepspec(case: Case) -> Tensors:
    """Ratio acceptance of a varying number of drafts a row at one temperature, and the same rows greedily."""
    temperature = float(case.setting("temperature"))

    @jax.jit
    def accept(given: dict[str, Array]) -> Tensors:
        logits, counts = given["target_logits"], given["draft_counts"]
        each = jnp.full(counts.shape, temperature)
        proposal = Proposal(given["draft_tokens"], Dense(probabilities(given["draft_logits"], each)))
        p = probabilities(logits, each)
        drawn = sampled_accept(p, proposal, given["uniform"], given["uniform_final"], counts, "ratio")
        greedy = greedy_accept(logits, jnp.argmax(given["draft_logits"], axis=-1).astype(jnp.int32), counts)
        return {
            "accepted": drawn.accepted,
            "next_token": drawn.token,
            "greedy_accepted": greedy.accepted,
            "greedy_next": greedy.token,
            "final_distribution": drawn.distribution,
            "accept_prefix_mask": (jnp.arange(proposal.tokens.shape[1]) < drawn.accepted[:, None]).astype(jnp.int32),
        }

    return accept(case.arrays(*DEEPSPEC_INPUTS))


def probabilities(logits: Array, temperature: Array) -> Array:
    """[R, n, V] logits as the round turns them into distributions, one temperature a request."""
    plain = SlotSampling.zeros(temperature.shape[0])
    sampling = SlotSampling(temperature.astype(jnp.float32), plain.top_k, plain.top_p, plain.min_p)
    return jnp.stack([sampling.probabilities(logits[:, row]) for row in range(logits.shape[1])], axis=1)


def _cut(name: str, whole: Acceptance, kept: Acceptance) -> Tensors:
    return {
        f"{name}_cut_correct_len": kept.accepted,
        f"{name}_cut_trim": whole.accepted - kept.accepted,
        f"{name}_cut_bonus": kept.token,
    }


KINDS = {"8.acceptance_sglang": sglang, "8.acceptance_deepspec": deepspec}
