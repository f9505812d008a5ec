"""Faults of confidences, of the threshold that reads them, and of warm starts."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TREES = ("tests/drafters/test_tree_confidence.py",)
_WARM = ("tests/drafters/test_warm_start.py",)
_CALIBRATION = ("tests/evaluation/test_calibration.py",)
CONFIDENCE = [
    Mutant(
        "confidence-orphans",
        "jaxspec/decoding/plan.py",
        "return kept & jnp.take_along_axis(rows, tree.parents, axis=1)",
        "return kept",
        ("tests/drafters/test_tree_confidence.py::test_a_branch_below_the_threshold_goes_with_all_that_hangs_on_it",),
        "a node cannot stand without its parent",
    ),
    Mutant(
        "confidence-nan-stays",
        "jaxspec/decoding/plan.py",
        "kept = tree.valid & (confidence >= threshold)",
        "kept = tree.valid & ~(confidence < threshold)",
        ("tests/drafters/test_tree_confidence.py::test_a_branch_below_the_threshold_goes_with_all_that_hangs_on_it",),
        "a confidence that is no number is none",
    ),
    Mutant(
        "confidence-levels-of-the-whole-tree",
        "jaxspec/decoding/round.py",
        "levels = jnp.max(jnp.where(proposal.tree.valid, proposal.tree.depths, 0), axis=1)",
        "levels = jnp.max(proposal.tree.depths, axis=1)",
        _TREES,
        "what was pruned was not verified",
    ),
    Mutant(
        "confidence-cumulative",
        "jaxspec/drafters/draft_tree.py",
        "for x in (tokens, scores, parents, log_probs)",
        "for x in (tokens, scores, parents, scores)",
        ("tests/drafters/test_draft_tree.py::test_a_node_knows_its_own_log_probability",),
        "a node's confidence is given that its parent was accepted",
    ),
    Mutant(
        "confidence-ddtree-depth",
        "jaxspec/drafters/ddtree.py",
        "jnp.maximum(tree.depths - 1, 0)",
        "jnp.maximum(tree.depths, 0)",
        _TREES,
        "a node of depth d comes from slot d - 1",
    ),
    Mutant(
        "confidence-missing-is-silent",
        "jaxspec/decoding/round.py",
        "if self.confidence_threshold > 0:",
        "if self.confidence_threshold > 0 and proposal.confidence is not None:",
        ("tests/drafters/test_tree_confidence.py::test_a_threshold_without_a_confidence_or_out_of_range_is_an_error",),
        "a threshold that compares with nothing is an error",
    ),
    Mutant(
        "confidence-key-not-passed",
        "jaxspec/serving/main.py",
        '"confidence_threshold", "align",',
        '"align",',
        ("tests/drafters/test_tree_confidence.py::test_the_servers_key_reaches_the_round",),
        "the server's key must reach the round",
    ),
    Mutant(
        "warm-start-loud",
        "jaxspec/drafters/dspark.py",
        '{**fresh["markov_head"], "markov_w2": silent}',
        '{"markov_w2": silent, **fresh["markov_head"]}',
        _WARM,
        "a fresh Markov head must change nothing",
    ),
    Mutant(
        "warm-start-other-rows",
        "jaxspec/drafters/dspark.py",
        "sample_from_anchor=isinstance(drafter, DSpark) and drafter.sample_from_anchor,",
        "sample_from_anchor=True,",
        _WARM,
        "B45: a z-lab DFlash predicts from row 1 on",
    ),
    Mutant(
        "warm-start-row-unchecked",
        "jaxspec/training/build.py",
        "    if predicts != asked:",
        "    if False:",
        _WARM,
        "B45: rows that the source never trained",
    ),
    Mutant(
        "calibrate-cut-rounds",
        "jaxspec/evaluation/calibration.py",
        "        if trace.verified == self._proposals:",
        "        if trace.verified:",
        _CALIBRATION,
        "a proposal that nobody looked at is not a rejected one",
    ),
    Mutant(
        "calibrate-own-slot-only",
        "jaxspec/evaluation/calibration.py",
        "    survival = np.cumprod(_sigmoid(logits.astype(np.float64) / scale), axis=1)",
        "    survival = _sigmoid(logits.astype(np.float64) / scale)",
        _CALIBRATION,
        "what is predicted is the prefix, not the slot",
    ),
    Mutant(
        "calibrate-twice",
        "jaxspec/evaluation/calibration.py",
        '        if getattr(drafter, "temperatures", ()):',
        "        if False:",
        _CALIBRATION,
        "temperatures are fitted to raw logits",
    ),
    Mutant(
        "calibrate-one-proposal-more",
        "jaxspec/evaluation/calibration.py",
        "np.arange(trace.verified) < trace.accepted",
        "np.arange(trace.verified) <= trace.accepted",
        _CALIBRATION,
        "slot k stands when more than k proposals were accepted",
    ),
]
