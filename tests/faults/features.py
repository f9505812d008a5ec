"""Faults of stored features: what is rounded, what counts as there, what may be deleted."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_CODEC = "tests/training/test_feature_codec.py::"
_CAPTURE = "tests/training/test_capture.py::"
_SPOOL = "tests/training/test_spool.py::"
_STORE = "jaxspec/training/featurestore/"

FEATURES = [
    Mutant(
        "features-row-without-itself",
        "jaxspec/training/features.py",
        "jnp.arange(q.shape[1]), q.shape[:2])",
        "jnp.arange(q.shape[1]) - 1, q.shape[:2])",
        ("tests/training/test_sequence_attention.py",),
        "a row sees all that is before it",
    ),
    Mutant(
        "features-without-the-window",
        "jaxspec/training/features.py",
        "jnp.ones_like(places, bool), window)",
        "jnp.ones_like(places, bool))",
        ("tests/training/test_sequence_attention.py",),
        "a sliding layer of the target stays one",
    ),
    Mutant(
        "features-scale-rounded-down",
        _STORE + "codec.py",
        "upper = ((bits + 0xFFFF) >> 16) << 16",
        "upper = (bits >> 16) << 16",
        (_CODEC + "test_a_group_of_32_channels_has_a_scale_of_its_own_and_half_of_it_bounds_the_error",),
        "the largest value of a group would leave the codes' range",
    ),
    Mutant(
        "features-first-row-in-eight-bits",
        _STORE + "codec.py",
        "return features.at[:, 0].set(first.astype(jnp.float32))",
        "return features",
        (_CODEC + "test_row_0_is_exact_in_bfloat16_and_the_rest_costs_less_than_a_percent",),
        "SmolLM2's row 0 reaches 24,891",
    ),
    Mutant(
        "features-codes-one-row-early",
        _STORE + "codec.py",
        'start = 1 if name in ("codes", "scales") else 0',
        "start = 0",
        (_CODEC + "test_a_record_comes_back_padded_and_as_long_as_was_said",),
        "row t would get the features of row t + 1",
    ),
    Mutant(
        "features-manifest-taps-unchecked",
        _STORE + "manifest.py",
        '_INFORMATIVE = ("target", "version", "kind")',
        '_INFORMATIVE = ("target", "version", "kind", "taps")',
        (_CAPTURE + "test_the_manifest_is_checked_field_by_field",),
        "other taps are a low tau later, not an error at the start",
    ),
    Mutant(
        "features-short-shard-counts-as-whole",
        _STORE + "shards.py",
        'if not storage.exists(name) or storage.size(name) != about["bytes"]:',
        "if not storage.exists(name):",
        (_CAPTURE + "test_a_shard_that_lost_bytes_is_made_again_and_another_config_is_refused",),
        "a resumed capture must not keep half a file",
    ),
    Mutant(
        "features-another-file-of-the-same-size",
        _STORE + "shards.py",
        'return not hashed or digest(storage.local(name)) == about["sha256"]',
        "return True",
        (_CAPTURE + "test_a_damaged_file_is_refused_at_the_start_and_the_same_capture_makes_it_anew",),
        "features of another target would be trained on without a word",
    ),
    Mutant(
        "features-compute-dtype-not-compared",
        _STORE + "manifest.py",
        '"compute_dtype": config.drafter.dtype,',
        '"compute_dtype": None,',
        ("tests/training/test_features.py::test_features_of_another_run_are_refused_at_the_start",),
        "float32 files may hold bfloat16 features",
    ),
    Mutant(
        "features-disk-looked-at-late",
        _STORE + "capture.py",
        "if needed + _MARGIN > free:",
        "if needed > free + _MARGIN:",
        (_CAPTURE + "test_a_small_disk_is_refused_before_anything_is_written",),
        "a capture must not begin what cannot end",
    ),
    Mutant(
        "spool-acknowledged-when-consumed",
        _STORE + "consumer.py",
        """                for done in range(self._ledger.consumed + 1, step + 1):
                    self._ledger.add("consumed", step=done)

    def saved""",
        """                for done in range(self._ledger.consumed + 1, step + 1):
                    self._ledger.add("consumed", step=done)
            self._acknowledge(step)
            self._move(step)

    def saved""",
        (_SPOOL + "test_what_was_consumed_and_not_acknowledged_is_replayed_and_acknowledged_once",),
        "a sample is deletable only once a durable checkpoint covers its step",
    ),
    Mutant(
        "spool-shard-deleted-with-half-its-steps",
        _STORE + "spool.py",
        "return step * accumulation // shard_batches",
        "return -(-step * accumulation // shard_batches)",
        (_SPOOL + "test_producers_stop_at_the_limit_and_the_trainer_gets_whole_steps",),
        "a step may begin within a shard",
    ),
    Mutant(
        "spool-file-counts-without-its-account",
        _STORE + "spool.py",
        'return self.storage.exists(_unit(number) + ".json")',
        "return self.storage.exists(_unit(number) + SUFFIX)",
        (_SPOOL + "test_a_file_without_its_account_is_made_again",),
        "a producer may die between the two",
    ),
    Mutant(
        "spool-silent-lease-is-kept",
        _STORE + "spool.py",
        "if age is None or age > self._lease_seconds:",
        "if age is None:",
        (_SPOOL + "test_a_lease_is_free_when_its_holder_is_gone_or_silent",),
        "a producer that died elsewhere would hold its shard for ever",
    ),
    Mutant(
        "spool-no-back-pressure",
        _STORE + "spool.py",
        "end = start + self.limit if total is None else min(start + self.limit, total)",
        "end = start + self.limit if total is None else total",
        (_SPOOL + "test_producers_stop_at_the_limit_and_the_trainer_gets_whole_steps",),
        "producers wait while the spool is full",
    ),
    Mutant(
        "spool-resumed-run-keeps-what-it-had-consumed",
        _STORE + "ledger.py",
        "            self.consumed = min(self.consumed, step)\n",
        "",
        (_SPOOL + "test_what_was_consumed_and_not_acknowledged_is_replayed_and_acknowledged_once",),
        "the steps after the checkpoint are trained again",
    ),
]
