"""Faults of presets, the average, best weights, evaluation, the report, loading and out of memory."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_PRESETS = ("tests/test_presets.py",)
_LORA = "tests/checkpoints/test_lora.py::"
_PLACING = "tests/checkpoints/test_placing.py::"
_BEST = "tests/training/test_best.py::"
_AVERAGE = "tests/training/test_average.py::"
RUNS = [
    Mutant(
        "runs-memory-keys-are-the-runs",
        "jaxspec/training/fingerprint.py",
        '{"data.path", "objective.chunk_blocks", "objective.keep_products"}',
        '{"data.path", "objective.keep_products"}',
        ("tests/training/test_run.py::test_resume_with_other_data_is_refused_and_free_keys_may_change",),
        "a slice's width is memory, not the run",
    ),
    Mutant(
        "runs-dtype-of-a-map",
        "jaxspec/checkpoints/drafter.py",
        'if tensor.dtype.kind not in "biu")',
        "if tensor.size)",
        ("tests/drafters/test_eagle3.py",),
        "config.json gives the weights' dtype, not a vocabulary map's",
    ),
    Mutant(
        "preset-over-explicit-keys",
        "jaxspec/config/presets.py",
        "filled[section] = {**_for(preset, section, given), **given}",
        "filled[section] = {**given, **_for(preset, section, given)}",
        _PRESETS,
        "a key that is given is meant",
    ),
    Mutant(
        "preset-loses-the-published-batch",
        "jaxspec/config/presets.py",
        "return {named: size, other: total // size}",
        "return {named: size}",
        _PRESETS,
        "512 sequences a step whatever the micro-batch",
    ),
    Mutant(
        "average-starts-too-slow",
        "jaxspec/training/optimizer.py",
        "(1.0 + now) / (10.0 + now)",
        "(10.0 + now) / (11.0 + now)",
        (f"{_AVERAGE}test_the_formula_by_hand",),
        "the random start must be forgotten at once",
    ),
    Mutant(
        "average-is-kept-but-not-served",
        "jaxspec/training/state.py",
        "return self.params if self.ema is None else join_trainable",
        "return self.params if self is not None else join_trainable",
        (f"{_AVERAGE}test_the_average_is_kept_resumed_exactly_measured_and_exported",),
        "what is measured and exported is the average",
    ),
    Mutant(
        "best-is-replaced-by-an-equal",
        "jaxspec/training/best.py",
        "tau <= self.found.tau",
        "tau < self.found.tau",
        (f"{_BEST}test_only_a_higher_tau_replaces_it_and_it_says_what_it_is",),
        "the first of equals stays, so that a restart changes nothing",
    ),
    Mutant(
        "best-of-other-prompts",
        "jaxspec/training/best.py",
        "if metadata.get(_EVALUATION) != self._evaluation:",
        "if metadata.get(_EVALUATION) is None:",
        (f"{_BEST}test_only_a_higher_tau_replaces_it_and_it_says_what_it_is",),
        "taus of other prompts cannot be compared",
    ),
    Mutant(
        "acceptance-without-the-prefix",
        "jaxspec/drafters/losses.py",
        "stood = jnp.cumprod(correct * mask, axis=-1)",
        "stood = correct * mask",
        ("tests/evaluation/test_during_training.py",),
        "B38: a slot counts only where those before it stood",
    ),
    Mutant(
        "lora-scale-of-rslora",
        "jaxspec/checkpoints/lora.py",
        "alpha / (math.sqrt(self.rank) if config.get",
        "alpha / (self.rank if config.get",
        (f"{_LORA}test_merged_weights_are_those_by_hand",),
        "rsLoRA divides by the root of the rank",
    ),
    Mutant(
        "lora-unknown-keys-are-ignored",
        "jaxspec/checkpoints/lora.py",
        "if key not in _READ | _HARMLESS and",
        "if key not in _READ | _HARMLESS | set(config) and",
        (f"{_LORA}test_what_is_not_plain_lora_is_refused",),
        "DoRA merged as plain LoRA is another model",
    ),
    Mutant(
        "lora-left-over-tensors",
        "jaxspec/checkpoints/lora.py",
        'broken += [f"left over {stored}" for stored in sorted(left_over)]',
        "broken += []",
        (f"{_LORA}test_coverage_holds_in_both_directions",),
        "trap 18: half an adapter loads without a word",
    ),
    Mutant(
        "loading-does-not-wait-for-the-transfer",
        "jaxspec/checkpoints/placing.py",
        "return leaf.block_until_ready()",
        "return leaf",
        (f"{_PLACING}test_a_transfer_is_waited_for_before_the_next_tensor_is_read",),
        "transfers that pile up are the whole model on the host",
    ),
    Mutant(
        "loading-reads-equal-parts-twice",
        "jaxspec/checkpoints/placing.py",
        "if bounds not in parts:",
        "if bounds:",
        (f"{_PLACING}test_a_shard_reads_its_own_part_and_equal_parts_are_read_once",),
        "a replica costs no second read",
    ),
    Mutant(
        "out-of-memory-advises-devices-that-are-not-there",
        "jaxspec/training/memory.py",
        "None if compiled is None else found, len(jax.devices()))",
        "None if compiled is None else found)",
        ("tests/training/test_memory.py::test_the_table_and_one_setting",),
        "the setting to change must be one that helps here",
    ),
    Mutant(
        "report-draws-what-is-no-number",
        "jaxspec/training/plots.py",
        "if math.isfinite(x) and math.isfinite(y)",
        "if math.isfinite(x)",
        ("tests/training/test_report.py",),
        "one NaN empties a chart",
    ),
]
