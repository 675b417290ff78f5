"""`ottserve wait-idle`: wait until a gateway or replica has nothing in hand, as a preStop hook does. Ends nothing."""

from __future__ import annotations

import time
import urllib.request
from typing import Annotated

import typer

from ottserve.cli.connect import fail

IN_HAND = ("ottserve_gateway_requests_in_flight", "ottserve_running_requests", "ottserve_waiting_requests")
PERIOD_S = 0.5
PAGE_TIMEOUT_S = 5.0

MetricsUrl = Annotated[str, typer.Option(help="Metrics page of the gateway or replica.")]
TimeoutS = Annotated[float, typer.Option(help="Give up after this many seconds, with status 1.", min=0)]


def wait_idle(timeout_s: TimeoutS, url: MetricsUrl = "http://127.0.0.1:9464/metrics") -> None:
    """Wait until no request is in flight, running or waiting behind a metrics page."""
    deadline = time.monotonic() + timeout_s
    while num_in_hand := _num_in_hand(url):
        if time.monotonic() >= deadline:
            fail(f"{num_in_hand} requests still in hand after {timeout_s:g} s")
        time.sleep(PERIOD_S)


def _num_in_hand(url: str) -> int:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
    except OSError as error:
        fail(f"{url}: {error}")
    return int(sum(sample.value for family in families for sample in family.samples if sample.name in IN_HAND))
