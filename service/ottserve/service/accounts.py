"""What is told of every call when it ends, however it came: one count and one log line, without prompt text.

Knows no message and no way in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, format_trace_id

from ottserve.service import errors, tracing
from ottserve.service.metrics import GatewayMetrics
from ottserve.workers import api

log = structlog.get_logger(__name__)

ABORTED = api.FinishReason.ABORTED.value


@dataclass(slots=True)
class Call:
    """One call and what became of it. `facts` are more that its log line tells, never a prompt or an answer."""

    method: str
    request_id: str
    started_at: float
    outcome: str = errors.OK
    facts: dict[str, object] = field(default_factory=dict)
    span: Span = INVALID_SPAN

    @property
    def traceparent(self) -> str:
        """W3C trace context for those who work for this call; empty where nothing is traced."""
        return tracing.traceparent(self.span)

    def finished(self, reason: str, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """A generation of this call ended; `reason` is a value of `FinishReason`."""
        if reason == ABORTED:
            self.outcome = errors.ABORTED
        self.facts |= {
            "finish_reason": reason,
            "num_prompt_tokens": num_prompt_tokens,
            "num_completion_tokens": num_completion_tokens,
        }


class Accounts:
    """Begins and ends calls; each that begins has to end."""

    def __init__(self, metrics: GatewayMetrics, now: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._now = now

    def begin(self, method: str, request_id: str, headers: Mapping[str, str]) -> Call:
        """A call came in; of its headers (or metadata) only the trace context is read."""
        self._metrics.received(method)
        call = Call(method, request_id, self._now(), span=tracing.begin(method, headers))
        context = call.span.get_span_context()
        if context.is_valid:
            call.facts["trace_id"] = format_trace_id(context.trace_id)
        return call

    def refused(self, call: Call, error: Exception) -> api.OttserveError:
        """A call failed. Returns what its caller may be told; what is our fault is logged with its cause."""
        told = errors.as_ottserve_error(error, call.request_id)
        call.outcome = errors.TABLE[type(told)].label
        if isinstance(told, api.Internal):
            self._metrics.failed(told.reason)
            log.error("internal error", request_id=call.request_id, reason=told.reason, exc_info=error)
        return told

    def end(self, call: Call) -> None:
        """A call ended."""
        duration_s = self._now() - call.started_at
        self._metrics.finished(call.method, call.outcome, duration_s)
        call.span.set_attributes({"ottserve.outcome": call.outcome, "ottserve.request_id": call.request_id})
        call.span.end()
        log.info(
            "request",
            method=call.method,
            request_id=call.request_id,
            outcome=call.outcome,
            duration_s=round(duration_s, 6),
            **call.facts,
        )
