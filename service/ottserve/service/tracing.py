"""W3C trace context of calls: taken from the caller, told in the log, carried on to the replica with the task.

Spans are OpenTelemetry's. Where nobody has configured an exporter they record nothing, and the caller's context goes on
as it came.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ottserve.service.logs import configure_logs

log = structlog.get_logger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROPAGATOR = TraceContextTextMapPropagator()
TRACER = trace.get_tracer("ottserve.gateway")


def begin(method: str, headers: Mapping[str, str]) -> trace.Span:
    """The span of a call. Headers that are no valid context count as none, as the W3C has it."""
    given = {name: headers[name] for name in PROPAGATOR.fields if name in headers}
    attributes = {"rpc.system": "ottserve", "rpc.method": method}
    return TRACER.start_span(method, PROPAGATOR.extract(given), trace.SpanKind.SERVER, attributes)


def traceparent(span: trace.Span) -> str:
    """What those who work for this call are told; empty where nothing is traced."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def configure(part: str) -> None:
    """Logs and spans of a process, once. Spans are exported where OTEL_EXPORTER_OTLP_ENDPOINT names a collector."""
    configure_logs()
    if not os.environ.get(ENDPOINT):
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  optional
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        log.warning("spans are not exported: opentelemetry-exporter-otlp is not installed", variable=ENDPOINT)
        return
    provider = TracerProvider(resource=Resource.create({"service.name": f"ottserve-{part}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def configure_replica() -> None:
    """What a replica calls first, where it runs."""
    configure("replica")
