"""The one table from error to gRPC status, metric label and details. Knows no request and no metric.

Details follow google.rpc: `BadRequest` names field, value and limit, `RetryInfo` the milliseconds to wait,
`ErrorInfo` why a stream must not be repeated silently. They travel in the trailers (`grpc-status-details-bin`).
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from ottserve.service.callers import Unauthenticated
from ottserve.workers import api

DOMAIN = "ottserve.v1"
STREAM_BROKEN = "STREAM_BROKEN"


@dataclass(frozen=True, slots=True)
class Row:
    """What a caller and the metrics are told of one kind of error."""

    code: grpc.StatusCode
    label: str


TABLE: dict[type[api.OttserveError], Row] = {
    api.InvalidField: Row(grpc.StatusCode.INVALID_ARGUMENT, "invalid"),
    api.NotImplementedField: Row(grpc.StatusCode.INVALID_ARGUMENT, "not_served"),
    Unauthenticated: Row(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated"),
    api.QueueFull: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full"),
    api.Unavailable: Row(grpc.StatusCode.UNAVAILABLE, "unavailable"),
    api.StreamBroken: Row(grpc.StatusCode.UNAVAILABLE, "stream_broken"),
    api.DuplicateRequest: Row(grpc.StatusCode.ALREADY_EXISTS, "duplicate"),
    api.UnknownModel: Row(grpc.StatusCode.NOT_FOUND, "unknown_model"),
    api.DeadlineExceeded: Row(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
    api.Internal: Row(grpc.StatusCode.INTERNAL, "internal"),
}

OK = "ok"
ABORTED = "aborted"
CANCELLED = "cancelled"
OUTCOMES = frozenset({OK, ABORTED, CANCELLED, *(row.label for row in TABLE.values())})


def as_ottserve_error(error: Exception, request_id: str) -> api.OttserveError:
    """The error itself if it may be told; anything else becomes `Internal`, whose id leads to the log."""
    if isinstance(error, api.Internal):
        return api.Internal(f"{error.message} (request {request_id})", error.reason)
    if isinstance(error, api.OttserveError) and type(error) in TABLE:
        return error
    return api.Internal(f"internal error in request {request_id}", reason=type(error).__name__)


def details_of(error: api.OttserveError) -> list[Message]:
    """What a program can act on, beside the message for people."""
    match error:
        case api.InvalidField():
            description = f"{error.limit}, got {error.value}"
            violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
            return [error_details_pb2.BadRequest(field_violations=[violation])]
        case api.QueueFull() | api.Unavailable():
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(error.retry_after_ms)
            return [retry]
        case api.StreamBroken():
            return [error_details_pb2.ErrorInfo(reason=STREAM_BROKEN, domain=DOMAIN)]
        case _:
            return []


def status_of(error: api.OttserveError) -> status_pb2.Status:
    """The status with its details. Raises KeyError for a kind the table lacks; `as_ottserve_error` leaves none."""
    row = TABLE[type(error)]
    status = status_pb2.Status(code=code_pb2.Code.Value(row.code.name), message=error.message)
    for detail in details_of(error):
        status.details.add().Pack(detail)
    return status
