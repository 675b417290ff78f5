"""One log line and one span for each request at the replica, under the trace of its caller. Tells no text.

What came of it for the caller, the gateway's line says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ottserve.workers.api import GenerationTask, TextChunk

log = structlog.get_logger("ottserve.replica")

PROPAGATOR = TraceContextTextMapPropagator()
TRACER = trace.get_tracer("ottserve.replica")


@dataclass(slots=True)
class Note:
    """What is told of a request when it ends."""

    num_open: int
    num_tokens: int = 0

    def saw(self, chunk: TextChunk) -> None:
        """A chunk goes out."""
        self.num_tokens += len(chunk.token_ids)
        self.num_open -= chunk.finish is not None


@contextmanager
def noted(task: GenerationTask) -> Iterator[Note]:
    """Tells of the request when the scope is left, however it is."""
    note, began = Note(task.n), time.monotonic()
    caller = PROPAGATOR.extract({"traceparent": task.traceparent})
    span = TRACER.start_span("generate", caller, attributes={"ottserve.num_prompt_tokens": len(task.prompt_ids)})
    ended = "stopped early"
    try:
        yield note
        ended = "finished" if note.num_open == 0 else ended
    except Exception as error:
        ended = type(error).__name__
        raise
    finally:
        context = span.get_span_context()
        traced = {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}
        span.set_attributes({"ottserve.ended": ended, "ottserve.num_tokens": note.num_tokens})
        span.end()
        log.info(
            "generation",
            request_id=task.request_id,
            ended=ended,
            num_tokens=note.num_tokens,
            duration_s=round(time.monotonic() - began, 6),
            **traced,
        )
