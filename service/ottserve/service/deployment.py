"""The gateway as a Ray Serve deployment without a GPU. Each of its replicas listens on the settings' own port.

Knows not what the engine deployment is: whoever builds the application binds it. Set
`ray_environment.RAY_ENVIRONMENT` before importing this.
"""

from __future__ import annotations

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from ottserve.service import tracing
from ottserve.service.ray_environment import GATEWAY_ENVIRONMENT
from ottserve.service.ray_replicas import RayReplicas
from ottserve.service.server import GatewayServer
from ottserve.service.settings import GatewaySettings

# A drain may take its grace time; Serve's own limit must not cut it short.
SHUTDOWN_MARGIN_S = 10.0


class Gateway:
    """Starts the server when Serve makes it, drains when Serve ends it. Serves nothing through Serve itself."""

    async def __init__(self, settings: GatewaySettings, *engines: DeploymentHandle) -> None:  # type: ignore[misc]
        tracing.configure("gateway")
        # Half: the readiness has to hear of those that answer before its own time is up.
        answer_timeout_s = settings.readiness.poll_timeout_s / 2
        models = (RayReplicas(engine, settings.routing, answer_timeout_s) for engine in engines)
        self._server = GatewayServer(settings, *models)
        await self._server.start()

    async def check_health(self) -> None:
        """Called by Serve; raising gets this process replaced."""
        if not self._server.is_following:
            raise RuntimeError("the gateway no longer follows its replicas")

    async def __del__(self) -> None:
        await self._server.drain()


def gateway_application(
    settings: GatewaySettings, *engines: Application, resources: dict[str, float] | None = None
) -> Application:
    """The whole service: the gateway in front of engine deployments that are already bound.

    Args:
        settings: of the gateway.
        engines: the bound engine deployment of each model.
        resources: custom Ray resources that a node must have to run the gateway.
    """
    drain = settings.drain
    deployment = serve.deployment(
        name="Gateway",
        num_replicas=settings.replicas,
        ray_actor_options={
            "num_cpus": 0,
            "resources": resources or {},
            "runtime_env": {"env_vars": GATEWAY_ENVIRONMENT},
        },
        graceful_shutdown_timeout_s=drain.probe_period_s + drain.grace_s + SHUTDOWN_MARGIN_S,
        health_check_period_s=2,
    )(Gateway)
    return deployment.bind(settings, *engines)
