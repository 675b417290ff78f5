"""What a call can end with: one class a status code, with the details that the server attached. Knows no retrying."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS = "grpc-status-details-bin"
STREAM_BROKEN = "STREAM_BROKEN"


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field that the server refused, with the value as given and the limit it broke."""

    field: str
    description: str


class ClientError(Exception):
    """Root of what a call raises.

    Attributes:
        code: the gRPC status code.
        fields: the fields that were refused, for `InvalidArgument`.
        retry_after_s: when the server asks to be tried again, or None.
    """

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode,
        fields: tuple[FieldProblem, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.fields = fields
        self.retry_after_s = retry_after_s


class InvalidArgument(ClientError):
    """The request can never be served as it is; `fields` tells why."""


class Unauthenticated(ClientError):
    """No token, or a wrong one."""


class NotFound(ClientError):
    """No such model."""


class AlreadyExists(ClientError):
    """A live request has this id."""


class ResourceExhausted(ClientError):
    """The queue is full; `retry_after_s` says when to try again."""


class Unavailable(ClientError):
    """Nobody answers, or the server is loading or draining. Safe to try again."""


class StreamBroken(ClientError):
    """The replica or the connection was lost after the first token; another try may give another answer."""


class DeadlineExceeded(ClientError):
    """The call took longer than its timeout."""


class Cancelled(ClientError):
    """The call was cancelled."""


class InternalError(ClientError):
    """The server's fault, or a status that has no class of its own."""


BY_CODE: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_rpc_error(error: grpc.RpcError) -> ClientError:
    """The typed error of a failed call, sync or asyncio."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError(str(error), grpc.StatusCode.UNKNOWN)
    details = _details(error.trailing_metadata() or ())
    kind = BY_CODE.get(error.code(), InternalError)
    if details.reason == STREAM_BROKEN:
        kind = StreamBroken
    return kind(error.details() or "", error.code(), details.fields, details.retry_after_s)


def from_broken_stream(error: grpc.RpcError) -> ClientError:
    """The typed error of a stream that failed after its first message: a lost connection is no longer safe to retry."""
    typed = from_rpc_error(error)
    if isinstance(typed, Unavailable):
        return StreamBroken(typed.message, typed.code)
    return typed


@dataclass(slots=True)
class _Details:
    fields: tuple[FieldProblem, ...] = ()
    retry_after_s: float | None = None
    reason: str = ""


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> _Details:
    found = _Details()
    for packed in (entry for key, value in trailers if key == STATUS_DETAILS for entry in _status(value).details):
        bad, retry, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
        if packed.Unpack(bad):
            found.fields = tuple(FieldProblem(v.field, v.description) for v in bad.field_violations)
        elif packed.Unpack(retry):
            found.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif packed.Unpack(info):
            found.reason = info.reason
    return found


def _status(value: str | bytes) -> status_pb2.Status:
    return status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
