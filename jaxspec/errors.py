"""The typed errors of jaxspec.

Every error that a user can cause is one of these. Its message names the field, what was found, what was expected and
what to do, so that one line on a terminal is enough to go on. `problem` builds such a line.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HubError",
    "InvariantError",
    "JaxspecError",
    "RequestError",
    "ResumeError",
    "ServerError",
    "problem",
]


class JaxspecError(Exception):
    """Base of every error that jaxspec raises on purpose."""


class ConfigError(JaxspecError):
    """A configuration (YAML, command line or a model's config.json) is unreadable, unknown or contradicts itself."""


class CheckpointError(JaxspecError):
    """A checkpoint is missing, truncated, incomplete, has left-over tensors or tensors of the wrong shape."""


class HubError(JaxspecError):
    """A model name could not be resolved to files: absent, gated, offline or interrupted."""


class DataError(JaxspecError):
    """Training or evaluation data is missing, empty, malformed or does not belong to this target."""


class RequestError(JaxspecError):
    """A generation request cannot be served: bad sampling parameters, a prompt that is too long, no free slot."""


class InvariantError(JaxspecError):
    """A debug build found a fault in the program itself: an index out of range, or a broken promise of the loop."""


class ResumeError(JaxspecError):
    """A run directory exists but the run cannot go on from it."""


class ServerError(JaxspecError):
    """The server cannot start, or a client cannot reach it."""


def problem(field: str, found: object = None, expected: str | None = None, action: str | None = None) -> str:
    """One line that says where, what was found, what was expected and what to do; parts left as None are left out."""
    parts = [
        field if found is None else f"{field}: found {found!r}" if not isinstance(found, str) else f"{field}: {found}"
    ]
    if expected:
        parts.append(f"expected {expected}")
    line = ", ".join(parts)
    return f"{line}; {action}" if action else line
