"""Errors in OpenAI's shape. What a kind of error is, the gateway's one table says; here is what HTTP calls it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import grpc

from ottserve.service import errors
from ottserve.service.http.translate import field_name
from ottserve.workers import api

TOO_LARGE = 413


@dataclass(frozen=True, slots=True)
class Words:
    """How OpenAI's interface speaks of a gRPC status."""

    status: int
    type: str
    code: str


WORDS: dict[grpc.StatusCode, Words] = {
    grpc.StatusCode.INVALID_ARGUMENT: Words(400, "invalid_request_error", "invalid_value"),
    grpc.StatusCode.UNAUTHENTICATED: Words(401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.NOT_FOUND: Words(404, "invalid_request_error", "model_not_found"),
    grpc.StatusCode.ALREADY_EXISTS: Words(409, "invalid_request_error", "duplicate_request_id"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: Words(429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.INTERNAL: Words(500, "server_error", "internal_error"),
    grpc.StatusCode.UNAVAILABLE: Words(503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: Words(504, "timeout_error", "deadline_exceeded"),
}
CODES: dict[type[api.OttserveError], str] = {
    api.NotImplementedField: "unsupported_parameter",
    api.StreamBroken: "stream_broken",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, the object of the body, and headers."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def refusal_of(error: api.OttserveError) -> Refusal:
    """What a caller is told of an error of the table."""
    words = WORDS[errors.TABLE[type(error)].code]
    param, message = None, error.message
    if isinstance(error, api.InvalidField):
        param = field_name(error.field)
        message = f"{param}: {error.message.removeprefix(f'{error.field}: ')}"
    code = CODES.get(type(error), words.code)
    return Refusal(words.status, error_body(message, words.type, code, param), _retry(error))


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _retry(error: api.OttserveError) -> dict[str, str]:
    """Clients of OpenAI's repeat by themselves; what is not safe or of no use to repeat says so."""
    if isinstance(error, api.QueueFull | api.Unavailable):
        seconds = math.ceil(error.retry_after_ms / 1000)
        return {"retry-after-ms": str(error.retry_after_ms), "retry-after": str(seconds)}
    return {"x-should-retry": "false"}
