"""What the gateway counts, in a registry of its own. Knows no message and serves no page.

received = sum of the outcomes + in flight, at all times: the three change on the event loop, where pages are made too.
No label takes a value that a caller chooses. A metric that fails is logged once and fails no request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ottserve.service.errors import OUTCOMES
from ottserve.v1 import generation_pb2
from ottserve.workers.api import INTERNAL_REASONS, TextChunk

log = structlog.get_logger(__name__)

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
COMPLETIONS, CHAT_COMPLETIONS, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
METHODS = (*(method.name for method in SERVICE.methods), COMPLETIONS, CHAT_COMPLETIONS, MODELS)

# From a toy on a laptop to long prompts on a large card: each bound is 1.5 to 2.5 times the one before.
FIRST_TOKEN_S = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.4,
    0.6,
    1,
    1.5,
    2.5,
    4,
    6,
    10,
    20,
    40,
    80,
    160,
)
INTER_TOKEN_S = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.12,
    0.2,
    0.4,
    0.8,
    2,
    5,
)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 5, 8, 12, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200)
NUM_TOKENS = tuple(2**i for i in range(18))
PHASE_S = (0.001, 0.0025, *REQUEST_S)
PHASES = {
    "queue": "Time of a finished generation in the replica's queue.",
    "prefill": "Time of a finished generation from leaving the queue to its first token.",
    "decode": "Time of a finished generation from its first token to its last.",
}


class GatewayMetrics:
    """The gateway's metrics. Use it on the event loop only."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        registry = self.registry = CollectorRegistry()
        self._now = now
        self._failed = False
        self._received = Counter(
            "ottserve_gateway_requests_received", "Calls that came in.", ["method"], registry=registry
        )
        self._finished = Counter(
            "ottserve_gateway_requests_finished", "Calls that ended, by how.", ["method", "outcome"], registry=registry
        )
        self._internal = Counter(
            "ottserve_gateway_internal_errors", "Calls that ended by our fault, by kind.", ["reason"], registry=registry
        )
        for reason in INTERNAL_REASONS:  # at 0 from the start: of a series that begins at 1 Prometheus sees no rise
            self._internal.labels(reason)
        self._in_flight = Gauge(
            "ottserve_gateway_requests_in_flight",
            "Calls that came in and have not ended.",
            ["method"],
            registry=registry,
        )
        self._duration = Histogram(
            "ottserve_gateway_request_seconds",
            "From receipt of a call to its end, whatever the end.",
            ["method"],
            buckets=REQUEST_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "ottserve_gateway_time_to_first_token_seconds",
            "From receipt of a generation to its first token.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "ottserve_gateway_inter_token_seconds",
            "Time between tokens; tokens that came together share the time since those before.",
            buckets=INTER_TOKEN_S,
            registry=registry,
        )
        self._phases = {
            phase: Histogram(f"ottserve_gateway_{phase}_seconds", text, buckets=PHASE_S, registry=registry)
            for phase, text in PHASES.items()
        }
        self._prompt_tokens = Histogram(
            "ottserve_gateway_prompt_tokens", "Tokens of a prompt.", buckets=NUM_TOKENS, registry=registry
        )
        self._output_tokens = Histogram(
            "ottserve_gateway_output_tokens", "Tokens of a finished answer.", buckets=NUM_TOKENS, registry=registry
        )
        self._show_zeros()

    def received(self, method: str) -> None:
        """A call came in."""
        with self._harmless():
            self._received.labels(method).inc()
            self._in_flight.labels(method).inc()

    def finished(self, method: str, outcome: str, duration_s: float) -> None:
        """A call ended; `outcome` is one of `errors.OUTCOMES`."""
        with self._harmless():
            self._finished.labels(method, outcome).inc()
            self._in_flight.labels(method).dec()
            self._duration.labels(method).observe(duration_s)

    def failed(self, reason: str) -> None:
        """A call is ending by our fault; `reason` names a kind of error, never an event."""
        with self._harmless():
            self._internal.labels(reason).inc()

    async def measured(
        self, chunks: AsyncGenerator[TextChunk, None], received_at: float
    ) -> AsyncGenerator[TextChunk, None]:
        """Passes the chunks of one generation through, and takes their times."""
        last: dict[int, float] = {}
        async with aclosing(chunks):
            async for chunk in chunks:
                with self._harmless():
                    self._observe(chunk, last, received_at)
                yield chunk

    def _observe(self, chunk: TextChunk, last: dict[int, float], received_at: float) -> None:
        """Takes note of a chunk; `last` tells of each sample when its last token came."""
        now, num_tokens = self._now(), len(chunk.token_ids)
        if num_tokens:
            if not last:
                self._first_token.observe(now - received_at)
            elif chunk.index in last:
                for _ in range(num_tokens):
                    self._inter_token.observe((now - last[chunk.index]) / num_tokens)
            last[chunk.index] = now
        if chunk.finish is not None:
            timings = chunk.finish.timings
            self._phases["queue"].observe(timings.queue_s)
            self._phases["prefill"].observe(timings.prefill_s)
            self._phases["decode"].observe(timings.decode_s)
            self._output_tokens.observe(chunk.finish.usage.num_completion_tokens)
            if chunk.index == 0:
                self._prompt_tokens.observe(chunk.finish.usage.num_prompt_tokens)

    def _show_zeros(self) -> None:
        """Series that appear only with their first event have no rate at that event."""
        for method in METHODS:
            self._received.labels(method)
            self._in_flight.labels(method)
            self._duration.labels(method)
            for outcome in OUTCOMES:
                self._finished.labels(method, outcome)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._failed:
                log.exception("a metric failed; later failures are not logged")
            self._failed = True
