"""What is rendered is valid for Kubernetes and KubeRay, whatever is switched on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helm.drawn import values_of
from tests.helm.rendered import Object, Rendered
from tests.helm.values import HELM, VALUES, Values, at, leaves, merged, nested

Render = Callable[..., Any]
Problems = Callable[[Object], list[str]]
Check = Callable[[Any], None]

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
SERVICE_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1035: begins with a letter
CUSTOM = ("RayService", "PodMonitor", "PrometheusRule")
SECONDS = st.floats(0, 1e5)
SWITCHES = [path for path in leaves(VALUES) if isinstance(at(VALUES, path), bool)]
# The template that a switch alone decides about, and those that a mode has no use for.
MAKES = {
    "podMonitor.enabled": "podmonitor",
    "alerts.enabled": "prometheusrule",
    "dashboard.enabled": "dashboard",
    "networkPolicy.enabled": "networkpolicy",
    "podDisruptionBudget.enabled": "poddisruptionbudget",
    "serviceAccount.create": "serviceaccount",
    "test.enabled": "generate",
}
NOT_MADE: dict[str, set[str]] = {"rayservice": set(), "pod": {"poddisruptionbudget"}}
GPU: Values = {"replica": {"gpus": 1}, "settings": {"model": {"device": "cuda"}}}
FULL: Values = {
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "labels": {"folder": "llm"}},
    "modelVolume": {"existingClaim": "models"},
    "secretMounts": [{"name": "hub", "mountPath": "/secrets/hub"}],
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "priorityClassName": "high",
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "monitoring": [{"namespaceSelector": {}}],
        "operator": [{"namespaceSelector": {}}],
    },
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "gateway": {"tlsSecret": "tls", "tokensSecret": "tokens"},
    "test": {"tokenSecret": "token", "clientSecret": "client"},
    "replica": {"nodeSelector": {"gpu": "h200"}, "tolerations": [{"operator": "Exists"}], "affinity": {}},
}


@pytest.fixture(scope="module")
def check(kubernetes_problems: Problems) -> Callable[[Any], None]:
    """Fails unless all that is rendered is valid: objects that Kubernetes knows, and every pod."""

    def checked(rendered: Any) -> None:
        names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
        assert len(names) == len(set(names))
        rules = {"Service": SERVICE_LABEL}
        assert [name for kind, name in names if not re.fullmatch(rules.get(kind, LABEL), name)] == []
        pods = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}
            for spec in rendered.pods().values()
        ]
        known = [item for item in rendered.objects if item["kind"] not in CUSTOM]
        assert [problem for item in (*known, *pods) for problem in kubernetes_problems(item)] == []

    return checked


def test_lint_finds_nothing(chart_path: Path) -> None:
    report = helm_python.lint(chart_path, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("mode", ["rayservice", "pod"])
@pytest.mark.parametrize("hardware", [{}, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("extra", [{}, FULL], ids=["defaults", "full"])
def test_modes(render: Render, check: Check, mode: str, hardware: Values, extra: Values) -> None:
    check(render({"mode": mode}, hardware, extra))


def test_the_schema_has_no_other_switch() -> None:
    """Of the settings the program decides what a switch means."""
    chart = yaml.safe_load((HELM / "schema" / "chart.yaml").read_text())
    assert sorted(booleans(chart["properties"])) == sorted(SWITCHES)


def booleans(properties: Object, prefix: str = "") -> Iterator[str]:
    for name, schema in properties.items():
        if schema.get("type") == "boolean":
            yield prefix + name
        yield from booleans(schema.get("properties", {}), f"{prefix}{name}.")


@pytest.mark.parametrize("mode", ["rayservice", "pod"])
def test_every_combination_of_switches(
    chart: helm_python.Chart, check: Check, rayservice_problems: Problems, mode: str
) -> None:
    """Each combination renders what it says, and each document that any of them renders is valid."""
    documents: dict[str, str] = {}
    for choice in itertools.product((False, True), repeat=len(SWITCHES)):
        values = merged({"mode": mode}, *map(nested, SWITCHES, choice))
        chart.validate_schema(values)
        files = chart.render(values, name="demo", namespace="llm")
        texts = {text: name for name, text in files.items() if text.strip() and name.endswith(".yaml")}
        switched_on = {MAKES[path] for path, on in zip(SWITCHES, choice, strict=True) if on and path in MAKES}
        assert {Path(name).stem for name in texts.values()} & set(MAKES.values()) == switched_on - NOT_MADE[mode]
        documents |= texts
    for text, name in documents.items():
        rendered = Rendered.of_files({name: text})
        check(rendered)
        assert [problem for service in rendered.of("RayService") for problem in rayservice_problems(service)] == []


@pytest.mark.parametrize("extra", [{}, FULL], ids=["defaults", "full"])
def test_the_rayservice_is_one(render: Render, rayservice_problems: Problems, extra: Values) -> None:
    assert rayservice_problems(render(extra).one("RayService")) == []


def test_the_schemas_of_kubernetes_can_refuse(render: Render, kubernetes_problems: Problems) -> None:
    network = render().one("NetworkPolicy")
    network["spec"]["policyType"] = []
    assert "policyType" in kubernetes_problems(network)[0]


def test_the_schema_of_a_rayservice_can_refuse(
    render: Render, rayservice_problems: Problems, rayservice_schema: Path
) -> None:
    if not rayservice_schema.is_file():
        pytest.skip(f"KubeRay's schema of a RayService is not at {rayservice_schema}, so no RayService was checked")
    service = render().one("RayService")
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    assert "workerGroupSpec" in rayservice_problems(service)[0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["rayservice", "pod"]),
            "fullnameOverride": st.text("abcdefghij-", max_size=90).map(lambda name: f"x{name}y"),
            "runAsUser": st.integers(1, 65535),
            "lifecycle": st.fixed_dictionaries(
                {"preStopSeconds": st.integers(1, 600), "marginSeconds": st.integers(20, 600)}
            ),
            "replica": st.fixed_dictionaries(
                {"cpus": st.integers(1, 256), "memory": st.sampled_from(["5000Mi", "8Gi", "2Ti"])}
            ),
            "settings": st.fixed_dictionaries(
                {
                    "gateway": st.fixed_dictionaries(
                        {"drain": st.fixed_dictionaries({"grace_s": SECONDS, "probe_period_s": st.floats(0, 1e3)})}
                    ),
                    "deployment": st.fixed_dictionaries({"grace_s": SECONDS}),
                }
            ),
        }
    )
)
def test_whatever_the_numbers(render: Render, check: Check, values: Values) -> None:
    rendered = render(values)
    check(rendered)
    drain = rendered.settings()["gateway"]["drain"]
    own = values["lifecycle"]
    phases = (drain["probe_period_s"], drain["grace_s"], rendered.settings()["deployment"]["grace_s"])
    longest_s = sum(map(float, phases))  # YAML 1.1 takes 1e-05 for text; the settings take both for a number
    for spec in rendered.pods().values():
        assert spec["terminationGracePeriodSeconds"] > own["preStopSeconds"] + longest_s + own["marginSeconds"]


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(values=values_of(json.loads((HELM / "ottserve" / "values.schema.json").read_text())))
def test_whatever_the_schema_permits_is_valid_or_refused_by_name(
    render: Render, check: Check, rayservice_problems: Problems, values: Values
) -> None:
    try:
        rendered = render(values)
    except helm_python.HelmRenderError as refusal:
        assert re.search(r"[\w.]+=\S*[,:] ", str(refusal)), refusal
        return
    check(rendered)
    assert [problem for service in rendered.of("RayService") for problem in rayservice_problems(service)] == []


def test_long_names_leave_room_for_what_kuberay_appends(render: Render) -> None:
    assert all(len(item["metadata"]["name"]) <= 50 for item in render({"fullnameOverride": "x" * 90}).objects)


def test_the_package_holds_what_it_needs(chart_path: Path, tmp_path: Path) -> None:
    archive = helm_python.package(chart_path, destination=tmp_path)
    with helm_python.Chart.load(archive) as packed:
        assert packed.schema is not None
        assert {"files/dashboard.json", "files/rules.yaml"} <= {file["name"] for file in packed.files}


def test_single_pod_mode_needs_no_operator(render: Render) -> None:
    kinds: set[Any] = {item["kind"] for item in render({"mode": "pod"}).objects}
    assert "RayService" not in kinds
    assert "Deployment" in kinds
