"""Runs pieces of the project in another process: the command line, or code that needs several devices."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# XLA's older CPU emitters and one LLVM module a program compile in less than half the time. Newer versions have only
# the other emitters, and libtpu refuses flags that it does not know: not for processes that compile for a TPU.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if metadata.version("jaxlib") >= "0.11":
    QUICK = ""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with the checkout importable; None removes a variable."""
    result = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def run_python(
    *arguments: str, cwd: Path = ROOT, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """`python arguments...`; output captured, no check of the exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )


def run_on_devices(code: str, devices: int, timeout: float = 240) -> str:
    """Runs `code` on that many faked CPU devices; returns its stdout, AssertionError with its stderr on failure."""
    done = run_python(
        "-c",
        textwrap.dedent(code),
        timeout=timeout,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices} {QUICK}",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
