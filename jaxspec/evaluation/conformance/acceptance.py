"""Kinds 8: the acceptance functions of the served round, over given logits, drafts and uniforms."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.decoding.acceptance import Acceptance, cut_accept, greedy_accept, sampled_accept
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Dense, Proposal
from jaxspec.evaluation.conformance.cases import Case, Tensors


def sglang(case: Case) -> Tensors:
    """Greedy, ratio and block acceptance, whole and cut at the scheduled lengths (which count the anchor)."""
    logits, u, u_last = (jnp.asarray(case.input(name)) for name in ("target_logits", "uniform", "uniform_final"))
    cut = jnp.asarray(case.input("cutoff_verify_lens"), jnp.int32) - 1
    p = probabilities(logits, jnp.asarray(case.input("temperatures")))
    found: Tensors = {"target_probs": p}

    drafts = jnp.asarray(case.input("greedy_candidates"), jnp.int32)[:, 1:]
    counts = jnp.full(drafts.shape[:1], drafts.shape[1], jnp.int32)
    whole = greedy_accept(logits, drafts, counts)
    found |= {"greedy_correct_len": whole.accepted, "greedy_bonus": whole.token}
    kept = cut_accept(whole, drafts, cut)
    found |= _cut("greedy", whole, kept)
    found["greedy_cut_commit_lens"] = kept.accepted + 1
    found["greedy_cut_new_seq_lens"] = jnp.asarray(case.input("prefix_lens"), jnp.int32) + kept.accepted + 1

    drafts = jnp.asarray(case.input("sampling_candidates"), jnp.int32)[:, 1:]
    proposal = Proposal(drafts, Dense(jnp.asarray(case.input("draft_probs"))))
    for name, mode in (("token", "ratio"), ("block", "block")):
        whole = sampled_accept(p, proposal, u, u_last, counts, mode)
        found[f"{name}_correct_len"], found[f"{name}_bonus"] = whole.accepted, whole.token
        found[f"{name}_predicts"] = whole.tokens(proposal, fill=-1)
        found |= _cut(name, whole, cut_accept(whole, drafts, cut))
    return found


def deepspec(case: Case) -> Tensors:
    """Ratio acceptance of a varying number of drafts a row at one temperature, and the same rows greedily."""
    logits, draft_logits = jnp.asarray(case.input("target_logits")), jnp.asarray(case.input("draft_logits"))
    drafts, counts = (jnp.asarray(case.input(name), jnp.int32) for name in ("draft_tokens", "draft_counts"))
    temperature = jnp.full(drafts.shape[:1], float(case.setting("temperature")))
    proposal = Proposal(drafts, Dense(probabilities(draft_logits, temperature)))
    u, u_last = jnp.asarray(case.input("uniform")), jnp.asarray(case.input("uniform_final"))
    drawn = sampled_accept(probabilities(logits, temperature), proposal, u, u_last, counts, "ratio")
    greedy = greedy_accept(logits, jnp.argmax(draft_logits, axis=-1).astype(jnp.int32), counts)
    return {
        "accepted": drawn.accepted,
        "next_token": drawn.token,
        "greedy_accepted": greedy.accepted,
        "greedy_next": greedy.token,
        "final_distribution": drawn.distribution,
        "accept_prefix_mask": (jnp.arange(drafts.shape[1]) < drawn.accepted[:, None]).astype(jnp.int32),
    }


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
