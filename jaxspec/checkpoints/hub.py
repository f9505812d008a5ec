"""What a user calls a model -> files on this machine: a folder, a GGUF file, `smollm2`, or `org/name[@revision]` of a
hub.

A local path always wins. `org/name` goes through huggingface_hub, restricted to JSON, safetensors and tokenizer files:
pickle and code are never fetched. HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_HOME are read at each call (the
library itself reads them once, when it is imported).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError, HubError

__all__ = ["ALLOWED", "Located", "locate", "resolve"]

ALLOWED = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja")
_SUBFOLDERS = "*/*"  # other formats of the same weights (onnx/, original/) live there
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ALIASES = ("smollm2",)
_FORMS = "a folder, a .gguf file, 'smollm2' or org/name[@revision]"
_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


@dataclass(frozen=True)
class Located:
    """Where a model lies. `name` is for people and reports; `revision` is the hub's commit, None for what has none."""

    name: str
    path: Path
    revision: str | None = None


def resolve(source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The local folder or GGUF file of a model. Raises HubError or CheckpointError (see `locate`)."""
    return locate(source, cache_dir).path


def locate(
    source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, field: str = "model"
) -> Located:
    """Find a model, fetching it when it is a hub name.

    Args:
      source: a folder, a .gguf file, the alias `smollm2` (write `./smollm2` for a folder of that name) or
        `org/name[@revision]`.
      cache_dir: where converted models are kept; None for ~/.cache/jaxspec.
      field: the key that named the source; it heads an error.

    Raises:
      CheckpointError: it looks like a path and nothing is there.
      HubError: the name is malformed, or the repository or revision is absent, gated, or out of reach and not in the
        cache.
    """
    try:
        return _locate(source, cache_dir)
    except (HubError, CheckpointError) as error:
        text = str(error).removeprefix("model: ")
        raise type(error)(f"{field}: {text}") from error


def _locate(source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None) -> Located:
    text = os.fspath(source)
    if not text.strip():
        raise HubError(f"model: found an empty name, expected {_FORMS}")
    if text in _ALIASES:
        from jaxspec.checkpoints.smollm2 import smollm2

        return Located(text, smollm2(cache_dir))
    path = Path(text).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError) as error:  # a name too long for the file system, or one with a NUL
        raise HubError(f"model: found an impossible name ({error}), expected {_FORMS}") from None
    if there:
        return _local(path)
    if _looks_like_path(text, path):
        what = "GGUF file" if path.suffix == ".gguf" else "folder"
        raise CheckpointError(f"{text}: found no such {what}, expected {_FORMS}")
    name, _, revision = text.partition("@")
    if not _NAME.fullmatch(name) or (("@" in text) and not revision) or "--" in name or ".." in name:
        raise HubError(f"model: found {text!r}, which is no local path and no hub name; expected {_FORMS}")
    return Located(name, *_fetch(name, revision or None))


def _local(path: Path) -> Located:
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path}: found a file, expected {_FORMS} (for weights in a folder, name the folder)")
    return Located(path.stem if path.is_file() else path.resolve().name, path)


def _looks_like_path(text: str, path: Path) -> bool:
    """Paths that do not exist must not become a lookup on the hub: `./x`, `a/b/c`, `x.gguf`, `out/x` where `out` is a
    folder here.
    """
    first = text.replace("\\", "/").split("/")[0]
    marked = text.startswith((".", "~", "/")) or path.is_absolute() or "\\" in text or text.endswith("/")
    deep = text.partition("@")[0].count("/") > 1
    return marked or deep or path.suffix in (".gguf", ".safetensors", ".json") or ("/" in text and Path(first).exists())


def _fetch(name: str, revision: str | None) -> tuple[Path, str | None]:
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=_hub_cache(),
                endpoint=os.environ.get("HF_ENDPOINT") or None,
                local_files_only=_offline(),
                allow_patterns=list(ALLOWED),
                ignore_patterns=[_SUBFOLDERS],
            )
        )
    except Exception as error:
        message = _explain(name, revision, error)
        if message is None:
            raise
        raise HubError(message) from error
    if not any(folder.glob("*.safetensors")):
        raise HubError(
            f"{name}: found no *.safetensors in the repository, expected safetensors weights (pickle weights are not "
            "read)"
        )
    return folder, folder.name if folder.parent.name == "snapshots" else revision


def _explain(name: str, revision: str | None, error: Exception) -> str | None:
    """What a failed download means and what to do; None for an error that is not about reaching the hub."""
    from huggingface_hub import errors

    hub = os.environ.get("HF_ENDPOINT") or "the Hugging Face hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name}: the repository is gated (HTTP {status}); accept its terms on its page at {hub}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name}: found no such repository at {hub} (HTTP {status}) and no local folder of that name; "
            "check the spelling, or log in with `hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name}: found no revision {revision!r} at {hub}, expected a branch, tag or commit of this repository; "
            "leave @revision out for its main branch"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        wanted = f"{name}@{revision}" if revision else name
        if _offline() or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            return (
                f"{wanted}: not (completely) in the local cache, and HF_HUB_OFFLINE forbids fetching it; unset "
                "HF_HUB_OFFLINE once, or pass a local folder"
            )
        return (
            f"{wanted}: {hub} cannot be reached ({_root(error)}) and the model is not in the local cache; check the "
            "network or HF_ENDPOINT, or pass a local folder"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"{name}: {hub} answered HTTP {status}; try again later or pass a local folder"
    if isinstance(error, errors.HFValidationError):
        return f"model: found {name!r}, expected {_FORMS}"
    if type(error).__module__.split(".")[0] in _TRANSPORT or isinstance(error, (ConnectionError, TimeoutError)):
        return (
            f"{name}: the download from {hub} broke off ({_root(error)}); start again, it resumes, or pass a local "
            "folder"
        )
    if isinstance(error, OSError):
        return (
            f"{name}: the download cannot be stored ({error}); check the room and rights of the hub's cache "
            "(HF_HUB_CACHE)"
        )
    return None


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"


def _offline() -> bool:
    return any(
        os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE")
        for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def _hub_cache() -> Any:
    if os.environ.get("HF_HUB_CACHE"):
        return os.environ["HF_HUB_CACHE"]
    return str(Path(os.environ["HF_HOME"]).expanduser() / "hub") if os.environ.get("HF_HOME") else None
