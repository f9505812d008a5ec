"""`jaxspec conformance DIR`: runs golden cases (tensors of the public reference implementations) against this code."""

from __future__ import annotations

from jaxspec.evaluation.conformance.main import add_arguments, main

__all__ = ["add_arguments", "main"]
