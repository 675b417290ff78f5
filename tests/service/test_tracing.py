"""Trace context: what a caller sends reaches log and replica, and what is no context counts as none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from ottserve.service import tracing
from ottserve.v1 import generation_pb2 as pb

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


async def call(gateway: Any, until: Any, *metadata: tuple[str, str]) -> dict[str, Any]:
    """The log line of one call."""
    with capture_logs() as logs:
        await gateway.stub.Generate(
            pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=2)), metadata=metadata
        )
        await until(lambda: logs)
    [line] = logs
    return dict(line)


async def test_the_context_goes_on_as_it_came(gateway: Any, replicas: Any, until: Any) -> None:
    line = await call(gateway, until, ("traceparent", SENT))
    assert line["trace_id"] == TRACE_ID
    assert [task.traceparent for task in replicas.tasks] == [SENT]


INVALID = ("", "00-0-0-0", f"00-{'0' * 32}-{SPAN_ID}-01", f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID.upper()}x")


@pytest.mark.parametrize("sent", INVALID)
async def test_what_is_no_context_counts_as_none(gateway: Any, replicas: Any, until: Any, sent: str) -> None:
    line = await call(gateway, until, ("traceparent", sent))
    assert (line["outcome"], "trace_id" in line) == ("ok", False)
    assert [task.traceparent for task in replicas.tasks] == [""]


async def test_spans_where_somebody_records_them(
    gateway: Any, replicas: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("test"))
    line = await call(gateway, until, ("traceparent", SENT))
    [span] = exporter.get_finished_spans()
    assert span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == SPAN_ID
    assert (span.name, dict(span.attributes or {})["ottserve.outcome"]) == ("Generate", "ok")
    own = trace.format_span_id(span.get_span_context().span_id)
    assert [task.traceparent for task in replicas.tasks] == [f"00-{TRACE_ID}-{own}-01"], "the replica's parent is ours"
    assert line["trace_id"] == TRACE_ID


def test_a_collector_without_an_exporter_is_told_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setattr(tracing, "configure_logs", lambda: None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with capture_logs() as logs:
        tracing.configure("gateway")
    assert [line["log_level"] for line in logs] == ["warning"]
