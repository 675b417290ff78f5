"""The application that a cluster imports by name. No Ray is started: only what is bound counts here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ottserve.cli.application import ClusterArguments, application
from ottserve.cli.ports import PortTaken, check_ports
from ottserve.cli.settings import SettingsError, read_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("model: {path: toy, device: cpu}\ndeployment: {num_replicas: 3, num_cpus: 2}\nmetrics: {port: 0}\n")
    return path


def test_it_binds_the_gateway_in_front_of_the_replicas(config: Path) -> None:
    arguments = ClusterArguments(config=config, replica_metrics_port=9465, gateway_resources={"gateway": 1})
    gateway = application(arguments)._bound_deployment
    settings, engine = gateway.init_args
    replicas = engine._bound_deployment
    assert gateway.ray_actor_options["resources"] == {"gateway": 1}
    assert settings.port == 50051
    assert (replicas.num_replicas, replicas.ray_actor_options["num_cpus"]) == (3, 2)
    assert replicas.ray_actor_options["num_gpus"] == 0, "a CPU model asks for no GPU"
    assert replicas.init_args[0].metrics.port == 9465, "each replica has a host of its own"


def test_every_model_has_replicas_of_its_own_and_gateways_a_host_each(config: Path) -> None:
    with config.open("a") as file:
        file.write("gateway: {replicas: 2}\n")
        file.write("models: [{model: {path: toy, name: other, device: cuda}, deployment: {num_replicas: 2}}]\n")
    gateway = application(ClusterArguments(config=config))._bound_deployment
    first, second = (engine._bound_deployment for engine in gateway.init_args[1:])
    assert gateway.num_replicas == 2
    assert (first.name, first.num_replicas, first.ray_actor_options["num_gpus"]) == ("replica", 3, 0)
    assert (second.name, second.num_replicas, second.ray_actor_options["num_gpus"]) == ("replica-1", 2, 1)


def test_load_decides_the_number_where_it_may(config: Path) -> None:
    with config.open("a") as file:
        file.write("models: [{model: {path: toy, name: other}, deployment: {autoscale: {max_replicas: 4}}}]\n")
    gateway = application(ClusterArguments(config=config))._bound_deployment
    scaling = gateway.init_args[2]._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 1, 4)
    assert scaling.policy.policy_kwargs["kv_pressure"] == 0.8


def test_one_machine_has_one_gateway(config: Path) -> None:
    settings = read_settings(config, ["--gateway.replicas", "2"])
    with pytest.raises(PortTaken, match=r"gateway\.replicas=2"):
        check_ports(settings)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("{model: {path: toy}}", "toy is there twice"),
        ("{model: {path: toy, name: b}, metrics: {port: 1}}", "metrics.port=1"),
    ],
)
def test_models_that_contradict_each_other_are_refused(config: Path, model: str, named: str) -> None:
    with config.open("a") as file:
        file.write(f"models: [{model}]\n")
    with pytest.raises(SettingsError, match=named):
        read_settings(config, [])


def test_wrong_settings_are_named(config: Path) -> None:
    config.write_text("cache: {polic: ott}\n")
    with pytest.raises(SettingsError, match=r"cache\.polic"):
        application(ClusterArguments(config=config))


def test_unknown_arguments_are_refused(config: Path) -> None:
    with pytest.raises(ValidationError, match="metrics_port"):
        ClusterArguments.model_validate({"config": config, "metrics_port": 1})


@pytest.mark.parametrize("host", ["300.1.1.1", "203.0.113.9"])  # none at all, and somebody else's
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(PortTaken, match=f"gateway.http_host={host} is no address of this machine"):
        check_ports(read_settings(None, ["--gateway.port=0", "--gateway.http_host", host]))


def test_the_host_of_a_further_model_is_looked_at_too(tmp_path: Path) -> None:
    further = {"model": {"path": "toy", "name": "b"}, "metrics": {"host": "203.0.113.9"}}
    ports = {"port": 0, "http_port": 0, "metrics": {"port": 0}}
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps({"model": {"path": "toy"}, "models": [further], "gateway": ports}))
    with pytest.raises(PortTaken, match=r"metrics\.host=203\.0\.113\.9 is no address"):
        check_ports(read_settings(config, []))
