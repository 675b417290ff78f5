"""The replica's line about a request."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from ottserve.workers import api
from ottserve.workers.request_log import noted

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
FINISH = api.Finish(api.FinishReason.LENGTH, api.Usage(1, 0, 2), api.Timings(0, 0, 0, 0), 0)


def task(traceparent: str = "") -> api.GenerationTask:
    return api.GenerationTask("r", (7,), api.SamplingParams(), api.StopParams(2), 0.0, traceparent=traceparent)


def test_it_tells_id_trace_and_tokens_and_no_text() -> None:
    with capture_logs() as logs, noted(task(f"00-{TRACE_ID}-00f067aa0ba902b7-01")) as note:
        note.saw(api.TextChunk("r", "secret", (1,)))
        note.saw(api.TextChunk("r", "secret", (2,), FINISH))
    [line] = logs
    told = {key: line[key] for key in ("event", "request_id", "ended", "num_tokens", "trace_id")}
    assert told == {
        "event": "generation",
        "request_id": "r",
        "ended": "finished",
        "num_tokens": 2,
        "trace_id": TRACE_ID,
    }
    assert "secret" not in str(line)


def test_without_a_trace_it_names_none() -> None:
    with capture_logs() as logs, noted(task()):
        pass
    assert "trace_id" not in logs[0]
    assert logs[0]["ended"] == "stopped early"


def test_an_error_is_named_and_goes_on() -> None:
    with capture_logs() as logs, pytest.raises(api.QueueFull), noted(task()):
        raise api.QueueFull("full")
    assert logs[0]["ended"] == "QueueFull"
