"""The toy model under load, watched by a real Prometheus: counts that agree, panels and rules that see something."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ottserve import client as oc
from ottserve.cli.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

CHART = Path(__file__).parents[2] / "helm" / "ottserve"
NAMESPACE, RELEASE = "llm", "demo"
# One layer, and it traces outliers; small pages, so that short prompts fill some.
TOY = {"model__path": "toy", "cache__plain_layers": [], "cache__group": 32, "cache__window": 8}

COUNTED: dict[str, Any] = {
    "about": "nobody leaves, so both sides count the same",
    "duration_s": 5,
    "warm_up_s": 1,
    "arrivals": {"loop": "closed", "num_callers": 3},
    "requests": [
        {
            "name": "chat",
            "prompt_tokens": {"least": 100, "most": 200},
            "shared_prefix_tokens": 96,
            "answer_tokens": {"least": 5, "most": 40},
        }
    ],
}
LEAVING: dict[str, Any] = {
    **COUNTED,
    "about": "some leave half-way",
    "duration_s": 8,
    "arrivals": {"loop": "open", "requests_per_s": 6, "burstiness": 0.5},
    "requests": [{**COUNTED["requests"][0], "cancelled_share": 0.3}],
}


@pytest.fixture(scope="module")
def toy(start_service: Callable[..., Any]) -> Any:
    return start_service(**TOY)


@pytest.fixture(scope="module")
def load(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs a load test as a user does, and gives its report."""

    def run(workload: dict[str, Any], *arguments: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("load")
        (folder / "workload.yaml").write_text(yaml.safe_dump(workload))
        command = [
            sys.executable,
            "-m",
            "ottserve.loadtest",
            "run",
            str(folder / "workload.yaml"),
            "--out",
            str(folder),
        ]
        done = subprocess.run(
            [*command, "--target", toy.target, *arguments], capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report

    return run


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def server_counts(service: Any) -> Counter[str]:
    """Counters of gateway and replicas, summed over what is named here, once nothing runs any more."""
    with oc.Client(service.target) as client:
        while any(replica.num_running or replica.num_waiting for replica in client.load()):
            time.sleep(0.1)
    time.sleep(0.5)  # a replica tells a tenth of a second late
    counts: Counter[str] = Counter()
    for group in json.loads(read(f"http://127.0.0.1:{service.metrics_port}/sd")):
        for target in group["targets"]:
            for family in text_string_to_metric_families(read(f"http://{target}/metrics")):
                for sample in family.samples:
                    labels = {name: sample.labels[name] for name in ("source", "outcome") if name in sample.labels}
                    if sample.labels.get("method", "GenerateStream") == "GenerateStream":
                        counts[" ".join((sample.name, *labels.values()))] += int(sample.value)
    return counts


@pytest.mark.parametrize("processes", [1, 2])
def test_a_load_report_counts_what_the_server_counts(toy: Any, load: Any, processes: int) -> None:
    before = server_counts(toy)
    report = load(COUNTED, "--processes", str(processes), "--master-port", str(free_port()))
    grown = server_counts(toy)
    grown.subtract(before)
    tokens, requests = report["tokens"], report["requests"]
    assert requests == {"completed": grown["ottserve_gateway_requests_finished_total ok"]}
    assert requests["completed"] > 5
    assert tokens["completion_tokens"] == tokens["received_tokens"] == grown["ottserve_generated_tokens_total"]
    assert tokens["cached_prompt_tokens"] == grown["ottserve_prompt_tokens_total cached"]
    assert tokens["prompt_tokens"] == (
        grown["ottserve_prompt_tokens_total cached"] + grown["ottserve_prompt_tokens_total computed"]
    )
    assert report["times"]["inter_token_s"]["num"] < tokens["completion_tokens"], "warm-up and first tokens left out"


@pytest.fixture(scope="module")
def prometheus(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Scrapes once a second what the gateway's /sd names, with the chart's rules; its address."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus (package prometheus) is not installed")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": RELEASE,
                "http_sd_configs": [{"url": f"http://127.0.0.1:{toy.metrics_port}/sd", "refresh_interval": "1s"}],
                "relabel_configs": [{"target_label": "namespace", "replacement": NAMESPACE}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}/api/v1"
    process.terminate()
    process.wait(30)


def rule_groups() -> list[dict[str, Any]]:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({"alerts": {"enabled": True}}, name=RELEASE, namespace=NAMESPACE)
    groups: list[dict[str, Any]] = yaml.safe_load(files["ottserve/templates/prometheusrule.yaml"])["spec"]["groups"]
    return [{**group, "interval": "1s"} for group in groups]


@pytest.fixture(scope="module")
def watched(toy: Any, prometheus: str, load: Any) -> tuple[str, float, float]:
    """A while with answers, cancels and refusals; Prometheus, and from when to when."""
    began = time.time()
    with oc.Client(toy.target) as client:
        for _ in range(3):
            with pytest.raises(oc.InvalidArgument):
                client.generate("a", oc.Options(temperature=-1))
    report = load(LEAVING)
    assert set(report["requests"]) == {"completed", "cancelled"}
    time.sleep(3)
    return prometheus, began, time.time()


def ask(prometheus: str, path: str, **parameters: Any) -> Any:
    answer = json.loads(read(f"{prometheus}/{path}?{urllib.parse.urlencode(parameters)}"))
    assert answer["status"] == "success", answer
    return answer["data"]


def with_variables(expression: str) -> str:
    chosen = {"$__rate_interval": "5s", "$job": ".*", "$instance": ".*"}
    for name, value in chosen.items():
        expression = expression.replace(name, value)
    return expression


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
    return found


def test_every_panel_shows_something(watched: tuple[str, float, float]) -> None:
    prometheus, began, ended = watched
    empty = set()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            span = {"query": with_variables(target["expr"]), "start": began, "end": ended, "step": 1}
            series = ask(prometheus, "query_range", **span)["result"]
            values = [float(value) for one in series for _, value in one["values"]]
            if not any(math.isfinite(value) for value in values):
                empty.add(panel["title"])
            assert not any(math.isinf(value) for value in values), target["expr"]
    assert empty == set()


def test_the_dashboard_can_be_drawn(watched: tuple[str, float, float], tmp_path: Path) -> None:
    """A picture a row, and no panel empty. docs/dashboard.md shows some."""
    prometheus, began, ended = watched
    command = [sys.executable, str(CHART.parent / "dashboard" / "pictures.py"), prometheus.removesuffix("/api/v1")]
    span = ["--end", str(ended), "--minutes", str((ended - began) / 60), "--rate-interval", "5s"]
    done = subprocess.run([*command, *span, "--out", str(tmp_path)], capture_output=True, text=True, check=True)
    said = dict(line.removeprefix(f"{tmp_path}/").split(".png", 1) for line in done.stdout.splitlines())
    titles = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert list(said) == [title.lower().replace(" ", "-") for title in titles]
    assert not any(said.values()), "a row says which of its panels are empty"
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in said)


def test_every_variable_has_choices(watched: tuple[str, float, float]) -> None:
    prometheus, began, ended = watched
    choices = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            parameters = {"match[]": with_variables(selector), "start": began, "end": ended}
            choices[variable["name"]] = ask(prometheus, f"label/{label}/values", **parameters)
    assert choices["job"] == [RELEASE]
    assert len(choices["instance"]) == 1, "one replica; the gateway is none"


def test_rules_are_evaluated_and_nothing_fires_on_a_healthy_service(watched: tuple[str, float, float]) -> None:
    prometheus, began, ended = watched
    rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    span = {"start": began, "end": ended, "step": 1}
    assert [name for name in recorded if not ask(prometheus, "query_range", query=name, **span)["result"]] == []
