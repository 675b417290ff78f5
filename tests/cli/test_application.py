"""The application that a cluster imports by name. No Ray is started: only what is bound counts here."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from ottserve.cli.application import ClusterArguments, application
from ottserve.cli.settings import SettingsError


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


def test_wrong_settings_are_named(config: Path) -> None:
    config.write_text("cache: {polic: ott}\n")
    with pytest.raises(SettingsError, match=r"cache\.polic"):
        application(ClusterArguments(config=config))


def test_unknown_arguments_are_refused(config: Path) -> None:
    with pytest.raises(ValidationError, match="metrics_port"):
        ClusterArguments.model_validate({"config": config, "metrics_port": 1})
