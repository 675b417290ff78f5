"""The service as an application for a Ray cluster that somebody else runs, such as KubeRay. Starts nothing.

Serve's configuration names it: `import_path: ottserve.cli.application:application`, with the arguments of
`ClusterArguments`. The cluster's processes must have `ray_environment.RAY_ENVIRONMENT` in their environment.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import Application

from ottserve.cli.settings import read_settings
from ottserve.service.deployment import gateway_application
from ottserve.service.named_replica import NamedReplicaRouter
from ottserve.service.tracing import configure_replica
from ottserve.workers.app import replica_application
from ottserve.workers.settings import EngineSettings


class ClusterArguments(BaseModel):
    """What the cluster decides; the settings decide the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path = Field(description="YAML file of settings, the same on every node.")
    replica_metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of each replica's metrics, where each has a host of its own; 0 takes any."
    )
    gateway_resources: dict[str, float] = Field({}, description="Custom Ray resources that mark the gateway's nodes.")


def application(arguments: ClusterArguments) -> Application:
    """Gateway and replicas, bound to their settings. Raises `SettingsError` naming each setting that is wrong."""
    settings = read_settings(arguments.config, [])
    replicas = replica_application(
        _with_metrics_port(settings.engine, arguments.replica_metrics_port),
        settings.deployment,
        num_cpus=1,
        num_gpus=0 if settings.model.device == "cpu" else 1,
        configure_logs=configure_replica,
        request_router=NamedReplicaRouter,
    )
    return gateway_application(settings.gateway, replicas, arguments.gateway_resources)


def _with_metrics_port(engine: EngineSettings, port: int) -> EngineSettings:
    if not port:
        return engine
    return engine.model_copy(update={"metrics": engine.metrics.model_copy(update={"port": port})})
