"""What every test gets: a CPU, full-precision products, warnings as errors, and the long checks kept apart.

Three speeds. Unmarked tests are fast and run in `make check`. `ci` tests take more than a few seconds and run in
`make test`. `slow("name", covers=(...))` tests run only under `make test-slow-name`; they are deselected, not skipped.
"""

from __future__ import annotations

import os
import sys

# Before any import of jax. A GPU is used only when asked for: JAX_PLATFORMS=cuda,cpu pytest -m gpu.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Tiny programs are compiled far more often than they run: half the suite's time was LLVM's optimiser. The product, the
# demo and the slow checks run optimised code.
if "--slow" not in " ".join(sys.argv):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")

import collections
import gc
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.process import QUICK

ROOT = Path(__file__).resolve().parent.parent
gc.set_threshold(50_000, 20, 20)  # a traced program is thousands of objects that live long: a fifth of the time else


def _quick_compiler() -> None:
    """libtpu refuses flags that it does not know: they stand in the environment only while the CPU back end, which
    takes what it finds, is made."""
    if "--slow" in " ".join(sys.argv) or os.environ["JAX_PLATFORMS"] != "cpu":
        return
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip())
        jax.devices()


_quick_compiler()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", metavar="NAME", help="run only the long check NAME (`?` lists them)")
    parser.addoption("--fast-only", metavar="PATH", action="append", default=[], help="leaves out ci tests there")
    parser.addoption("--slow-result", metavar="FILE", help="where --slow writes its result (JSON)")


def _slow_name(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("slow")
    if mark is None:
        return None
    if len(mark.args) != 1 or not isinstance(mark.args[0], str):
        raise pytest.UsageError(f'{item.nodeid}: expected slow("name", covers=("path", ...)), found slow{mark.args}')
    return mark.args[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--slow")
    names = {item: _slow_name(item) for item in items}
    if wanted == "?":
        known = sorted({name for name in names.values() if name})
        print("\nlong checks: " + (", ".join(known) or "none"))
        items[:] = []
        return
    if wanted and wanted not in names.values():
        known = sorted({name for name in names.values() if name})
        raise pytest.UsageError(
            f"no test is marked slow({wanted!r}); expected one of: {', '.join(known) or 'none yet'}"
        )
    keep = [item for item in items if names[item] == wanted] if wanted else [i for i in items if names[i] is None]
    fast_only = [ROOT / path for path in config.getoption("--fast-only")]
    keep = [i for i in keep if not (i.get_closest_marker("ci") and any(i.path.is_relative_to(p) for p in fast_only))]
    dropped = [item for item in items if item not in set(keep)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = keep
    if "gpu" not in (config.getoption("-m") or ""):
        no_gpu = pytest.mark.skip(
            reason="needs a GPU; run with JAX_PLATFORMS=cuda,cpu and -m gpu on a machine that has one"
        )
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(no_gpu)
    _long_files_first(items)


def _long_files_first(items: list[pytest.Item]) -> None:
    """Files go to the workers whole and in this order: a long one that begins last keeps one worker alone at work."""
    weights: collections.Counter[Path] = collections.Counter()
    for item in items:
        long = item.get_closest_marker("timeout") is not None
        weights[item.path] += 20 if long else 5 if item.get_closest_marker("ci") else 0
    items.sort(key=lambda item: -weights[item.path])


class _SlowReport:
    """Collects what a long check recorded with `record_property("seed", 3)` or any other name and number."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.start = time.time()
        self.covers: list[str] = []
        self.tests: list[dict[str, Any]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            mark = item.get_closest_marker("slow")
            self.covers += list(mark.kwargs.get("covers", ())) if mark else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests.append({
                "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2),
                "recorded": [list(pair) for pair in report.user_properties],
            })  # fmt: skip

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        recorded = [pair for test in self.tests for pair in test["recorded"]]
        result = {
            "name": self.name,
            "outcome": "passed" if exitstatus == 0 else "failed",
            "commit": os.environ.get("SOURCE_COMMIT") or _git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain")),
            "covers": sorted(set(self.covers)) or ["jaxspec", "pallas_kernels"],
            "seeds": [value for key, value in recorded if key == "seed"],
            "counts": {key: value for key, value in recorded if key != "seed"},
            "seconds": round(time.time() - self.start, 1),
            "python": platform.python_version(),
            "jax": metadata.version("jax"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "tests": self.tests,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def pytest_configure(config: pytest.Config) -> None:
    name, path = config.getoption("--slow"), config.getoption("--slow-result")
    if name and name != "?" and path:
        config.pluginmanager.register(_SlowReport(name, Path(path)), "slow-report")


@pytest.fixture
def root() -> Path:
    """The checkout's folder."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JAX's compilation cache, for this session alone: many tests, few different programs. A folder for each worker:
    JAX locks a shared one only if it also looks for what to evict, through all of it, at every new program."""
    import jax

    folder = tmp_path_factory.mktemp("programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
