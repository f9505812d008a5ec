"""How a request can fail, without naming gRPC: worker and admission raise these, the service makes a status of them."""

from __future__ import annotations

import enum
from typing import Any

from jaxspec.errors import JaxspecError, problem

__all__ = ["Failure", "Status"]


class Status(enum.Enum):
    """The names are those of the gRPC status codes."""

    INVALID_ARGUMENT = "the request is wrong and would fail again"
    RESOURCE_EXHAUSTED = "the queue is full, or the deadline too near; try again later"
    DEADLINE_EXCEEDED = "the deadline passed before the request began"
    UNAVAILABLE = "not serving (warming up, draining or failed); nothing was done, another server may take it"
    INTERNAL = "the server broke while it worked on this request"


class Failure(JaxspecError):
    """One request's end without an answer."""

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status = status
        self.message = message

    @classmethod
    def invalid(cls, field: str, *about: Any, **more: Any) -> Failure:
        """INVALID_ARGUMENT that names the field of the request; the arguments are those of `errors.problem`."""
        return cls(Status.INVALID_ARGUMENT, problem(field, *about, **more))
