"""Which proposals stand, and the round's last token. Every mode leaves the target's own law untouched.

Shapes: m proposals a request; target row k (0-based) is the distribution of the token at slot k, row m the bonus row.
`counts` proposals are tested; at most `cut` of them may be kept. Where a round verified only `cut` < m proposals, slot
cut + 1 is still tested against row `cut`: accepted, it is the last token; rejected, the residual is.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Proposal
from jaxspec.drafters.draws import inverse_cdf
from jaxspec.errors import ConfigError
from jaxspec.parallel.rules import anywhere

MODES = ("ratio", "block")
EMPTY_MASS = 1e-8  # a residual lighter than this is rounding: p == q


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """r accepted proposals and the token after them: r + 1 new tokens a request."""

    accepted: Int[Array, "R"]
    token: Int[Array, "R"]
    raw: Int[Array, "R"]  # accepted before the cut
    path: Int[Array, "R D"] | None = None  # a tree's accepted rows from depth 1 on, 0 beyond `accepted`
    weights: Float[Array, "R V"] | None = None  # what an uncut last token is drawn from, not normalised

    @property
    def distribution(self) -> Float[Array, "R V"]:
        """Law of an uncut last token."""
        if self.weights is None:
            raise ValueError("weights: found none, expected a sampled acceptance")
        return self.weights / jnp.sum(self.weights, axis=-1, keepdims=True)

    def tokens(self, proposal: Proposal, fill: int = 0) -> Int[Array, "R m1"]:
        """[d_1 … d_r, last, fill …]."""
        drafts = proposal.tokens
        if self.path is not None:
            drafts = jnp.take_along_axis(drafts, jnp.maximum(self.path - 1, 0), axis=1)
        slot = jnp.arange(drafts.shape[1] + 1)
        drafts = jnp.pad(drafts, ((0, 0), (0, 1)))
        r = self.accepted[:, None]
        return jnp.where(slot < r, drafts, jnp.where(slot == r, self.token[:, None], fill)).astype(jnp.int32)


def accept(
    logits: Float[Array, "R m1 V"],
    proposal: Proposal,
    sampling: SlotSampling,
    u: Float[Array, "R m"],
    u_last: Float[Array, "R"],
    lengths: Int[Array, "R"],
    mode: str = "ratio",
) -> Acceptance:
    """The served round's acceptance: `lengths` proposals were kept for verification, rows 0 … lengths hold target
    logits.

    Greedy rows compare with the argmax; sampled rows use `mode`. The distributions exist only if a row is sampled.
    """
    m = proposal.tokens.shape[1]
    counts = jnp.minimum(lengths + 1, m)
    greedy = greedy_accept(logits, proposal.tokens, counts)

    def sampled(_: None) -> tuple[Array, Array]:
        drawn = sampled_accept(sampling.probabilities(logits), proposal, u, u_last, counts, mode)
        return drawn.accepted, drawn.token

    drawn = jax.lax.cond(anywhere(jnp.any(~sampling.greedy)), sampled, lambda _: (greedy.accepted, greedy.token), None)
    raw = jnp.where(sampling.greedy, greedy.accepted, drawn[0])
    token = jnp.where(sampling.greedy, greedy.token, drawn[1])
    return cut_accept(Acceptance(raw, token, raw), proposal.tokens, lengths)


def greedy_accept(logits: Float[Array, "R m1 V"], drafts: Int[Array, "R m"], counts: Int[Array, "R"]) -> Acceptance:
    """Longest prefix that equals the argmax (float32, lowest id on ties), then the argmax itself."""
    best = jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)
    accepted = _prefix(drafts == best[:, :-1], counts)
    token = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    return Acceptance(accepted, token, accepted)


def sampled_accept(
    p: Float[Array, "R m1 V"],
    proposal: Proposal,
    u: Float[Array, "R m"],
    u_last: Float[Array, "R"],
    counts: Int[Array, "R"],
    mode: str,
) -> Acceptance:
    """Ratio rejection (Leviathan et al.; Chen et al.) or block verification (arXiv 2403.10444), uncut."""
    if mode not in MODES:
        raise ConfigError(f"acceptance: found {mode!r}, expected one of {', '.join(MODES)}")
    q_drafts = proposal.q.prob(proposal.tokens)
    p_drafts = jnp.take_along_axis(p[:, :-1], proposal.tokens[..., None], axis=-1)[..., 0]
    possible = (q_drafts > 0) & (q_drafts <= 1)  # false for NaN: a drafter cannot force a token through
    if mode == "ratio":
        accepted = _prefix(possible & (u * q_drafts < p_drafts), counts)
        scale = jnp.ones(accepted.shape)
    else:
        accepted, scale = _block(p, proposal, jnp.where(possible, p_drafts / q_drafts, 0.0), u, counts)
    row = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    weights = row
    if proposal.tokens.shape[1]:
        residual = jnp.maximum(scale[:, None] * row - _known(proposal.q.rows(accepted)), 0.0)
        empty = jnp.sum(residual, axis=-1) <= EMPTY_MASS
        weights = jnp.where((empty | (accepted == counts))[:, None], row, residual)
    return Acceptance(accepted, inverse_cdf(weights, u_last), accepted, weights=weights)


def cut_accept(uncut: Acceptance, drafts: Int[Array, "R m"], cut: Int[Array, "R"]) -> Acceptance:
    """Keeps at most `cut` proposals; the accepted one behind them, if any, becomes the last token."""
    if not drafts.shape[1]:
        return uncut
    accepted = jnp.minimum(uncut.raw, cut)
    behind = jnp.take_along_axis(drafts, jnp.minimum(accepted, drafts.shape[1] - 1)[:, None], axis=1)[:, 0]
    token = jnp.where(uncut.raw > cut, behind, uncut.token)
    return dataclasses.replace(uncut, accepted=accepted, token=token)


def simulated_accept(
    rates: Float[Array, "m"], likely: Int[Array, "R m1"], u: Float[Array, "R m"], lengths: Int[Array, "R"]
) -> Acceptance:
    """For benchmarks of speed alone: slot k stands with probability `rates[k]` once the slots before it do, whatever
    the target says. The last token is `likely` (the target's argmax) at its row, so the output is not the target's law.
    """
    accepted = _prefix(u < rates, lengths)
    return Acceptance(accepted, jnp.take_along_axis(likely, accepted[:, None], axis=1)[:, 0], accepted)


def _prefix(ok: Bool[Array, "R m"], counts: Int[Array, "R"]) -> Int[Array, "R"]:
    """Length of the leading run of `ok` within the first `counts` slots."""
    tested = jnp.arange(ok.shape[1]) < counts[:, None]
    return jnp.sum(jnp.cumprod((ok & tested).astype(jnp.int32), axis=1), axis=1).astype(jnp.int32)


def _known(q: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """q with NaN taken as 0."""
    return jnp.where(q > 0, q, 0.0)


def _block(
    p: Float[Array, "R m1 V"],
    proposal: Proposal,
    ratios: Float[Array, "R m"],
    u: Float[Array, "R m"],
    counts: Int[Array, "R"],
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """r = the largest i with u_i < h_i, and w_r.

    w_i = min(1, w_{i-1} p_i(d_i) / q_i(d_i)); A_i = sum_v max(w_i p_{i+1}(v) - q_{i+1}(v), 0);
    h_i = A_i / (A_i + 1 - w_i) before the last tested slot, w_i at it.
    """
    requests, m = ratios.shape
    weight = jnp.ones(requests)
    best, scale = jnp.zeros(requests, jnp.int32), jnp.ones(requests)
    for slot in range(m):
        weight = jnp.minimum(1.0, weight * ratios[:, slot])
        chance = weight
        if slot + 1 < m:
            q_next = _known(proposal.q.rows(jnp.full(requests, slot + 1)))
            excess = jnp.sum(jnp.maximum(weight[:, None] * p[:, slot + 1] - q_next, 0.0), axis=-1)
            rest = excess + 1 - weight
            chance = jnp.where(
                counts == slot + 1, weight, jnp.where(rest > 0, excess / jnp.where(rest > 0, rest, 1), 1.0)
            )
        taken = (u[:, slot] < chance) & (slot < counts)
        best, scale = jnp.where(taken, slot + 1, best), jnp.where(taken, weight, scale)
    return best, scale
