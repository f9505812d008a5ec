"""Logit processors that know a request's history: allowed ids, min tokens, bias and penalties, in this order.

They run before temperature, top-k, top-p and min-p (`jaxspec.decoding.sampling`), for greedy requests too. Row k of a
verified block is processed as plain decoding would after d_1 … d_k, so that verification stays lossless: its history is
what was emitted, and the drafts before it.

Repetition counts prompt and answer and divides positive logits, multiplies negative ones (Keskar et al. 2019, CTRL);
presence and frequency count the answer alone and are subtracted (OpenAI's API).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.errors import RequestError, problem
from jaxspec.parallel.rules import anywhere

MAX_BIASES = 64  # entries of a request's logit bias; fixed shapes


@dataclasses.dataclass(frozen=True)
class LogitRules:
    """What one request asks for. 1 and 0 are off; `logit_bias` is id -> number added to its logit."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0

    def validate(self, vocab_size: int, max_new_tokens: int) -> None:
        """Raises RequestError naming the first field that is out of range."""
        repetition, fits = self.repetition_penalty, _finite(self.repetition_penalty) and self.repetition_penalty > 0
        _expect(fits, "repetition_penalty", repetition, "a positive number (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _expect(_finite(value) and -2 <= value <= 2, name, value, "a number from -2 to 2 (0 is off)")
        least, whole = self.min_tokens, isinstance(self.min_tokens, numbers.Integral)
        fits = whole and not isinstance(least, bool) and 0 <= least <= max_new_tokens
        _expect(fits, "min_tokens", least, f"0 to max_new_tokens = {max_new_tokens}")
        _expect(len(self.logit_bias) <= MAX_BIASES, "logit_bias", len(self.logit_bias), f"at most {MAX_BIASES} ids")
        for token, value in self.logit_bias.items():
            known = isinstance(token, numbers.Integral) and not isinstance(token, bool) and 0 <= token < vocab_size
            _expect(known, "logit_bias", token, f"ids below vocab_size {vocab_size}")
            _expect(_finite(value), f"logit_bias[{token}]", value, "a finite number")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotRules:
    """The rules of every slot, and the history that they look at.

    `ends` are ids that may not come before `min_tokens` (end of sequence, stop ids), filled up with -1, as is the
    `bias_ids` list. `emitted` counts the answer's tokens, the anchor included; `counts` the same id by id.
    """

    repetition: Float[Array, "R"]
    presence: Float[Array, "R"]
    frequency: Float[Array, "R"]
    min_tokens: Int[Array, "R"]
    bias_ids: Int[Array, "R B"]
    bias: Float[Array, "R B"]
    ends: Int[Array, "R E"]
    emitted: Int[Array, "R"]
    counts: Int[Array, "R V"]
    prompt: Bool[Array, "R V"]

    @classmethod
    def empty(cls, slots: int, vocab: int, max_ends: int = 8) -> SlotRules:
        """Nothing asked, nothing seen."""
        zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((slots, *shape), dtype)  # noqa: E731
        off = zeros(dtype=jnp.float32)
        return cls(
            repetition=off + 1,
            presence=off,
            frequency=off,
            min_tokens=zeros(),
            bias_ids=zeros(MAX_BIASES) - 1,
            bias=zeros(MAX_BIASES, dtype=jnp.float32),
            ends=zeros(max_ends) - 1,
            emitted=zeros(),
            counts=zeros(vocab),
            prompt=zeros(vocab, dtype=bool),
        )

    @property
    def asked(self) -> Bool[Array, "R"]:
        """Slots with a rule that may change a logit now."""
        penalties = (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)
        return penalties | (self.emitted < self.min_tokens) | jnp.any(self.bias_ids >= 0, axis=1)

    def start(self, slot: Int[Array, ""], rules: SlotRules) -> SlotRules:
        """A new request on a slot: its rules (`slot_rules`, one row), and an empty history."""
        return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), self, rules)

    def note_prompt(self, slot: Int[Array, ""], tokens: Int[Array, "C"], count: Int[Array, ""]) -> SlotRules:
        """The first `count` of a chunk's tokens belong to the slot's prompt."""
        real = jnp.arange(tokens.shape[0]) < count
        return dataclasses.replace(self, prompt=self.prompt.at[slot, tokens].max(real))

    def note_emitted(self, tokens: Int[Array, "R n"], counts: Int[Array, "R"]) -> SlotRules:
        """The first `counts` tokens of each slot were emitted (a round's accepted drafts and its last token, or the
        token of a prefill)."""
        real = (jnp.arange(tokens.shape[1]) < counts[:, None]).astype(jnp.int32)
        rows = jnp.arange(tokens.shape[0])[:, None]
        return dataclasses.replace(
            self, counts=self.counts.at[rows, tokens].add(real), emitted=self.emitted + counts.astype(jnp.int32)
        )

    def apply(
        self,
        logits: Float[Array, "R m1 V"],
        drafts: Int[Array, "R m"],
        live: Bool[Array, "R"],
        allowed: Bool[Array, "R m1 V"] | None = None,
        before: Bool[Array, "R m1 m"] | None = None,
    ) -> Float[Array, "R m1 V"]:
        """Processed logits in float32; as they are where no live slot asks for anything.

        `before` says which drafts stand before row k on its path: those of the chain, or the row's ancestors in a
        tree. `allowed` is a grammar's mask; a row that allows nothing (behind a grammar's end) is left alone.
        """
        logits = logits.astype(jnp.float32)
        if before is None:
            rows, m = logits.shape[1], drafts.shape[1]
            before = jnp.broadcast_to(jnp.tri(rows, m, -1, dtype=bool), (logits.shape[0], rows, m))
        if allowed is not None:
            some = jnp.any(allowed, axis=-1, keepdims=True)
            logits = jnp.where(allowed | ~some, logits, -jnp.inf)
        return jax.lax.cond(
            anywhere(jnp.any(self.asked & live)), self._process, lambda x, *_: x, logits, drafts, before
        )

    def _process(
        self, logits: Float[Array, "R m1 V"], drafts: Int[Array, "R m"], before: Bool[Array, "R m1 m"]
    ) -> Float[Array, "R m1 V"]:
        vocab, slots = logits.shape[-1], jnp.arange(logits.shape[0])[:, None]
        # The lists become tables over the vocabulary: an id of -1 goes to a column that is cut off again.
        column = lambda ids: jnp.where(ids >= 0, ids, vocab)  # noqa: E731
        ends = jnp.zeros((logits.shape[0], vocab + 1), bool).at[slots, column(self.ends)].set(True)[:, :vocab]
        bias = jnp.zeros((logits.shape[0], vocab + 1)).at[slots, column(self.bias_ids)].add(self.bias)[:, :vocab]
        early = self.emitted[:, None] + jnp.sum(before, axis=-1) < self.min_tokens[:, None]
        longer = jnp.where(early[..., None] & ends[:, None], -jnp.inf, logits)
        possible = jnp.any(longer > -jnp.inf, axis=-1, keepdims=True)  # a grammar may leave nothing but the end
        logits = jnp.where(possible, longer, logits) + bias[:, None]
        done = self._penalised(logits, self.counts[:, None], self.prompt[:, None])
        if not drafts.shape[1]:
            return done
        # Only ids among the drafts have another count at some row: they are computed apart and written over.
        same = (drafts[:, :, None] == drafts[:, None, :]).astype(jnp.int32)
        more = jnp.einsum("rki,rij->rkj", before.astype(jnp.int32), same)
        at_drafts = lambda table: jnp.take_along_axis(table, drafts, axis=1)[:, None]  # noqa: E731
        ids = jnp.broadcast_to(drafts[:, None], before.shape)
        counts, prompt = at_drafts(self.counts) + more, at_drafts(self.prompt)
        values = self._penalised(jnp.take_along_axis(logits, ids, axis=-1), counts, prompt)
        return jnp.put_along_axis(done, ids, values, axis=-1, inplace=False)

    def _penalised(
        self, logits: Float[Array, "R m1 n"], counts: Int[Array, "R k n"], prompt: Bool[Array, "R one n"]
    ) -> Float[Array, "R m1 n"]:
        repetition, presence, frequency = (x[:, None, None] for x in (self.repetition, self.presence, self.frequency))
        used = counts > 0
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(used | prompt, scaled, logits)
        return logits - frequency * counts - presence * used


def slot_rules(rules: LogitRules, ends: tuple[int, ...], vocab: int, max_ends: int = 8) -> SlotRules:
    """One row for `SlotRules.start`, with an empty history. RequestError for more `ends` than fit."""
    asked = rule_rows(rules, ends, max_ends)
    return dataclasses.replace(SlotRules.empty(1, vocab, max_ends), **jax.tree.map(jnp.asarray, asked))


def rule_rows(rules: LogitRules, ends: tuple[int, ...] = (), max_ends: int = 8) -> dict[str, np.ndarray]:
    """The fields of `SlotRules` but its history, one row each, on the host. RequestError for more `ends` than fit."""
    _expect(len(ends) <= max_ends, "stop_token_ids", len(ends), f"at most {max_ends} with the target's own")
    listed = lambda values, width, fill, dtype: np.array(  # noqa: E731
        [[*values, *[fill] * (width - len(values))]], dtype
    )
    return {
        "repetition": np.full(1, rules.repetition_penalty, np.float32),
        "presence": np.full(1, rules.presence_penalty, np.float32),
        "frequency": np.full(1, rules.frequency_penalty, np.float32),
        "min_tokens": np.full(1, rules.min_tokens, np.int32),
        "bias_ids": listed(list(rules.logit_bias), MAX_BIASES, -1, np.int32),
        "bias": listed(list(rules.logit_bias.values()), MAX_BIASES, 0.0, np.float32),
        "ends": listed(ends, max_ends, -1, np.int32),
    }


def unpack_mask(words: Int[Array, "*rows W"], vocab: int) -> Bool[Array, "*rows V"]:
    """A grammar's packed mask: bit i of word w is id 32 w + i."""
    bits = (words[..., None] >> jnp.arange(32, dtype=words.dtype)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab].astype(bool)


def mask_words(vocab: int) -> int:
    """Words of a packed mask."""
    return -(-vocab // 32)


def _finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _expect(fits: bool, field: str, found: object, expected: str) -> None:
    if not fits:
        raise RequestError(problem(field, repr(found), expected))
