"""Each alert against series made up for it: it fires when it should, and not a moment before. By promtool."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from ottserve.cli.metrics import gateway_registry, replica_registry
from ottserve.service.metrics import CHAT_COMPLETIONS, COMPLETIONS, MODELS

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed"
)

SCOPE = 'namespace="llm",job="demo"'
REPLICA = f'{SCOPE},instance="r1"'
GATEWAY_IS_THERE = {f"ottserve_gateway_requests_in_flight{{{SCOPE}}}": "0x60"}
REPLICA_IS_THERE = {f"ottserve_replica_info{{{REPLICA}}}": "1x60"}


def finished(outcome: str, per_minute: int, method: str = "GenerateStream") -> dict[str, str]:
    name = f'ottserve_gateway_requests_finished_total{{{SCOPE},method="{method}",outcome="{outcome}"}}'
    return {name: f"0+{per_minute}x60"}


def buckets(histogram: str, below: str, above: str) -> dict[str, str]:
    """All that is observed lies between two bounds."""
    values = {below: "0x60", above: "0+60x60", "+Inf": "0+60x60"}
    return {f'{histogram}_bucket{{{SCOPE},le="{bound}"}}': value for bound, value in values.items()}


def pages(used: int, free: int) -> dict[str, str]:
    return {f'ottserve_kv_pages{{{REPLICA},state="{state}"}}': f"{count}x60"
            for state, count in (("used", used), ("cached", 0), ("free", free))}  # fmt: skip


def evicted(used: int, free: int, frozen: int) -> dict[str, str]:
    places = {f'ottserve_outlier_places{{{REPLICA},pool="evicted",state="{state}"}}': f"{count}x60"
              for state, count in (("used", used), ("free", free))}  # fmt: skip
    return {**places, f"ottserve_outlier_frozen_heads{{{REPLICA}}}": f"{frozen}x60"}


def work(running: int, waiting: int, last_step_at: str) -> dict[str, str]:
    return {
        f"ottserve_running_requests{{{REPLICA}}}": f"{running}x60",
        f'ottserve_waiting_requests{{{REPLICA},reason="pages"}}': f"{waiting}x60",
        f'ottserve_waiting_requests{{{REPLICA},reason="queue"}}': "0x60",
        f"ottserve_last_step_timestamp_seconds{{{REPLICA}}}": last_step_at,
    }


def comes_after_idleness(last_step_at: str) -> dict[str, str]:
    """A request comes after half an hour without any."""
    return work(0, 0, last_step_at) | {f'ottserve_waiting_requests{{{REPLICA},reason="queue"}}': "0x29 1x30"}


def never_stepped(waiting: int) -> dict[str, str]:
    """A replica has no time of its last step before there was one."""
    return {name: values for name, values in work(0, waiting, "").items() if "last_step" not in name}


STUCK, LIVELY = "0x60", "0+60x60"  # time starts at 0, so a step a minute is a timestamp that keeps up
TTFT = "ottserve_gateway_time_to_first_token_seconds"
INTER_TOKEN = "ottserve_gateway_inter_token_seconds"


@dataclass(frozen=True)
class Case:
    """Series beside which an alert fires from a minute on, or never when `fires_after_m` is None."""

    alert: str
    series: dict[str, str]
    fires_after_m: int | None = None
    name: str = field(default="", kw_only=True)


OK = finished("ok", 90)
GENERATING = ("Generate", COMPLETIONS, CHAT_COMPLETIONS)
CASES = [
    Case("OttserveSlowFirstToken", buckets(TTFT, "6", "10"), 12),
    Case("OttserveSlowFirstToken", buckets(TTFT, "1", "1.5"), name="quick"),
    Case("OttserveSlowTokens", buckets(INTER_TOKEN, "0.8", "2"), 12),
    Case("OttserveSlowTokens", buckets(INTER_TOKEN, "0.02", "0.03"), name="quick"),
    Case("OttserveErrors", finished("ok", 90) | finished("internal", 10), 7),
    Case(
        "OttserveErrors", finished("ok", 90) | finished("stream_broken", 5) | finished("unavailable", 5), 7, name="sum"
    ),
    Case("OttserveErrors", finished("ok", 90) | finished("invalid", 900) | finished("cancelled", 900), name="callers"),
    *(Case("OttserveErrors", finished("internal", 10, method), 7, name=method) for method in GENERATING),
    Case("OttserveErrors", finished("ok", 90) | finished("internal", 900, MODELS), name="no generations"),
    Case("OttserveErrors", finished("ok", 0), name="idle"),
    Case("OttserveRefusals", finished("ok", 50) | finished("queue_full", 50), 12),
    Case("OttserveRefusals", finished("ok", 99) | finished("queue_full", 1), name="few"),
    Case("OttserveKVPressure", pages(99, 1) | work(4, 3, LIVELY), 10),
    Case("OttserveKVPressure", pages(99, 1) | work(4, 0, LIVELY), name="nobody waits"),
    Case("OttserveKVPressure", pages(50, 50) | work(4, 3, LIVELY), name="waits for a slot"),
    Case("OttserveFrozenHeads", evicted(95, 5, 7), 15),
    Case("OttserveFrozenHeads", evicted(10, 90, 7), name="one long text"),
    Case("OttserveFrozenHeads", evicted(0, 0, 0), name="no pool"),
    Case("OttserveEngineStalled", work(1, 0, STUCK), 3),
    Case("OttserveEngineStalled", work(0, 1, STUCK), 3, name="waiting"),
    Case("OttserveEngineStalled", work(1, 1, LIVELY), name="busy"),
    Case("OttserveEngineStalled", work(0, 0, STUCK), name="idle"),
    Case("OttserveEngineStalled", comes_after_idleness("0x60"), 31, name="first step hangs after idleness"),
    Case("OttserveEngineStalled", comes_after_idleness("0x30 1860+60x29"), name="awake after idleness"),
    Case("OttserveEngineStalled", never_stepped(1), 2, name="very first step hangs"),
    Case("OttserveEngineStalled", never_stepped(0), name="never asked"),
    Case("OttserveReplicaLost", {f"ottserve_replica_info{{{REPLICA}}}": "1x10 stale"}, 16),
    Case("OttserveReplicaLost", REPLICA_IS_THERE, name="there"),
    Case("OttserveReplicaLost", {'ottserve_replica_info{namespace="other",job="demo"}': "1x60"}, 5, name="another's"),
    Case("OttserveGatewayLost", {}, 2),
    Case("OttserveGatewayLost", GATEWAY_IS_THERE, name="there"),
]


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory, rule_groups: Any) -> Callable[..., str]:
    """Runs promtool beside `rules.yaml`, the chart's rules; fails with what it says, unless it ends with `status`."""
    folder = tmp_path_factory.mktemp("promtool")
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups}, sort_keys=False))

    def run(*arguments: str, files: dict[str, str] | None = None, stdin: bytes = b"", status: int = 0) -> str:
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        command = ["promtool", *arguments]
        done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, timeout=60, check=False)
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == status, said
        return said

    return run


def test_rules_are_valid(promtool: Callable[..., str], rules: list[Any]) -> None:
    assert f"{len(rules)} rules found" in promtool("check", "rules", "rules.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert} {case.name}".strip())
def test_alert(promtool: Callable[..., str], case: Case) -> None:
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    count = f'count(max_over_time(ALERTS{{alertname="{case.alert}",alertstate="firing"}}[1h])) or vector(0)'
    moments = [(case.fires_after_m - 2, 0), (case.fires_after_m + 2, 1)] if case.fires_after_m else [(50, 0)]
    checks = [
        {"expr": count, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": value}]}
        for minute, value in moments
    ]
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "30s",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}],
    }
    promtool("test", "rules", "case.yaml", files={"case.yaml": yaml.safe_dump(tests)})


def test_every_alert_has_a_case_that_fires_and_one_that_does_not(rules: list[Any]) -> None:
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert {case.alert for case in CASES if case.fires_after_m} == alerts
    assert {case.alert for case in CASES if not case.fires_after_m} == alerts


# The paper and its readers count bits; a cache of 0.28 bytes an element would tell nobody anything.
NO_BASE_UNIT = 'ottserve_kv_bits_per_element use base unit "bytes" instead of "bits"\n'


@pytest.mark.parametrize(("registry", "found"), [(gateway_registry, ""), (replica_registry, NO_BASE_UNIT)])
def test_metrics_pass_promtools_lint(
    promtool: Callable[..., str], registry: Callable[[], CollectorRegistry], found: str
) -> None:
    status = 3 if found else 0
    assert promtool("check", "metrics", stdin=generate_latest(registry()), status=status) == found
