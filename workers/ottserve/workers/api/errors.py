"""What can go wrong with a request, as a caller may be told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class OttserveError(Exception):
    """Root of the errors a caller may be told. `message` is fit for a caller: no path, no traceback."""

    message: str

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(kind: type[OttserveError], fields: dict[str, Any]) -> OttserveError:
    return kind(**fields)


@dataclass(eq=False)
class InvalidField(OttserveError):
    """A request that can never be served. Names the field, the value as given, and the limit it broke."""

    field: str
    value: str
    limit: str


def invalid(field: str, value: object, limit: str) -> InvalidField:
    """An `InvalidField` whose message names all three; a long value is cut."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return InvalidField(f"{field}: {limit}, got {shown}", field, shown, limit)


@dataclass(eq=False)
class NotImplementedField(InvalidField):
    """A field of the contract that this version does not serve yet. Refused, never ignored."""


@dataclass(eq=False)
class QueueFull(OttserveError):
    """Too many requests or tokens are waiting. Nothing was queued."""

    retry_after_ms: int = 1000


@dataclass(eq=False)
class Unavailable(OttserveError):
    """No replica can take the request now; nothing was generated, so it is safe to try again."""

    retry_after_ms: int = 1000


@dataclass(eq=False)
class StreamBroken(OttserveError):
    """The replica was lost after the first token. A new try may give another answer."""


@dataclass(eq=False)
class DuplicateRequest(OttserveError):
    """A live request already has this id; that one goes on."""


@dataclass(eq=False)
class UnknownModel(OttserveError):
    """No replica serves the model asked for."""


@dataclass(eq=False)
class DeadlineExceeded(OttserveError):
    """The caller's deadline passed; its pages and slot are free again."""


STEP_REASONS = ("step_failed", "out_of_memory")
"""Why a step failed as a whole, which ended all that it was for."""

INTERNAL_REASONS = (
    *STEP_REASONS,
    "non_finite_logits",
    "output_failed",
    "form_failed",
    "engine_failed",
)
"""What is known to go wrong in a replica."""


@dataclass(eq=False)
class Internal(OttserveError):
    """Our fault. `reason` is a short label for metrics and logs: one of `INTERNAL_REASONS`, or the name of a class."""

    reason: str = "unknown"
