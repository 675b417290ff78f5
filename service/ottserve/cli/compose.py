"""Settings → the whole application: the gateway, and the replicas of every model. Starts nothing.

`ray_environment.RAY_ENVIRONMENT` has to be set before this is imported.
"""

from __future__ import annotations

from ray.serve import Application

from ottserve.cli.settings import ServeSettings
from ottserve.service.deployment import gateway_application
from ottserve.service.named_replica import NamedReplicaRouter
from ottserve.service.tracing import configure_replica
from ottserve.workers.app import replica_application
from ottserve.workers.settings import EngineSettings, FurtherModel


def service_application(
    settings: ServeSettings,
    *,
    num_cpus: float,
    has_gpus: bool,
    replica_metrics_port: int = 0,
    gateway_resources: dict[str, float] | None = None,
) -> Application:
    """Gateway and replicas, bound to their settings.

    Args:
        settings: all of them.
        num_cpus: cores of a replica that computes on them, where the settings do not say.
        has_gpus: whether a model that may computes on a GPU.
        replica_metrics_port: instead of the settings', where each replica has a host of its own; 0 changes nothing.
        gateway_resources: custom Ray resources that mark the gateway's nodes.
    """

    def replicas(number: int, model: FurtherModel) -> Application:
        on_gpu = has_gpus and model.model.device != "cpu"
        return replica_application(
            _with_metrics_port(model, replica_metrics_port),
            model.deployment,
            name=f"replica-{number}" if number else "replica",
            num_cpus=1 if on_gpu else num_cpus,
            num_gpus=1 if on_gpu else 0,
            configure_logs=configure_replica,
            request_router=NamedReplicaRouter,
        )

    engines = [replicas(number, model) for number, model in enumerate(settings.all_models)]
    return gateway_application(settings.gateway, *engines, resources=gateway_resources)


def _with_metrics_port(model: FurtherModel, port: int) -> EngineSettings:
    parts = {name: getattr(model, name) for name in EngineSettings.model_fields}
    return EngineSettings(**parts | ({"metrics": model.metrics.model_copy(update={"port": port})} if port else {}))
