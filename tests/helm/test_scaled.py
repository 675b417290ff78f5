"""A chart whose replicas are as many as the load needs: bounds, budget, alert and Ray's autoscaler agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.values import Values

from ottserve.cli.settings import read_settings

Render = Callable[..., Any]
AUTOSCALE: Values = {"min_replicas": 2, "max_replicas": 8}
SCALED: Values = {
    "settings": {"deployment": {"num_replicas": 3, "autoscale": AUTOSCALE}},
    "alerts": {"enabled": True},
}


def test_pods_and_serve_have_the_same_bounds(render: Render, tmp_path: Path) -> None:
    rendered = render(SCALED)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(rendered.settings()))
    deployment = read_settings(tmp_path / "settings.yaml", []).deployment
    group = rendered.one("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (
        deployment.autoscale.min_replicas,
        deployment.num_replicas,
        deployment.autoscale.max_replicas,
    )


def test_ray_makes_the_pods_only_where_load_decides(render: Render, rayservice_problems: Any) -> None:
    fixed, scaled = (render(values).one("RayService") for values in ({}, SCALED))
    assert "enableInTreeAutoscaling" not in fixed["spec"]["rayClusterConfig"]
    assert scaled["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert rayservice_problems(scaled) == []
    mounts = scaled["spec"]["rayClusterConfig"]["autoscalerOptions"]["volumeMounts"]
    assert {mount["name"] for mount in mounts} <= {v["name"] for v in render(SCALED).pods()["head"]["volumes"]}


def test_only_the_autoscaler_has_a_token_for_the_api_server(render: Render) -> None:
    tokens = {name: pod["automountServiceAccountToken"] for name, pod in render(SCALED).pods().items()}
    assert tokens == {"head": True, "gateway": False, "replica": False}


def test_budget_and_alert_count_the_fewest(render: Render) -> None:
    rendered = render(SCALED)
    assert rendered.one("PodDisruptionBudget")["spec"]["minAvailable"] == 2 + 1
    rules = [rule for group in rendered.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    (lost,) = [rule["expr"] for rule in rules if rule.get("alert") == "OttserveReplicaLost"]
    assert lost.endswith("< 2")


def test_without_a_fewest_it_is_one_as_in_the_settings(render: Render) -> None:
    scaled = render({"settings": {"deployment": {"autoscale": {"max_replicas": 4}}}}).one("RayService")
    group = scaled["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert (group["minReplicas"], group["maxReplicas"]) == (1, 4)


def test_one_pod_does_not_scale(render: Render) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=r"mode=pod.*max_replicas=8"):
        render(SCALED, {"mode": "pod", "settings": {"deployment": {"num_replicas": 1}}})
