"""Dashboard, rules and registries, each as whoever uses it sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from ottserve.cli.metrics import MetricRow, gateway_rows, replica_rows

CHART = Path(__file__).parents[2] / "helm" / "ottserve"


@pytest.fixture(scope="session")
def metric_rows() -> list[MetricRow]:
    """Every metric of gateway and replica."""
    return [*gateway_rows(), *replica_rows()]


@pytest.fixture(scope="session")
def panels() -> list[dict[str, Any]]:
    """The panels of the committed dashboard, rows left out."""
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="session")
def dashboard() -> dict[str, Any]:
    """The committed dashboard."""
    found: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
    return found


@pytest.fixture(scope="session")
def rule_groups() -> list[dict[str, Any]]:
    """The rules as the chart gives them to the Prometheus operator."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({"alerts": {"enabled": True}}, name="demo", namespace="llm")
    groups: list[dict[str, Any]] = yaml.safe_load(files["ottserve/templates/prometheusrule.yaml"])["spec"]["groups"]
    return groups


@pytest.fixture(scope="session")
def rules(rule_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rules, recording and alerting."""
    return [rule for group in rule_groups for rule in group["rules"]]


def _expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="session")
def expressions(panels: list[dict[str, Any]]) -> list[str]:
    """Every query of every panel."""
    return list(_expressions(panels))


@pytest.fixture(scope="session")
def chart_values() -> dict[str, Any]:
    """The chart's default values."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found
