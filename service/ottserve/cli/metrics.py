"""`ottserve metrics`: every metric of gateway and replica, as the table of docs/metrics.md. Measures nothing.

The table is read off the registries themselves, so it can't tell of a metric that is not there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

HEADER = """# Metrics

Made by `ottserve metrics`; a test compares. Gateways answer at `gateway.metrics.port`, replicas at `metrics.port`.
A counter's rate is `rate(name[5m])`; a histogram `name` has the series `name_bucket`, `name_sum` and `name_count`.
"""
UNITS = (
    "seconds",
    "bytes",
    "tokens",
    "requests",
    "pages",
    "slots",
    "steps",
    "places",
    "heads",
    "errors",
    "preemptions",
    "rows",
)
OTHER_UNITS = {
    "ottserve_batch_size": "sequences",
    "ottserve_gateway_requests_received_total": "requests",
    "ottserve_gateway_requests_finished_total": "requests",
    "ottserve_gateway_requests_in_flight": "requests",
    "ottserve_kv_bits_per_element": "bits",
    "ottserve_kv_bytes_per_token": "bytes",
    "ottserve_kv_token_capacity": "tokens",
    "ottserve_pages_evicted_total": "pages",
    "ottserve_pages_sealed_total": "pages",
    "ottserve_replica_info": "1",
}
SUFFIXES = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True, slots=True, order=True)
class MetricRow:
    """One metric under the name that queries use."""

    name: str
    type: str
    unit: str
    labels: tuple[str, ...]
    meaning: str


def metrics() -> None:
    """List every metric with type, unit, labels and meaning, as Markdown."""
    typer.echo(markdown(), nl=False)


def markdown() -> str:
    """The whole of docs/metrics.md."""
    parts = [HEADER]
    for title, rows in (("Gateway", gateway_rows()), ("Replica", replica_rows())):
        lines = [
            f"| `{row.name}` | {row.type} | {row.unit} | {', '.join(row.labels) or '—'} | {row.meaning} |"
            for row in rows
        ]
        parts.append(f"\n## {title}\n\n| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def gateway_rows() -> list[MetricRow]:
    """What a gateway tells, by name."""
    return sorted(_rows(gateway_registry()))


def replica_rows() -> list[MetricRow]:
    """What a replica tells, by name."""
    return sorted(_rows(replica_registry()))


def gateway_registry() -> CollectorRegistry:
    """A gateway's registry with a series of each metric."""
    from ottserve.service.metrics import GatewayMetrics

    told = GatewayMetrics()
    told.failed("shows the label")
    return told.registry


def replica_registry() -> CollectorRegistry:
    """A replica's. Loads the toy model, so that the numbers come from where they always do."""
    from ottserve.workers.core.counters import EngineCounters
    from ottserve.workers.engine.loading import load_engine
    from ottserve.workers.engine_thread import EngineFacts, Reading
    from ottserve.workers.metrics import ReplicaMetrics
    from ottserve.workers.settings import EngineSettings

    engine = load_engine(EngineSettings.model_validate({"model": {"path": "toy"}, "cache": {"num_pages": 2}}), _silent)
    load = dataclasses.replace(engine.load_report(), last_step_at=0.0)
    told = ReplicaMetrics("any", lambda: Reading(load, engine.counters))
    told.describe(EngineFacts(engine.model_info, engine.server_info, engine.tokenizer_files))
    told.record_step(0.0, EngineCounters(num_decode_steps=1, num_step_rows=1))
    return told.registry


def _silent(message: str) -> None:
    """The toy model loads at once."""


def _rows(registry: CollectorRegistry) -> Iterator[MetricRow]:
    for family in registry.collect():
        name = family.name + SUFFIXES.get(family.type, "")
        yield MetricRow(name, family.type, _unit(name), _labels(family), family.documentation)


def _labels(family: Metric) -> tuple[str, ...]:
    return tuple(sorted({label for sample in family.samples for label in sample.labels} - {"le"}))


def _unit(name: str) -> str:
    """The unit that a metric's name ends with. Raises KeyError for a name that tells none and is not listed."""
    words = name.removesuffix("_total").rsplit("_", 1)
    return words[1] if words[1] in UNITS else OTHER_UNITS[name]
