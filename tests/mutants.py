"""One-line faults, each of which some test must notice: `make mutants`, or `python tests/mutants.py --only ID`.

Ends with `N passed, N failed`; exit 1 when a fault went unnoticed. They stand in
`tests/faults/`, a file a room; what the fields mean stands at `Mutant`.

    --only ID     one fault (repeatable; a part of the id is enough)
    --list        ids, files and reasons
    --jobs N      copies tested at a time (2)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults import (
    confidence,
    conformance,
    ddtree,
    decoding,
    dflash2,
    drafters,
    eagle,
    engine,
    fast,
    features,
    grammar,
    kernels,
    kernels_anchor,
    mistakes,
    pages,
    parallel,
    planner,
    profile,
    project,
    runs,
    sampling,
    scheduler,
    serving,
    training,
)
from tests.helpers.mutation import Mutant, main

MUTANTS: list[Mutant] = [
    *project.CONFIG,
    *project.CLI,
    *mistakes.MISTAKES,
    *drafters.MODELS,
    *drafters.DRAFTERS,
    *decoding.DECODING,
    *conformance.CONFORMANCE,
    *training.TRAINING,
    *runs.RUNS,
    *serving.SERVING,
    *ddtree.DDTREE,
    *dflash2.DFLASH2,
    *eagle.EAGLE,
    *kernels.KERNELS,
    *kernels_anchor.ANCHOR,
    *confidence.CONFIDENCE,
    *planner.PLANNER,
    *profile.PROFILE,
    *pages.PAGES,
    *sampling.SAMPLING,
    *grammar.GRAMMAR,
    *scheduler.SCHEDULER,
    *engine.ENGINE,
    *parallel.PARALLEL,
    *fast.FAST,
    *features.FEATURES,
]

if __name__ == "__main__":
    sys.exit(main(MUTANTS, __doc__.splitlines()[0]))
