"""What the chart says and what the program does are the same: settings, ports, environment, times, memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from ottserve.cli.application import ClusterArguments
from ottserve.cli.running import OBJECT_STORE_BYTES
from ottserve.cli.settings import ServeSettings, read_settings
from ottserve.service.deployment import SHUTDOWN_MARGIN_S
from ottserve.service.health import READY
from ottserve.service.ray_environment import RAY_ENVIRONMENT
from ottserve.workers.engine.capacity import CPU_DEFAULT_BYTES

Render = Callable[..., Any]
MIB = 2**20


@pytest.fixture(params=["rayservice", "pod"])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"mode": request.param}


def program_reads(rendered: Any, folder: Path) -> ServeSettings:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(rendered.settings()))
    return read_settings(path, [])


def test_the_program_reads_what_the_chart_writes(render: Render, mode: dict[str, Any], tmp_path: Path) -> None:
    cache = {"policy": "kivi", "k_bits": 4, "memory_bytes": 2**30}
    settings = program_reads(render(mode, {"settings": {"cache": cache, "scheduler": {"max_running": 7}}}), tmp_path)
    assert (settings.cache.policy, settings.cache.k_bits, settings.cache.memory_bytes) == ("kivi", 4, 2**30)
    assert settings.scheduler.max_running == 7
    assert (settings.deployment.num_cpus, settings.deployment.num_gpus) == (4, 0), "what a replica's pod has"


def test_many_replicas_share_one_metrics_port_since_each_has_a_pod(render: Render, tmp_path: Path) -> None:
    rendered = render({"settings": {"deployment": {"num_replicas": 3}}})
    assert program_reads(rendered, tmp_path).deployment.num_replicas == 3
    spec = rendered.one("RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert ClusterArguments.model_validate(application["args"]).replica_metrics_port == 9465
    assert [group["replicas"] for group in spec["rayClusterConfig"]["workerGroupSpecs"]] == [1, 3]


def test_what_operators_say_of_a_replicas_share_stays(render: Render) -> None:
    assert render({"settings": {"deployment": {"num_cpus": 2}}}).settings()["deployment"]["num_cpus"] == 2


def test_serve_finds_its_environment(render: Render, mode: dict[str, Any]) -> None:
    for spec in render(mode).pods().values():
        told = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
        assert told == RAY_ENVIRONMENT


def test_the_gateways_resource_is_there(render: Render) -> None:
    spec = render().one("RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    gateway, replica = spec["rayClusterConfig"]["workerGroupSpecs"]
    offered = json.loads(json.loads(gateway["rayStartParams"]["resources"].strip("'")))
    assert offered == application["args"]["gateway_resources"]
    assert "resources" not in replica["rayStartParams"]
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no replica on the head"


def test_ports_and_probes_follow_the_settings(render: Render, mode: dict[str, Any]) -> None:
    ports = {"gateway": {"port": 6000, "metrics": {"port": 6001}}, "metrics": {"port": 6002}}
    rendered = render(mode, {"settings": ports})
    listening = {
        port["name"]: port["containerPort"]
        for spec in rendered.pods().values()
        for port in spec["containers"][0]["ports"]
    }
    assert (listening["grpc"], listening["metrics"], listening["replica-metrics"]) == (6000, 6001, 6002)
    gateway = rendered.pods()["gateway" if mode["mode"] == "rayservice" else "server"]["containers"][0]
    assert gateway["readinessProbe"]["grpc"] == {"port": 6000, "service": READY}
    assert {service["spec"]["ports"][0]["port"] for service in rendered.of("Service")} == {6000}
    assert rendered.one("Pod")["spec"]["containers"][0]["args"][-1] == "--target=demo-ottserve:6000"


@pytest.mark.parametrize("http_port", [8080, 0])
def test_http_is_open_to_callers_where_the_program_listens(
    render: Render, mode: dict[str, Any], http_port: int
) -> None:
    rendered = render(mode, {"settings": {"gateway": {"http_port": http_port}}})
    expected = [http_port] if http_port else []
    for service in rendered.of("Service"):
        assert [port["port"] for port in service["spec"]["ports"] if port["name"] == "http"] == expected
    (container,) = rendered.pods()["gateway" if mode["mode"] == "rayservice" else "server"]["containers"]
    assert [port["containerPort"] for port in container["ports"] if port["name"] == "http"] == expected
    (_, callers, *_) = rendered.one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in callers["ports"]] == [50051, *expected]
    assert rendered.settings()["gateway"]["http_port"] == http_port, "left out, the program would take its default"


def test_a_pod_is_killed_only_after_all_that_the_program_may_take(render: Render, mode: dict[str, Any]) -> None:
    drain = {"gateway": {"drain": {"probe_period_s": 3, "grace_s": 100}}, "deployment": {"grace_s": 50}}
    rendered = render(mode, {"settings": drain, "lifecycle": {"preStopSeconds": 7, "marginSeconds": 20}})
    longest_s = 7 + (3 + 100 + SHUTDOWN_MARGIN_S) + (50 + 5)
    for spec in rendered.pods().values():
        assert spec["terminationGracePeriodSeconds"] > longest_s


def test_the_drain_hook_gives_up_before_the_pod_is_killed(render: Render) -> None:
    pods = render().pods()
    for name, port in (("gateway", 9464), ("replica", 9465)):
        (container,) = pods[name]["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        sleep_s, wait_s = (int(found) for found in re.findall(r"(?:sleep|--timeout-s) (\d+)", command))
        assert f"http://127.0.0.1:{port}/metrics" in command
        assert sleep_s + wait_s + 20 < pods[name]["terminationGracePeriodSeconds"]


def test_memory_covers_weights_cache_shared_memory_and_program(render: Render, mode: dict[str, Any]) -> None:
    needed = 3000 * MIB + CPU_DEFAULT_BYTES + 256 * MIB + 1024 * MIB
    render(mode, {"replica": {"weights": "3000Mi", "memory": f"{needed // MIB}Mi"}})
    with pytest.raises(
        helm_python.HelmRenderError, match=rf"replica\.memory=.*, replica\.weights=3000Mi: .* {needed} "
    ):
        render(mode, {"replica": {"weights": "3000Mi", "memory": f"{needed // MIB - 1}Mi"}})


def test_a_cache_of_its_own_size_is_counted_and_one_on_a_gpu_is_not(render: Render) -> None:
    large = {"replica": {"memory": "8Gi"}, "settings": {"cache": {"memory_bytes": 7 * 1024 * MIB}}}
    with pytest.raises(helm_python.HelmRenderError, match=r"replica\.memory=8Gi"):
        render(large)
    render(large, {"replica": {"gpus": 1, "weights": "16Gi"}, "settings": {"model": {"device": "cuda"}}})


def test_pages_told_by_number_are_not_counted_as_the_default_cache(render: Render) -> None:
    """Only the model says how large they are."""
    needed = 1024 * MIB + 256 * MIB + 1024 * MIB
    pages = {"settings": {"cache": {"num_pages": 8}}}
    render(pages, {"replica": {"memory": f"{needed // MIB}Mi"}})
    with pytest.raises(helm_python.HelmRenderError, match=rf"replica\.memory=.* {needed} bytes"):
        render(pages, {"replica": {"memory": f"{needed // MIB - 1}Mi"}})


@pytest.mark.parametrize("cache", [{}, {"memory_bytes": None, "num_pages": None}])
def test_each_rank_has_a_cache_and_a_program_of_its_own(render: Render, cache: Any) -> None:
    needed = 1024 * MIB + 256 * MIB + 3 * (CPU_DEFAULT_BYTES + 1024 * MIB)
    three = {"settings": {"model": {"tensor_parallel": 3}, "cache": cache}}
    render(three, {"replica": {"memory": f"{needed // MIB}Mi"}})
    with pytest.raises(helm_python.HelmRenderError, match=rf"replica\.memory=.* {needed} bytes"):
        render(three, {"replica": {"memory": f"{needed // MIB - 1}Mi"}})


def test_the_weights_of_the_default_model_fit(chart: helm_python.Chart) -> None:
    """SmolLM2-135M in float32, four bytes a parameter."""
    assert int(chart.values["replica"]["weights"].removesuffix("Gi")) * 1024 * MIB > 4 * 134_515_008


def test_the_object_store_fits_into_shared_memory(render: Render) -> None:
    service = render().one("RayService")["spec"]["rayClusterConfig"]
    (volume,) = [v for v in render().pods()["head"]["volumes"] if v["name"] == "shared-memory"]
    shared_bytes = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) * MIB
    for group in (service["headGroupSpec"], *service["workerGroupSpecs"]):
        store_bytes = int(group["rayStartParams"]["object-store-memory"])
        assert store_bytes == OBJECT_STORE_BYTES
        assert 2 * store_bytes <= shared_bytes


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_the_disruption_budget_lets_one_pod_go(render: Render, num_gateways: int) -> None:
    settings = {"deployment": {"num_replicas": 4}, "gateway": {"replicas": num_gateways}}
    budget = render({"settings": settings}).one("PodDisruptionBudget")["spec"]
    num_pods = 1 + num_gateways + 4
    assert budget["minAvailable"] == num_pods - 1


def test_callers_reach_the_gateway_alone(render: Render, mode: dict[str, Any]) -> None:
    rendered = render(mode)
    for service in rendered.of("Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        (container,) = rendered.pods()[component]["containers"]
        assert "grpc" in [port["name"] for port in container["ports"]]
        assert service["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"


def test_versions_are_the_programs(render: Render, chart: helm_python.Chart) -> None:
    assert render().one("RayService")["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")
    assert chart.metadata["appVersion"] == version("ottserve") == chart.values["image"]["tag"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"metrics": {"port": 50051}}}, ("settings.gateway.port=50051", "settings.metrics.port=50051")),
        ({"mode": "pod", "settings": {"deployment": {"num_replicas": 2}}}, ("mode=pod", "num_replicas=2")),
        ({"settings": {"model": {"device": "cuda"}}}, ("settings.model.device=cuda", "replica.gpus=0")),
        ({"replica": {"gpus": 1}}, ("settings.model.device=cpu", "replica.gpus=1")),
        ({"settings": {"deployment": {"num_cpus": 5}}}, ("num_cpus=5", "replica.cpus=4")),
        ({"settings": {"deployment": {"num_gpus": 1}}}, ("num_gpus=1", "replica.gpus=0")),
    ],
)
def test_contradictions_are_refused_with_both_values(
    render: Render, values: dict[str, Any], named: tuple[str, str]
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values)
    assert all(name in str(refusal.value) for name in named)


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"cache": {"polic": "ott"}}},
        {"settings": {"cache": {"policy": "mystery"}}},
        {"settings": {"gateway": {"port": 0}}},
        {"settings": {"gateway": {"http_port": None}}},
        {"image": {"tag": "latest"}},
        {"replica": {"memory": "8G"}},
        {"runAsUser": 0},
        {"mode": "swarm"},
        {"replicas": 2},
    ],
)
def test_what_the_schema_refuses(render: Render, values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        render(values)
