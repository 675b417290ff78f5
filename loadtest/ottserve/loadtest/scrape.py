"""What a service tells Prometheus, read once: its gateway's page, and those of the replicas that `/sd` names."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0

IN_HAND = {
    "ottserve_gateway_requests_in_flight": {},
    "ottserve_running_requests": {},
    "ottserve_waiting_requests": {},
    "ottserve_waiting_tokens": {},
    "ottserve_slots": {"state": "used"},
    "ottserve_kv_pages": {"state": "used"},
}

Series = tuple[str, dict[str, str], float]


def scrape(metrics_url: str) -> list[Series]:
    """Every series of gateway and replicas, as name, labels and value. Raises OSError."""
    addresses = [address for group in json.loads(_get(f"{metrics_url}/sd")) for address in group["targets"]]
    urls = [f"{metrics_url}/metrics", *(f"http://{address}/metrics" for address in addresses)]
    return [series for url in urls for series in _series(_get(url))]


def in_hand(series: list[Series]) -> dict[str, float]:
    """The gauges that are 0 when nothing is in hand, those that are not."""
    totals = {name: sum(total(series, name, **labels)) for name, labels in IN_HAND.items()}
    return {name: value for name, value in totals.items() if value}


def imbalances(series: list[Series]) -> dict[str, float]:
    """Accounts that do not balance, by how much: calls that came against those that ended, pages against all."""
    received = sum(total(series, "ottserve_gateway_requests_received_total"))
    finished = sum(total(series, "ottserve_gateway_requests_finished_total"))
    in_flight = sum(total(series, "ottserve_gateway_requests_in_flight"))
    page_bytes = sum(total(series, "ottserve_kv_memory_bytes", kind="pages"))
    sizes = zip(total(series, "ottserve_kv_token_capacity"), total(series, "ottserve_kv_bytes_per_token"), strict=True)
    differences = {
        "calls": received - finished - in_flight,
        "page bytes": page_bytes - sum(num_tokens * num_bytes for num_tokens, num_bytes in sizes),
    }
    return {name: value for name, value in differences.items() if value}


def total(series: list[Series], name: str, **labels: str) -> Iterator[float]:
    """The values of a metric's series that have these labels."""
    return (value for found, has, value in series if found == name and labels.items() <= has.items())


def _series(page: str) -> Iterator[Series]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
        return str(page.read().decode())
