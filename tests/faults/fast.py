"""Faults of what makes rounds fast: resident inputs, bare rounds, packed layers, the joined kernel."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_PARCEL = ("tests/decoding/test_parcel.py::test_what_goes_in_comes_out",)
_NEWS = ("tests/serving/test_engine_fast.py::test_a_round_without_news_sends_nothing",)
_FORMS = ("tests/serving/test_engine_fast.py::test_fast_rounds_answer_as_plain_ones_do[forms]",)
_PACKED = ("tests/models/test_packed.py::test_a_packed_target_computes_the_same[norms]",)
_PAGES = ("tests/models/test_packed.py::test_the_kernels_path_writes_and_sees_the_same_pages[norms]",)
_LOOP = ("tests/kernels/test_rotate_write.py::test_rows_are_those_of_a_loop[8-float32-True-gpu]",)
_BLOCK = ("tests/serving/test_engine_fast.py::test_a_block_that_reads_its_pages_in_place_proposes_the_same",)
_DEVICE = ("tests/serving/test_engine_fast.py::test_the_device_decides",)

FAST = [
    Mutant(
        "fast-flags-inverted",
        "jaxspec/decoding/parcel.py",
        "part != 0 if",
        "part == 0 if",
        _PARCEL,
        "a flag is a word that is not 0",
    ),
    Mutant(
        "fast-floats-by-value",
        "jaxspec/decoding/parcel.py",
        "jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))",
        "part.astype(dtype)",
        _PARCEL,
        "words are bits, not numbers",
    ),
    Mutant(
        "fast-inputs-never-change",
        "jaxspec/serving/round_inputs.py",
        "if before is not None and np.array_equal(before[0], words):",
        "if before is not None:",
        _NEWS,
        "what changed must be sent",
    ),
    Mutant(
        "fast-inputs-always-sent",
        "jaxspec/serving/round_inputs.py",
        "if before is not None and np.array_equal(before[0], words):",
        "if False:",
        _NEWS,
        "what did not change is not sent",
    ),
    Mutant(
        "fast-inputs-move",
        "jaxspec/serving/round_inputs.py",
        "_overwrite(place, jax.device_put(words, self.device))",
        "jax.device_put(words, self.device)",
        _NEWS,
        "a graph holds the inputs' address",
    ),
    Mutant(
        "fast-bare-narrowed",
        "jaxspec/serving/requests.py",
        "return not narrowed and params",
        "return params",
        _FORMS,
        "a bare round knows no top-k and no top-p",
    ),
    Mutant(
        "fast-bare-ruled",
        "jaxspec/serving/requests.py",
        " and self.rules is None and",
        " and",
        _FORMS,
        "a bare round knows no penalties",
    ),
    Mutant(
        "fast-packed-order",
        "jaxspec/models/packed.py",
        '"q_proj", "k_proj", "v_proj"',
        '"q_proj", "v_proj", "k_proj"',
        _PACKED,
        "the joined product is q, k, v",
    ),
    Mutant(
        "fast-packed-norm",
        "jaxspec/models/packed.py",
        '{"q_norm": config.num_heads, "k_norm": config.num_kv_heads}',
        '{"k_norm": config.num_kv_heads, "q_norm": config.num_heads}',
        _PACKED,
        "the queries' norm comes first",
    ),
    Mutant(
        "fast-parts-places",
        "jaxspec/models/attention.py",
        "found = [places(layout, cache.shape[1]) for layout in self.layouts]",
        "found = [places(layout, cache.shape[1]) for layout in self.layouts[::-1]]",
        _PAGES,
        "every part's rows go to its own pages",
    ),
    Mutant(
        "fast-values-rotated",
        "pallas_kernels/rotate_write/gpu.py",
        "spin = head < queries + kv",
        "spin = head <= queries + kv",
        _LOOP,
        "values are not rotated",
    ),
    Mutant(
        "fast-scale-by-the-half",
        "pallas_kernels/rotate_write/gpu.py",
        "/ dim + eps)",
        "/ half + eps)",
        _LOOP,
        "the mean is over the whole head",
    ),
    Mutant(
        "fast-block-sees-its-anchor",
        "jaxspec/drafters/block.py",
        "index * block, lengths, slots.positions,",
        "index * block, lengths, slots.positions + 1,",
        _BLOCK,
        "the anchor has no context row yet",
    ),
    Mutant(
        "fast-layout-by-a-loop",
        "jaxspec/models/layout.py",
        ', method="compare_all")',
        ")",
        ("tests/models/test_paged_cache.py::test_a_round_is_laid_out_without_a_loop",),
        "a loop ends the graph of a round",
    ),
    Mutant(
        "fast-old-cards",
        "jaxspec/decoding/fast.py",
        "float(capability) < 8.0",
        "float(capability) < 7.0",
        _DEVICE,
        "the kernel is not for cards before Ampere",
    ),
]
