"""Dashboard, rules, registries and documentation name the same metrics, and ask for them in forms with a meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ottserve.cli.metrics import MetricRow, markdown
from ottserve.cli.settings import describe

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\bottserve_[a-z0-9_]+\b")
RECORDED = re.compile(r"\b[a-z_]+:ottserve_[a-z0-9_]+:[a-z0-9_]+\b")
SERIES = ("_bucket", "_sum", "_count")
LABELS_OF_SCRAPING = {"job", "instance", "namespace", "le"}


def used(expressions: list[str], rows: list[MetricRow]) -> set[str]:
    """Metrics that expressions read, a histogram's series under its own name."""
    histograms = {row.name for row in rows if row.type == "histogram"}
    found = set()
    for expression in expressions:
        for name in NAME.findall(RECORDED.sub("", expression)):
            base = next((name.removesuffix(end) for end in SERIES if name.endswith(end)), name)
            found.add(base if base in histograms else name)
    return found


def test_all_that_is_asked_for_exists(
    expressions: list[str], rules: list[dict[str, Any]], metric_rows: list[MetricRow]
) -> None:
    asked = used(expressions + [rule["expr"] for rule in rules], metric_rows)
    assert asked - {row.name for row in metric_rows} == set()


def test_all_that_exists_is_shown(expressions: list[str], metric_rows: list[MetricRow]) -> None:
    assert {row.name for row in metric_rows} - used(expressions, metric_rows) == set()


def test_labels_that_are_matched_or_kept_exist(
    expressions: list[str], rules: list[dict[str, Any]], metric_rows: list[MetricRow]
) -> None:
    known = {label for row in metric_rows for label in row.labels} | LABELS_OF_SCRAPING
    for expression in expressions + [rule["expr"] for rule in rules]:
        matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", expression))
        kept = {
            label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")
        }
        assert matched | kept <= known, expression


def test_recorded_names_exist(rules: list[dict[str, Any]]) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules for name in RECORDED.findall(rule["expr"])}
    assert asked <= recorded
    assert recorded - asked == {"job:ottserve_generated_tokens:rate_5m"}, "what no alert needs is for people"


def test_documentation_is_what_the_registries_say() -> None:
    assert (DOCS / "metrics.md").read_text() == markdown(), "make generated renews docs/metrics.md"


def test_names_follow_prometheus(metric_rows: list[MetricRow]) -> None:
    names = [row.name for row in metric_rows]
    assert len(names) == len(set(names))
    for row in metric_rows:
        assert row.name.startswith("ottserve_")
        assert (row.type == "counter") == row.name.endswith("_total")
        assert row.meaning.endswith(".")


def test_every_quantile_is_of_rates_summed_by_bucket(expressions: list[str], rules: list[dict[str, Any]]) -> None:
    for expression in expressions + [rule["expr"] for rule in rules]:
        for argument in re.findall(r"histogram_quantile\([\d.]+, (.*)", expression):
            assert re.match(r"sum by \([^)]*\ble\b[^)]*\) \(rate\(\w+_bucket\{", argument), expression


def test_no_query_adds_or_averages_quantiles(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        stacked = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        for target in panel["targets"]:
            num_quantiles = target["expr"].count("histogram_quantile")
            assert num_quantiles <= 1, panel["title"]
            assert not num_quantiles or target["expr"].startswith("histogram_quantile("), panel["title"]
            assert not (num_quantiles and stacked), f"{panel['title']}: stacked quantiles are added"


def test_counters_are_read_as_rates(
    expressions: list[str], rules: list[dict[str, Any]], metric_rows: list[MetricRow]
) -> None:
    counters = {row.name for row in metric_rows if row.type == "counter"} | {
        row.name + end for row in metric_rows if row.type == "histogram" for end in SERIES
    }
    for expression in expressions + [rule["expr"] for rule in rules]:
        for match in NAME.finditer(RECORDED.sub("", expression)):
            if match.group() in counters:
                before = RECORDED.sub("", expression)[: match.start()]
                assert before.endswith("rate("), expression


def test_every_panel_has_unit_text_and_a_place_of_its_own(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) >= len(panels) - 2, "titles may repeat in another row"
    cells = set()
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_every_query_takes_the_variables(expressions: list[str], dashboard: dict[str, Any]) -> None:
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    for expression in expressions:
        assert 'job=~"$job"' in expression
        assert ("ottserve_gateway_" in expression) or ('instance=~"$instance"' in expression)


@pytest.mark.parametrize("part", ["summary", "runbook"])
def test_every_alert_says_what_happened_and_what_to_do(rules: list[dict[str, Any]], part: str) -> None:
    operations = (DOCS / "operations.md").read_text()
    for rule in rules:
        if "alert" in rule:
            assert rule["annotations"][part]
            assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
            assert f"### {rule['alert']}\n" in operations


def test_the_runbook_has_no_other_alert(rules: list[dict[str, Any]]) -> None:
    told = re.findall(r"^### (Ottserve\w+)$", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(rule["alert"] for rule in rules if "alert" in rule)


def test_there_is_an_alert_for_each_way_to_fail(rules: list[dict[str, Any]]) -> None:
    """Latency twice, errors, refusals, KV pressure, frozen heads, a stalled engine, and who is lost."""
    alerts = {rule["alert"].removeprefix("Ottserve") for rule in rules if "alert" in rule}
    assert alerts >= {"SlowFirstToken", "SlowTokens", "Errors", "Refusals", "KVPressure", "FrozenHeads"}
    assert alerts >= {"EngineStalled", "ReplicaLost", "GatewayLost"}


def test_every_row_of_the_dashboard_is_pictured(dashboard: dict[str, Any]) -> None:
    page = (DOCS / "dashboard.md").read_text()
    for title in (panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"):
        picture = f"dashboard/{title.lower().replace(' ', '-')}.png"
        assert re.search(rf"^## {title}$[^#]*\]\({picture}\)", page, re.MULTILINE), title
        assert 10_000 < (DOCS / picture).stat().st_size < 150_000, picture


def test_settings_and_values_that_the_runbook_names_exist(chart_values: dict[str, Any]) -> None:
    """`scheduler.max_running` is a setting; `replica.memory` and `settings.model.path` are values of the chart."""
    settings = {line.split()[0] for line in describe()}
    named = re.findall(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)(?:=\w+)?`", (DOCS / "operations.md").read_text())
    assert len(named) > 20
    unknown = [name for name in named if name not in settings and not _is_value(chart_values, name.split("."))]
    assert [name for name in unknown if name.removeprefix("settings.") not in settings] == []


def _is_value(values: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True
