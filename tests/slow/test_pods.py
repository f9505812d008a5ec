"""`make test-slow-pods-v5e` (v5p, v6e): each config of `configs/pods/` compiled for its chips, without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.process import ROOT, run_python

COVERS = (
    "jaxspec/training", "jaxspec/drafters", "jaxspec/parallel", "jaxspec/models", "pallas_kernels", "configs/pods",
)  # fmt: skip
SECONDS = 300  # of one config's whole command, on two cores
SMALL = 1 << 14  # elements of a tensor that is not split

LEAVES = """
import json, sys
from pathlib import Path
from jaxspec.checkpoints.shapes import target_shape
from jaxspec.config import TrainConfig
from jaxspec.config.loading import load_config
from jaxspec.models.layers import flatten
from jaxspec.training.build import fresh_drafter

config = load_config(TrainConfig, Path(sys.argv[1]), sys.argv[2:])
target = target_shape(config.target.source, config.target.dtype, None)
drafter = fresh_drafter(config, target.config)
held = target.params if drafter.needs_teacher else target.model.truncated(target.params, drafter.taps)[1]
tables = {"embedding": target.embedding, "head": target.head}
said = lambda tree: [[list(x.shape), x.dtype.itemsize, x.dtype.kind] for x in flatten(tree).values()]
print(json.dumps({
    "target": said(held), "tables": said(tables), "tied": target.embedding is target.head,
    "drafter": said(drafter.abstract_params()), "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor,
}))
"""


def leaves(file: Path, *overrides: str) -> dict[str, Any]:
    """Shape, bytes of an element and kind of every tensor that a step holds."""
    done = run_python("-c", LEAVES, str(file), *overrides, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def share(tensors: list[Any], shards: int) -> Iterator[int]:
    """Bytes on a device of each: a matrix that the devices can share out by rows or columns is."""
    for shape, width, _ in tensors:
        count = math.prod(shape)
        split = len(shape) > 1 and count >= SMALL and any(size % shards == 0 for size in shape[-2:])
        yield count * width // (shards if split else 1)


def plan(file: Path, *overrides: str) -> tuple[int, str, dict[str, float]]:
    """Exit code, output, and GiB: target, drafter, moments, arguments, total, hbm."""
    done = run_python("train.py", "--config", str(file), "--plan", *overrides, timeout=900, JAX_PLATFORMS="cpu")
    assert done.returncode in (0, 1), done.stderr[-2000:]
    text, found = done.stdout, {}
    for name, before in (
        ("target", "target and tables "), ("drafter", "drafter "), ("arguments", "arguments "), ("total", "total "),
        ("moments", "moments on a device: "), ("hbm", " GiB of "), ("seconds", "compiled in "),
    ):  # fmt: skip
        assert before in text, text
        found[name] = float(text.split(before)[1].split()[0])
    return done.returncode, text, found


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param(chip, marks=pytest.mark.slow(f"pods-{chip}", covers=COVERS))
        for chip in ("v5e", "v5p", "v6e")
    ],
)  # fmt: skip
def test_every_pod_config_fits_its_chips(chip: str, record_property: Any) -> None:
    files = sorted((ROOT / "configs" / "pods").glob(f"*-{chip}-*.yaml"))
    assert len(files) == 8
    for file in files:
        code, text, found = plan(file)
        record_property(file.stem, found)
        assert code == 0 and found["total"] <= found["hbm"], text
        assert found["seconds"] < SECONDS
        held = leaves(file)
        assert held["tensor"] == 1
        gib = lambda name, held=held: sum(share(held[name], held["fsdp"])) / 2**30  # noqa: E731
        moving = sum(share([one for one in held["drafter"] if one[2] not in "ib"], held["fsdp"])) / 2**30
        assert found["drafter"] == pytest.approx(gib("drafter"), rel=0.01, abs=0.006)
        assert found["moments"] == pytest.approx(2 * moving, rel=0.01, abs=0.006)
        assert found["target"] == pytest.approx(gib("target") + gib("tables"), rel=0.01, abs=0.006)
        parts = gib("target") + gib("tables") + gib("drafter") + 2 * moving
        # an argument that a step gets twice lies on a device once; the batch is a few MB
        assert found["arguments"] <= 1.01 * parts + 0.05
        assert found["arguments"] >= 0.99 * (parts - gib("tables"))
    thinner = ["drafter.num_layers=3"] if "eagle" not in files[0].stem else []
    assert thinner, files[0]
    _, _, less = plan(files[0], *thinner)
    _, _, whole = plan(files[0])
    assert less["total"] < whole["total"] and less["arguments"] < whole["arguments"]
    record_property("three layers", less)
