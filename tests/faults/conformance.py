"""Faults that the golden cases and their runner must notice."""

from __future__ import annotations

from tests.helpers.mutation import Mutant


def _golden(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/evaluation/test_conformance_golden.py::test_golden_case[{case}]" for case in cases)


_RUNNER = ("tests/evaluation/test_conformance.py",)
CONFORMANCE = [
    Mutant(
        "golden-layer-ids-rounding",
        "jaxspec/drafters/block_config.py",
        "round(1 + i * (num_layers - 4) / (num_draft_layers - 1))",
        "int(1.5 + i * (num_layers - 4) / (num_draft_layers - 1))",
        _golden("01_layer_ids"),
        "halves round to even: 2.5 is layer 2",
    ),
    Mutant(
        "golden-ratio-forgets-q",
        "jaxspec/decoding/acceptance.py",
        "possible & (u * q_drafts < p_drafts)",
        "possible & (u < p_drafts)",
        _golden("08_accept_sglang", "08_accept_deepspec"),
        "a draft is accepted with probability p / q, not p",
    ),
    Mutant(
        "golden-cut-last-token",
        "jaxspec/decoding/acceptance.py",
        "jnp.where(uncut.raw > cut, behind, uncut.token)",
        "jnp.where(uncut.raw > cut, uncut.token, uncut.token)",
        _golden("08_accept_sglang"),
        "at a cut the accepted draft behind it is the last token, not the draw of the uncut run",
    ),
    Mutant(
        "golden-block-residual-scale",
        "jaxspec/decoding/acceptance.py",
        "jnp.where(taken, weight, scale)",
        "jnp.where(taken, 1.0, scale)",
        _golden("08_accept_sglang"),
        "block verification draws from max(w_r p - q, 0)",
    ),
    Mutant(
        "golden-dflash-row-0-trained",
        "jaxspec/drafters/dflash.py",
        "(jnp.arange(self.config.block_size) > 0)",
        "(jnp.arange(self.config.block_size) >= 0)",
        _golden("04_dflash_train_full"),
        "the anchor row predicts nothing",
    ),
    Mutant(
        "golden-dead-block-input",
        "jaxspec/drafters/block.py",
        "jnp.where(batch.keep, anchors, self.mask_token_id)",
        "jnp.where(batch.keep, anchors, anchors)",
        _golden("04_dflash_train_full"),
        "a dropped block is mask in its first slot too",
    ),
    Mutant(
        "golden-lk-mixture",
        "jaxspec/drafters/dflash.py",
        "share * ce + (1 - share) * tv",
        "share * tv + (1 - share) * ce",
        _golden("04_dflash_train_lk_lambda"),
        "k weighs the cross entropy, 1 - k the total variation",
    ),
    Mutant(
        "golden-dspark-teacher-row",
        "jaxspec/drafters/dspark.py",
        "jnp.maximum(label_index - 1, 0)",
        "label_index",
        _golden("05_dspark_train_vanilla"),
        "the teacher of a label stands one position before it",
    ),
    Mutant(
        "golden-rnn-order",
        "jaxspec/drafters/markov.py",
        "jnp.concatenate([state, previous, hidden], axis=-1)",
        "jnp.concatenate([previous, state, hidden], axis=-1)",
        _golden("05_dspark_block_sampling_rnn"),
        "the joint projection reads state, embedding, hidden in this order",
    ),
    Mutant(
        "golden-gate-order",
        "jaxspec/drafters/markov.py",
        'head["gate_proj"], jnp.concatenate([hidden, previous], axis=-1)',
        'head["gate_proj"], jnp.concatenate([previous, hidden], axis=-1)',
        _golden("05_dspark_train_gated"),
        "the gate reads hidden, then the embedding",
    ),
    Mutant(
        "golden-confident-prefix",
        "jaxspec/decoding/plan.py",
        "jnp.cumprod((confidence >= threshold).astype(jnp.int32), axis=1)",
        "(confidence >= threshold).astype(jnp.int32)",
        _golden("05_deepspec_dspark_gen"),
        "only the slots before the first doubtful one are verified",
    ),
    Mutant(
        "golden-philox-stream",
        "jaxspec/drafters/philox.py",
        "STREAM = 3  #",
        "STREAM = 2  #",
        _golden("05_dspark_block_sampling_vanilla"),
        "the fourth counter word names the sampler's stream",
    ),
    Mutant(
        "conformance-all-rows-excused",
        "jaxspec/evaluation/conformance/compare.py",
        "if excused and not kept.any():",
        "if not kept.any() and kept.any():",
        _RUNNER,
        "a check whose every row is excused has compared nothing",
    ),
    Mutant(
        "conformance-margin-mean",
        "jaxspec/evaluation/conformance/compare.py",
        ".min(axis=1, initial=np.inf) > check.above",
        ".max(axis=1, initial=-np.inf) > check.above",
        _RUNNER,
        "a row is excused by its smallest margin",
    ),
    Mutant(
        "conformance-no-case-passes",
        "jaxspec/evaluation/conformance/main.py",
        "return 1 if count[FAILED] or not outcomes else 0",
        "return 1 if count[FAILED] else 0",
        _RUNNER,
        "a folder without a case must not look like success",
    ),
    Mutant(
        "conformance-scaled-per-element",
        "jaxspec/evaluation/conformance/compare.py",
        "check.relative_to_max * (finite.max() if finite.size else 0.0)",
        "check.relative_to_max * (finite.min() if finite.size else 0.0)",
        _RUNNER,
        "scaled is relative to the largest expected value",
    ),
    Mutant(
        "conformance-warning-without-a-name",
        "jaxspec/evaluation/conformance/main.py",
        'jax.default_matmul_precision("highest"), _warnings_of(name):',
        'jax.default_matmul_precision("highest"):',
        ("tests/evaluation/test_conformance.py",),
        "a warning among sixty cases says which one it is of",
    ),
]
