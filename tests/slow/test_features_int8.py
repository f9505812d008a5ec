"""`make test-slow-features-int8`: what eight-bit features cost on a real target, as error and as served tau."""

from __future__ import annotations

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafting import DraftOptions, open_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.training.data import load_examples
from jaxspec.training.featurestore.codec import reconstruction_error
from tests.slow import smoke
from tests.slow.identical import Record
from tests.slow.test_smoke import taus

TAPS = (2, 10, 18)
COVERS = ("jaxspec/training/featurestore", "jaxspec/training/features.py")


@pytest.mark.slow("features-int8", covers=COVERS)
def test_the_error_on_the_taps_of_smollm2(record_property: Record) -> None:
    target = load_target("smollm2", "float32")
    example = load_examples(smoke.ROOT / "demo" / "data" / "smollm2_answers.npz", max_length=224)[0]
    ids = jnp.asarray(example["input_ids"])[None]
    features = target.model.forward_sequences(target.params, ids, TAPS).features
    record_property("largest_of_row_0", round(float(jnp.abs(features[:, 0]).max())))
    record_property("largest_of_the_rest", round(float(jnp.abs(features[:, 1:]).max())))
    cost = reconstruction_error(features)
    for name, value in cost.items():
        record_property(f"error_{name}", round(value, 6))
    rows = np.asarray(features, np.float32)[0]
    whole = np.abs(rows).max(axis=1, keepdims=True) / 127  # one scale a row, for comparison
    error = np.rint(rows / whole) * whole - rows
    ruined = float(np.linalg.norm(error[1:]) / np.linalg.norm(rows[1:]))
    record_property("error_relative_with_one_scale_a_row", round(ruined, 6))
    # half a step of a group's largest value is 1/254; a group's largest is a few times its root mean square
    assert cost["relative"] < 0.012 < ruined / 3 and cost["first"] < 2**-8


@pytest.mark.slow("features-int8", covers=COVERS)
@pytest.mark.timeout(1500)
def test_the_smoke_run_from_eight_bits_serves_as_well(record_property: Record) -> None:
    """The same 40 steps from float32 files (the online run) and from int8 ones; tau by the serving round."""
    target, found = load_target("smollm2", "float32"), {}
    for storage in ("float32", "int8"):
        place = smoke.ROOT / "out" / "features-int8" / storage
        keys = [
            "features.mode=offline", f"features.path={place / 'files'}", f"features.storage={storage}",
            f"run.directory={place / 'run'}", f"run.export={place / 'drafter'}", "run.fresh=true", "run.log_every=1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "jaxspec", "capture", "--config", "configs/smollm2/dflash.yaml", "--json"]
        done = subprocess.run(
            [*command, *smoke.overrides("dflash"), *keys], cwd=smoke.ROOT, check=True, capture_output=True, text=True
        )
        account = json.loads(done.stdout.splitlines()[-1])
        smoke.train("dflash", *keys)
        lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
        record_property(f"{storage}_bytes", account["bytes"])
        record_property(f"{storage}_last_loss", round(json.loads(lines[-1])["loss"], 4))
        draft = open_drafter(str(place / "drafter"), target, DraftOptions())[0]
        found[storage] = taus(target, draft, None, draft.params)[0]
        record_property(f"{storage}_tau", round(found[storage], 4))
    assert found["int8"] > 1.0 and abs(found["int8"] - found["float32"]) < 0.05
