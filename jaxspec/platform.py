"""Which backend jax starts on, decided before jax is imported.

With libtpu installed on a machine without a TPU (a laptop, a build server, a GPU host) jax still tries the TPU first,
and libtpu writes a page of error lines before it gives up. `quiet_platform` looks for the hardware and, when there is
none, names the platforms that are left. It never takes a TPU or a GPU away and never overrules an explicit
JAX_PLATFORMS.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

__all__ = ["nvidia_present", "quiet_platform", "tpu_present"]

_GOOGLE_PCI_VENDOR = "0x1ae0"
_NVIDIA_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def _google_pci_devices() -> int:
    count = 0
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        try:
            count += Path(vendor).read_text().strip() == _GOOGLE_PCI_VENDOR and _is_accelerator(vendor)
        except OSError:  # a device that vanishes or hides its vendor is not one we can use
            continue
    return count


def _is_accelerator(vendor_file: str) -> bool:
    """Google's network card (class 0x02....) has the same vendor id as the TPU and is in every cloud machine."""
    pci_class = Path(vendor_file).with_name("class")
    return not (pci_class.exists() and pci_class.read_text().strip().startswith(("0x01", "0x02")))


def tpu_present() -> bool:
    """True when a TPU may be attached; in doubt (a device node that could be one) the answer is True."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or _google_pci_devices())


def nvidia_present() -> bool:
    """True when an NVIDIA driver node is visible, the same test that jax makes."""
    return any(os.path.exists(node) for node in _NVIDIA_NODES)


def _plugins() -> set[str]:
    """Names of the jax backend plugins that are installed (namespace package and entry points)."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")}
    spec = importlib.util.find_spec("jax_plugins")
    if spec is not None and spec.submodule_search_locations:
        names.update(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return names


def quiet_platform() -> str | None:
    """Chooses the platforms when libtpu is installed and there is no TPU; returns what it set, or None.

    Call it before jax is imported. Nothing happens when JAX_PLATFORMS is set (also to the empty string), when libtpu is
    absent, when a TPU may be there, or when a plugin is installed that this function does not know.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors reach us as exceptions; its log would print them again
    if "JAX_PLATFORMS" in os.environ or "JAX_FORCE_TPU_INIT" in os.environ:
        return None
    # TPU_LIBRARY_PATH is no choice of a platform: jax itself sets it, and child processes inherit it.
    has_libtpu = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
    if not has_libtpu or tpu_present():
        return None
    plugins = _plugins()
    if any("cuda" not in name for name in plugins):
        return None
    platforms = "cuda,cpu" if plugins and nvidia_present() else "cpu"
    os.environ["JAX_PLATFORMS"] = platforms
    # These keep libtpu silent when it is loaded on purpose, to compile for a TPU that is not here (--plan).
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    if "jax" in sys.modules:
        import jax

        if jax.config.jax_platforms is None:
            jax.config.update("jax_platforms", platforms)
    return platforms
