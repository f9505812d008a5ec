"""jaxspec trains and serves speculative-decoding drafters in JAX.

    import jaxspec

    engine = jaxspec.load("path-or-org/name", drafter="path-or-org/drafter")
    print(engine.generate("Why is the sky blue?").text)

Axis letters, one meaning each in every signature and docstring:

    B  batch (sequences)             R  requests or slots decoded together
    S  sequence positions            M  rows of one ragged target forward
    T  taps (T * H = feature width)  m  proposals of a round
    N  anchors, or draft blocks      P  pages of a request
    V  vocabulary                    H  hidden size
    D  head dimension                L  layers
    K  draft budget of a round       C  prefill rows of a round

Importing the package does not import jax: `jaxspec --version` and the config checks stay instant, and
`jaxspec.platform.quiet_platform` can choose the backend first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxspec.api import Engine, load

_LAZY = ("load", "Engine")
__all__ = ["Engine", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        from jaxspec.platform import quiet_platform

        quiet_platform()
        return getattr(importlib.import_module("jaxspec.api"), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
