"""Stored features without a target: an encoder that computes its numbers from the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.training.data import Examples, load_examples
from jaxspec.training.featurestore.codec import Layout
from tests.training import world

WIDTH, HIDDEN = 32, 16


class TokenEncoder:
    """Stands for `capture.Encoder`: feature c of token t in row i is t + i + c / 64. `fails` names an example at which
    it raises."""

    def __init__(self, layout: Layout, rows: int = 2, fails: int | None = None):
        self.layout, self.rows, self.fails, self.calls = layout, rows, fails, 0

    def records(self, examples):
        self.calls += 1
        for example in examples:
            if example["example_id"] == self.fails:
                raise RuntimeError("the machine went away")
            yield self.layout.encode(example["example_id"], arrays(example, self.layout)), 0.0, 0.0


def arrays(example: dict[str, Any], layout: Layout) -> dict[str, np.ndarray]:
    ids = example["input_ids"]
    rows = (ids[:, None] + np.arange(len(ids))[:, None]).astype(np.float32)
    parts = {"input_ids": ids, "loss_mask": example["loss_mask"], "features": rows + np.arange(layout.width) / 64}
    return parts | ({"teacher": -rows + np.arange(layout.teacher) / 64} if layout.teacher else {})


def about(examples: Examples, layout: Layout, **changes: Any) -> dict[str, Any]:
    """A manifest's description of these examples."""
    return {
        "kind": "jaxspec features", "version": 1, "target": "tiny", "revision": "r1", "target_dtype": "float32",
        "taps": [0, 1], "order": "o", "norm": "n", "teacher": bool(layout.teacher), "hidden_size": HIDDEN,
        "width": layout.width, "storage": layout.storage, "dtype": str(layout.dtype), "vocabulary": None,
        "template": "none", "template_sha256": None, "data": examples.content_hash(), "examples": len(examples),
        "tokens": int(examples.offsets[-1]), "sequence_length": 24, **changes,
    }  # fmt: skip


def examples(folder: Path, count: int = 7) -> Examples:
    return load_examples(world.write_data(folder / "data.npz", count=count))
