"""Faults of DFlash 2 and DFlare."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_DFLASH2 = ("tests/drafters/test_dflash2.py",)
_DFLASH2_TRAINING = ("tests/drafters/test_dflash2_training.py",)
_DFLASH2_SERVING = ("tests/drafters/test_dflash2_serving.py",)
_DFLARE = ("tests/drafters/test_dflare.py",)
DFLASH2 = [
    Mutant(
        "dflash2-conv-crosses-edge",
        "jaxspec/drafters/grouped_conv.py",
        "before = jnp.pad(wide[..., : block - tap, :], [(0, 0)] * (rows.ndim - 2) + [(tap, 0), (0, 0)])",
        "before = jnp.roll(wide, tap, axis=-2)",
        ("tests/drafters/test_dflash2.py::test_a_kernel_of_the_previous_row_stays_inside_its_block",),
        "rows before a block's first are zero, not its last",
    ),
    Mutant(
        "dflash2-conv-group-order",
        "jaxspec/drafters/grouped_conv.py",
        "jnp.repeat(deltas.astype(jnp.float32), width // deltas.shape[-1], axis=-1)",
        "jnp.tile(deltas.astype(jnp.float32), width // deltas.shape[-1])",
        ("tests/drafters/test_dflash2.py::test_convolution_equals_the_formula",),
        "groups are contiguous channels",
    ),
    Mutant(
        "dflash2-conv-side-major",
        "jaxspec/drafters/grouped_conv.py",
        "deltas[..., 1, :, :])",
        "deltas[..., 0, :, :])",
        (
            "tests/drafters/test_dflash2.py::test_both_sides_take_their_coefficients_from_the_row_before_any_convolution",
        ),
        "each side has deltas of its own",
    ),
    Mutant(
        "dflash2-conv-not-identity",
        "jaxspec/drafters/grouped_conv.py",
        ".at[:, 0].set(1)",
        ".at[:, 1].set(1)",
        ("tests/drafters/test_dflash2.py::test_fresh_convolution_is_the_identity_bit_for_bit",),
        "tap 0 is the row itself",
    ),
    Mutant(
        "dflash2-selector-loud",
        "jaxspec/drafters/dflash2.py",
        "params = selector.silent(super().init(key, dtype))",
        "params = super().init(key, dtype)",
        ("tests/drafters/test_dflash2.py::test_a_fresh_selector_changes_no_score",),
        "a fresh selector must change nothing",
    ),
    Mutant(
        "dflash2-lattice-anchor",
        "jaxspec/drafters/selector.py",
        "candidates.ids[..., :-1, :]], axis=-2)",
        "candidates.ids[..., 1:, :]], axis=-2)",
        ("tests/drafters/test_dflash2.py::test_rows_of_the_lattice_equal_the_scores_along_the_walk",),
        "the predecessors of a slot are the candidates of the slot before it",
    ),
    Mutant(
        "dflash2-greedy-q-soft",
        "jaxspec/drafters/selector.py",
        "probs = jnp.where(greedy[:, None], jax.nn.one_hot(best, row.shape[-1]), drawn_from)",
        "probs = drawn_from",
        ("tests/drafters/test_dflash2.py::test_walk_equals_a_walk_by_hand",),
        "a greedy request's q is a point",
    ),
    Mutant(
        "dflash2-walk-no-temperature",
        "jaxspec/drafters/selector.py",
        "jax.nn.softmax(row / scale, axis=-1)",
        "jax.nn.softmax(row, axis=-1)",
        ("tests/drafters/test_dflash2.py::test_walk_equals_a_walk_by_hand",),
        "q is the softmax at the request's temperature",
    ),
    Mutant(
        "dflash2-inject-label",
        "jaxspec/drafters/dflash2.py",
        '"covered": jnp.any(match, axis=-1).astype(jnp.float32),',
        '"covered": jnp.ones(labels.shape, jnp.float32),',
        (
            "tests/drafters/test_dflash2_training.py::"
            "test_a_label_outside_the_strict_candidates_counts_in_the_denominator_only",
        ),
        "a label outside the candidates is no example for the selector",
    ),
    Mutant(
        "dflash2-selector-own-denominator",
        "jaxspec/drafters/dflash2.py",
        '"selector": (number, total),',
        '"selector": (number, jnp.sum(weighed)),',
        (
            "tests/drafters/test_dflash2_training.py::"
            "test_both_terms_are_divided_by_the_base_weight_sum_and_only_covered_labels_reach_the_selector",
        ),
        "the selector's term is divided by the base weight sum",
    ),
    Mutant(
        "dflash2-predecessor-is-the-label",
        "jaxspec/drafters/dflash2.py",
        "selector.scores(params, found, hidden, tokens[:, :-1])",
        "selector.scores(params, found, hidden, tokens[:, 1:])",
        (
            "tests/drafters/test_dflash2_training.py::"
            "test_both_terms_are_divided_by_the_base_weight_sum_and_only_covered_labels_reach_the_selector",
        ),
        "the selector sees the token before, not the label",
    ),
    Mutant(
        "dflash2-stop-gradient-hidden",
        "jaxspec/drafters/dflash2.py",
        "found, hidden = jax.lax.stop_gradient((found, hidden))",
        "found = jax.lax.stop_gradient(found)",
        ("tests/drafters/test_dflash2_training.py::test_stop_gradient_keeps_the_selectors_loss_off_the_backbone",),
        "the hidden state carries gradient too",
    ),
    Mutant(
        "dflash2-ramp-from-zero",
        "jaxspec/drafters/dflash2.py",
        "beyond = progress - self.selector_warmup_ratio",
        "beyond = progress",
        ("tests/drafters/test_dflash2_training.py::test_alpha_is_zero_through_the_warm_up_and_then_grows_linearly",),
        "the ramp begins where the warm-up ends",
    ),
    Mutant(
        "dflash2-lengths-skip-holes",
        "jaxspec/drafters/dflash2.py",
        "jnp.cumprod(chance * mask, axis=-1)",
        "jnp.cumsum(chance * mask, axis=-1)",
        (
            "tests/drafters/test_dflash2_training.py::"
            "test_B38_lengths_count_the_committed_tokens_of_a_block_up_to_the_first_unsupervised_row",
        ),
        "a length ends at the first miss",
    ),
    Mutant(
        "dflare-mix-after-norm",
        "jaxspec/drafters/dflare.py",
        'jax.nn.softmax(params["layer_fusion_weights"].astype(jnp.float32), axis=-1)',
        'params["layer_fusion_weights"].astype(jnp.float32)',
        ("tests/drafters/test_dflare.py::test_the_forward_equals_an_independent_one_in_training_and_in_serving",),
        "the mixture is a softmax",
    ),
    Mutant(
        "dflare-shared-projection",
        "jaxspec/drafters/dflare.py",
        "keys = self._heads(self.k_proj_target(context), self.k_norm, cos, sin)",
        "keys = self._heads(self.k_proj(context), self.k_norm, cos, sin)",
        ("tests/drafters/test_dflare.py::test_the_forward_equals_an_independent_one_in_training_and_in_serving",),
        "the context has a projection of its own",
    ),
    Mutant(
        "dflare-favoured-tap",
        "jaxspec/drafters/dflare.py",
        "int(layer / layers * taps)",
        "layer",
        ("tests/drafters/test_dflare.py::test_a_fresh_drafter_favours_the_taps_in_order",),
        "the favoured taps spread over all of them",
    ),
    Mutant(
        "dflash-gamma-epoch",
        "jaxspec/drafters/dflash.py",
        "objective.gamma_per_epoch * epochs[:, None, None]",
        "objective.gamma_per_epoch * epochs[0]",
        ("tests/drafters/test_dflare.py::test_progressive_decay_follows_each_sequences_own_epoch",),
        "every sequence has an epoch of its own",
    ),
]
