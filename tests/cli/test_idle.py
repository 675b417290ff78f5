"""Waiting until nothing is in hand, against a page that changes while one waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from typer.testing import CliRunner

from ottserve.cli import idle
from ottserve.cli.main import app


@pytest.fixture
def page() -> Iterator[tuple[str, Gauge]]:
    registry = CollectorRegistry()
    running = Gauge("ottserve_running_requests", "Requests being computed.", registry=registry)
    server, _ = start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics", running
    server.shutdown()
    server.server_close()


def wait(url: str, timeout_s: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["wait-idle", "--url", url, "--timeout-s", timeout_s])
    return result.exit_code, result.stderr


def test_it_ends_when_the_last_request_ends(page: tuple[str, Gauge], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PERIOD_S", 0.01)
    url, running = page
    running.set(2)
    ending = threading.Timer(0.1, running.set, (0,))
    ending.start()
    assert wait(url, "20") == (0, "")
    assert ending.finished.is_set()


def test_it_gives_up_when_time_is_over(page: tuple[str, Gauge]) -> None:
    url, running = page
    running.set(2)
    code, err = wait(url, "0")
    assert (code, "2 requests still in hand" in err) == (1, True)


def test_it_says_when_nobody_answers() -> None:
    code, err = wait("http://127.0.0.1:1/metrics", "5")
    assert (code, "127.0.0.1:1" in err) == (1, True)
