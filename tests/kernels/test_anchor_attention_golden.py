"""The handed-out cases of DFlash, DSpark and EAGLE-3 with the TPU kernels selected, in interpret mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.evaluation.conformance.main import run_case
from pallas_kernels.anchor_attention import api
from pallas_kernels.anchor_attention.tpu import TpuKernels

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["04_dflash_train_sliding", "05_dspark_train_vanilla", "07_eagle3_train_q3a"]
OTHERS = [
    "02_dflash_fwd_llama", "02_dflash_fwd_q3a", "03_dflash_gen_q3a", "03_dflash_gen_q3b_tied", "03_dflash_gen_random",
    "04_dflash_train_dpace", "05_deepspec_dspark_gen", "06_dflash2_train",
    "04_dflash_train_full", "04_dflash_train_lk_lambda", "04_deepspec_dflash_train", "05_deepspec_dspark_train",
    "05_dspark_train_gated", "05_dspark_train_rnn", "06_dflash2_gen", "06_dflash2_train_stopgrad",
    "07_eagle3_train_llama_fullvocab", "10_ddtree_gen",
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The kernels selected; counts the forward passes that were traced."""
    seen = []
    forward = TpuKernels.forward
    monkeypatch.setattr(TpuKernels, "forward", lambda self, *args: (seen.append(args), forward(self, *args))[1])
    with api.use_implementation("tpu", interpret=True):
        yield seen


def check(name, calls):
    outcome = run_case(GOLDEN / name, GOLDEN, dump=None)
    assert outcome.status == "pass", outcome.line()
    assert calls, "the kernel was not used"
    return outcome.line()


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_golden_case_with_the_kernel(name, calls):
    check(name, calls)


@pytest.mark.slow("golden-kernels", covers=("pallas_kernels/anchor_attention", "jaxspec/drafters"))
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_golden_case_with_the_kernel(name, calls, record_property):
    record_property(name, check(name, calls))
