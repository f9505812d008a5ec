"""Run in a process of its own: the smallest plain and the largest drafting round of a config, compiled for a TPU.

    python -m tests.serving.compile_rounds TOPOLOGY CONFIG [section.key=value …] [-- CONFIG …]

Prints a line a program. A grammar in the config adds the halves of both rounds.
"""

from __future__ import annotations

import itertools
import sys

from jaxspec.platform import quiet_platform

quiet_platform()

from jaxspec.config import ServeConfig, load_config  # noqa: E402
from jaxspec.parallel.mesh import CHIPS, tpu_devices  # noqa: E402
from jaxspec.serving.plan import estimates, planned_engine  # noqa: E402


def main(topology: str, *words: str) -> None:
    devices = tpu_devices(topology)
    for last, given in itertools.groupby(words, lambda word: word == "--"):
        if last:
            continue
        path, *overrides = given
        engine = planned_engine(load_config(ServeConfig, path, overrides), devices)
        shapes = engine.executables.shapes
        wanted = {min(shapes), max(shapes, key=lambda shape: (shape.drafting, shape.rows, shape.prefill))}
        engine.executables.shapes[:] = sorted(wanted)
        for one in estimates(engine, CHIPS[topology.partition(":")[0]]):
            assert not one.error and one.seconds > 0 and one.total > 0, one
            print("COMPILED", topology, path.rpartition("/")[2], *overrides, one.name, f"{one.total} bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
