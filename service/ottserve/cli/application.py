"""The service as an application for a Ray cluster that somebody else runs, such as KubeRay. Starts nothing.

Serve's configuration names it: `import_path: ottserve.cli.application:application`, with the arguments of
`ClusterArguments`. The cluster's processes must have `ray_environment.RAY_ENVIRONMENT` in their environment.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import Application

from ottserve.cli.compose import service_application
from ottserve.cli.settings import read_settings


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
    return service_application(
        settings,
        num_cpus=1,
        has_gpus=True,
        replica_metrics_port=arguments.replica_metrics_port,
        gateway_resources=arguments.gateway_resources,
    )
