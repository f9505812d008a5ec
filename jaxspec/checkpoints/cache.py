"""Where converted models are kept: `~/.cache/jaxspec` (or under XDG_CACHE_HOME) unless a folder is given, and one
maker at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from jaxspec.errors import CheckpointError

__all__ = ["cache_root", "compilation_cache", "converted_gguf", "made_once"]

# Part of every cached folder's name: raise it when the conversion changes, and old copies are left alone and no longer
# used.
CONVERSION = 1
_WAIT_SECONDS = 900.0  # a 10 GB model on a slow disk converts within this


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of everything that jaxspec may rebuild."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def compilation_cache() -> Path:
    """Where `serve` keeps its executables between starts unless its config names a folder."""
    return cache_root() / "xla"


def made_once(directory: Path, make: Callable[[Path], object]) -> Path:
    """`directory`, made by `make(directory)` if it is not there; a second process waits for the first one's result."""
    import filelock

    if (directory / "config.json").is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(directory.parent / f".{directory.name}.lock", timeout=_WAIT_SECONDS):
            if not (directory / "config.json").is_file():
                make(directory)
    except filelock.Timeout:
        raise CheckpointError(
            f"{directory}: found another process converting it for {_WAIT_SECONDS:.0f} s, expected it to finish; stop "
            "that process and start again"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written ({error.strerror or error}), expected a writable cache; set "
            "XDG_CACHE_HOME to a place with room, or pass another cache_dir"
        ) from error
    return directory


def converted_gguf(path: Path, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The Hugging Face folder made from a GGUF file, converted on first use."""
    from jaxspec.checkpoints.gguf import convert_gguf

    name = f"{path.stem}-{_sample_hash(path)}-v{CONVERSION}"
    return made_once(cache_root(cache_dir) / "targets" / name, lambda directory: convert_gguf(path, directory))


def _sample_hash(path: Path) -> str:
    """Tells GGUF files apart without reading gigabytes: their size and a megabyte at the beginning, middle and end."""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - (1 << 20))):
                file.seek(offset)
                digest.update(file.read(1 << 20))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}), expected a GGUF file") from error
    return digest.hexdigest()[:12]
