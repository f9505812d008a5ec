"""Faults of meshes and their rules, of int8 targets, and of plans."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_RULES, _MESH, _SHARDED = "jaxspec/parallel/rules.py", "jaxspec/parallel/mesh.py", "jaxspec/serving/sharded.py"
_INT8, _PLAN = "jaxspec/models/quantization.py", "jaxspec/serving/plan.py"
_OF_RULES, _OF_INT8 = "tests/parallel/test_rules.py", "tests/models/test_quantization.py"
_OF_PLAN, _OF_SHARDS = "tests/serving/test_plan.py", "tests/parallel/test_sharded.py"
_DEVICES = (f"{_OF_SHARDS}::test_ids_sampled_on_a_mesh_are_those_of_one_device",)
PARALLEL = [
    Mutant(
        "rules-kv-heads-always-split",
        _RULES,
        "return cls(kv_heads=TENSOR if model.num_kv_heads % tensor == 0 else None)",
        "return cls()",
        (f"{_OF_RULES}::test_kv_heads_that_do_not_divide_are_on_every_shard",),
        "two K/V heads on four shards: half a head is none",
    ),
    Mutant(
        "rules-markov-gate-split",
        _RULES,
        r'(r"mlp\.(gate|up)_proj\.weight"',
        r'(r"(gate|up)_proj\.weight"',
        (f"{_OF_RULES}::test_a_gate_outside_the_mlp_is_whole",),
        "a Markov head's gate is no MLP's",
    ),
    Mutant(
        "rules-scales-split-where-they-have-one-column",
        _RULES,
        "None if size == 1 else one for size",
        "one for size",
        (f"{_OF_RULES}::test_scales_follow_the_rows_of_their_matrix",),
        "the scales of an input-split matrix have one column",
    ),
    Mutant(
        "rules-each-shard-its-own-branch",
        _RULES,
        "return jax.lax.pmax(asked.astype(jax.numpy.int32), DATA) > 0",
        "return asked",
        (f"{_OF_RULES}::test_all_data_shards_take_a_branch_together",),
        "a predicate that differs between data shards computes both branches, sorts of the vocabulary among them",
    ),
    Mutant(
        "mesh-decisions-not-compared",
        _MESH,
        "if any(not np.array_equal(first, other) for other in others):",
        "if False:",
        _DEVICES,
        "a debug build has to see tensor shards that disagree",
    ),
    Mutant(
        "mesh-shared-tables-copied",
        _MESH,
        "            if id(leaf) not in placed:\n",
        "            if True:\n",
        (f"{_OF_RULES}::test_one_array_stays_one_array",),
        "embedding and head are shared by reference: another copy of both costs gigabytes",
    ),
    Mutant(
        "sharded-handles-of-another-shard",
        _SHARDED,
        "        handle = own * len(self._shards) + index\n        self._owners",
        "        handle = own * len(self._shards)\n        self._owners",
        (f"{_OF_SHARDS}::test_a_mesh_says_what_one_device_says[small-short-2x4]",),
        "two data shards count their requests alike",
    ),
    Mutant(
        "drafting-larger-bucket-not-filled",
        "jaxspec/serving/drafting.py",
        "budget=max(drafted.budget, more), rows=rows)",
        "rows=rows)",
        (f"{_OF_RULES}::test_a_larger_bucket_is_filled_with_real_drafts",),
        "the rows of the largest bucket are paid for on every shard",
    ),
    Mutant(
        "int8-product-not-scaled",
        _INT8,
        "(sums * weight.scale[:, 0].astype(jnp.float32))",
        "(sums * jnp.mean(weight.scale).astype(jnp.float32))",
        (f"{_OF_INT8}::test_a_product_is_that_of_the_dequantised_matrix",),
        "every output channel has a scale of its own",
    ),
    Mutant(
        "int8-head-too",
        _INT8,
        r'model\.layers\.\d+\..*proj\.weight"',
        r'model\.layers\.\d+\..*proj\.weight|lm_head\.weight"',
        (f"{_OF_INT8}::test_only_the_matrices_of_the_layers_are_quantised_and_a_scan_runs_them_too",),
        "the drafter reads the target's own head",
    ),
    Mutant(
        "int8-same-revision",
        "jaxspec/checkpoints/target.py",
        'revision += f" {quantization}" if quantization else ""',
        "pass",
        (f"{_OF_INT8}::test_a_checkpoint_is_quantised_as_it_is_read",),
        "features of the int8 target must not pass for those of the plain one",
    ),
    Mutant(
        "plan-shared-tables-counted-again",
        _PLAN,
        "        if id(table) in known:\n",
        "        if False:\n",
        (f"{_OF_PLAN}::test_a_table_that_the_drafter_shares_is_counted_once",),
        "a table that is named twice is in memory once",
    ),
    Mutant(
        "plan-buckets-at-their-upper-edge",
        _PLAN,
        "edges = (1, *(before + 1 for before in buckets[:-1]))",
        "edges = tuple(buckets)",
        (f"{_OF_PLAN}::test_an_estimated_table_probes_each_bucket_at_its_lower_edge",),
        "one row more than a bucket holds costs the next bucket",
    ),
    Mutant(
        "plan-estimate-passes-for-a-measurement",
        _PLAN,
        "buckets[-1], estimated=True)",
        "buckets[-1])",
        (f"{_OF_PLAN}::test_an_estimated_table_probes_each_bucket_at_its_lower_edge",),
        "a compiler's estimate is no measurement",
    ),
]
