"""What a server says about itself (GetModelInfo, the start-up line) and what the worker's start-up hands over."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import jaxspec
from jaxspec.serving.grammar import GrammarCompiler
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.text import Codec

__all__ = ["FORMAT_VERSION", "Facts", "Loaded"]

FORMAT_VERSION = 1
_PACKAGES = ("jax", "jaxlib", "flax", "grpcio", "protobuf")


@dataclass(frozen=True)
class Facts:
    """What is being served. `max_context` counts prompt and answer together; `num_proposals` is 0 without a drafter."""

    target: str
    drafter: str
    method: str
    vocab_size: int
    max_context: int
    slots: int
    num_proposals: int = 0

    def to_proto(self) -> pb.ModelInfo:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        versions |= {"jaxspec": jaxspec.__version__, "python": platform.python_version()}
        return pb.ModelInfo(
            format_version=FORMAT_VERSION,
            target=self.target,
            drafter=self.drafter,
            method=self.method,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            slots=self.slots,
            num_proposals=self.num_proposals,
            versions=versions,
        )


@dataclass(frozen=True)
class Loaded:
    """The result of start-up: a warm engine, its tokenizer (None: only token ids are served), its facts, what compiles
    grammars (None: they are refused), and what a cost table of it is made for (None without a drafter)."""

    runner: Any
    codec: Codec | None
    facts: Facts
    grammars: GrammarCompiler | None = None
    made_for: dict[str, str] | None = None
