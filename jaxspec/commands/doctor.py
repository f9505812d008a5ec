"""`jaxspec doctor`: what this machine has, and what jaxspec would choose on it."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxspec import __version__
from jaxspec.platform import nvidia_present, tpu_present

_CORE = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "grpcio",
    "protobuf",
    "pydantic",
    "numpy",
    "ml_dtypes",
)
_OPTIONAL = {
    "array-record": "ArrayRecord feature shards (no wheel for Windows)",
    "libtpu": "TPUs, and compiling for one that is not here",
    "jax-cuda13-plugin": "NVIDIA GPUs, CUDA 13",
    "jax-cuda12-plugin": "NVIDIA GPUs, CUDA 12",
    "tensorboardX": "TensorBoard events of a training run",
    "tensorboard": "looking at them",
    "pyarrow": "Parquet files of conversations",
    "tokamax": "GPU and TPU kernels",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of jaxspec, Python and the packages it stands on; None for one that is missing."""
    return {"jaxspec": __version__, "python": platform.python_version(), **{name: _version(name) for name in _CORE}}


def collect() -> dict[str, Any]:
    """The whole report as plain data. Starts jax."""
    return {
        "versions": versions(),
        "optional": {name: {"version": _version(name), "for": use} for name, use in _OPTIONAL.items()},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "tpu_visible": tpu_present(),
            "nvidia_visible": nvidia_present(),
        },
        "jax": _jax(),
        "caches": _caches(),
        "kernels": _kernels(),
    }


def _jax() -> dict[str, Any]:
    import jax

    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # this report must come out where no backend starts, most of all
        reason = next(iter(str(error).splitlines()), "the platform that was asked for is not there")
        return {"JAX_PLATFORMS": platforms, "backend": None, "devices": [], "error": reason}
    return {
        "JAX_PLATFORMS": platforms,
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [{"id": device.id, "kind": device.device_kind, **_memory(device)} for device in devices],
    }


def _memory(device: Any) -> dict[str, int]:
    stats = device.memory_stats() or {}
    return {"bytes_limit": stats["bytes_limit"]} if "bytes_limit" in stats else {}


def _caches() -> dict[str, Any]:
    import jax

    from jaxspec.checkpoints.cache import cache_root, compilation_cache

    targets = cache_root() / "targets"
    hub = importlib.import_module("huggingface_hub.constants")
    return {
        "compilation": {"process": jax.config.jax_compilation_cache_dir, "serve": str(compilation_cache())},
        "targets": {"folder": str(targets), "holds": _folders(targets)},
        "hub": {"folder": hub.HF_HUB_CACHE, "endpoint": hub.ENDPOINT, "offline": bool(hub.HF_HUB_OFFLINE)},
    }


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _kernels() -> dict[str, dict[str, Any]]:
    """For each kernel: the implementations there are and the one that a call without a choice takes."""
    import pallas_kernels

    found: dict[str, dict[str, Any]] = {}
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        if not module.ispkg:
            continue
        api = importlib.import_module(f"pallas_kernels.{module.name}.api")
        choice = inspect.signature(getattr(api, module.name)).parameters.get("implementation")
        found[module.name] = {
            "chosen": (choice.default if choice else None) or "reference",
            "available": sorted(api.IMPLEMENTATIONS),
        }
    found["target_attention"] = {"chosen": "reference", "available": ["reference"]}
    return found


def _text(report: dict[str, Any]) -> str:
    jax, caches = report["jax"], report["caches"]
    lines = ["versions"]
    lines += [f"  {name:<18} {version or 'MISSING'}" for name, version in report["versions"].items()]
    lines.append("optional packages")
    for name, entry in report["optional"].items():
        lines.append(f"  {name:<18} {entry['version'] or 'absent':<18} {entry['for']}")
    machine = report["machine"]
    lines += ["machine", f"  {machine['system']}, {machine['cores']} cores"]
    seen = {True: "visible", False: "none visible"}
    lines.append(f"  TPU: {seen[machine['tpu_visible']]}; NVIDIA GPU: {seen[machine['nvidia_visible']]}")
    lines += ["jax", f"  backend {jax['backend']} (JAX_PLATFORMS={jax['JAX_PLATFORMS'] or ''})"]
    if "error" in jax:
        lines.append(f"  DOES NOT START: {jax['error']}")
    lines += [f"  device {device['id']}: {device['kind']}" for device in jax["devices"]]
    compilation = caches["compilation"]
    lines += [
        "caches",
        f"  compilation: serve {compilation['serve']} (unless its config names a folder); "
        f"other commands {compilation['process'] or 'none'}",
    ]
    targets, hub = caches["targets"], caches["hub"]
    lines.append(f"  converted targets: {targets['folder']} ({', '.join(targets['holds']) or 'empty'})")
    lines.append(f"  hub: {hub['folder']} ({hub['endpoint']}{', offline' if hub['offline'] else ''})")
    lines.append("kernels")
    for name, entry in report["kernels"].items():
        lines.append(f"  {name:<18} {entry['chosen']} (of {', '.join(entry['available'])})")
    return "\n".join(lines)
