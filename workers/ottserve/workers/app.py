"""Settings → the replica's deployment in a Ray Serve application. Imports no torch until an engine loads.

Serve's environment flags have to be set before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ottserve.workers.autoscaling import Policy
from ottserve.workers.engine_thread import EngineLike
from ottserve.workers.progress import Progress
from ottserve.workers.rank_actors import placement, start_crew
from ottserve.workers.replica import Replica, Whereabouts
from ottserve.workers.settings import DeploymentSettings, EngineSettings

NAME = "replica"
LOOK_BACK_S = 3.0  # over which Serve averages what replicas report


def replica_application(
    engine: EngineSettings,
    deployment: DeploymentSettings,
    *,
    name: str = NAME,
    num_cpus: float,
    num_gpus: float,
    configure_logs: Callable[[], None],
    request_router: type | None = None,
) -> Application:
    """The replicas, bound to their settings.

    Args:
        engine: what each replica starts with.
        deployment: how many there are and how they are watched.
        name: what Serve calls them.
        num_cpus, num_gpus: what each rank of a replica gets, where `deployment` does not say.
        configure_logs: called first thing in each replica.
        request_router: Serve's request router in the process that calls; its own when None.
    """
    scheduler = engine.scheduler
    options = {
        "num_cpus": num_cpus if deployment.num_cpus is None else deployment.num_cpus,
        "num_gpus": num_gpus if deployment.num_gpus is None else deployment.num_gpus,
    }
    described = serve.deployment(
        name=name,
        **_number(deployment),
        ray_actor_options=options,
        **placement(engine.model.tensor_parallel, **options),
        # Admission is the gateway's and the scheduler's: Serve must never be the one that holds a request back,
        # nor keep an abort or a question of health from getting through.
        max_ongoing_requests=2 * (scheduler.max_running + scheduler.max_waiting) + 64,
        graceful_shutdown_timeout_s=deployment.grace_s + 5,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=deployment.health_period_s,
        health_check_timeout_s=deployment.health_timeout_s,
        max_constructor_retry_count=1,
        request_router_config=_routed_by(request_router),
    )(Replica)
    return described.bind(
        engine, partial(load_engine, configure_logs), find_whereabouts, configure_logs, deployment.stall_s
    )


def _number(deployment: DeploymentSettings) -> dict[str, Any]:
    """Serve's options for how many replicas there are. Its own delays are off: the policy has better ones."""
    auto = deployment.autoscale
    if auto.max_replicas is None:
        return {"num_replicas": deployment.num_replicas}
    bounds = {"min_replicas": auto.min_replicas, "max_replicas": auto.max_replicas}
    targets = bounds | {
        "kv_pressure": auto.target_kv_pressure,
        "slot_pressure": auto.target_slot_pressure,
        "queue_s": auto.target_queue_s,
        "up_delay_s": auto.up_delay_s,
        "down_delay_s": auto.down_delay_s,
    }
    config = AutoscalingConfig(
        **bounds,
        initial_replicas=deployment.num_replicas,
        upscale_delay_s=0,
        downscale_delay_s=0,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=Policy, policy_kwargs=targets),
    )
    return {"autoscaling_config": config}


def _routed_by(request_router: type | None) -> RequestRouterConfig:
    return RequestRouterConfig(request_router_class=request_router) if request_router else RequestRouterConfig()


def load_engine(configure_logs: Callable[[], None], settings: EngineSettings, progress: Progress) -> EngineLike:
    """Called in the replica: only there is torch imported. `configure_logs` is for other ranks, where there are any."""
    from ottserve.workers.engine import loading  # noqa: PLC0415  torch is for the replica alone

    crew = start_crew(settings, configure_logs) if settings.model.tensor_parallel > 1 else None
    return loading.load_engine(settings, progress, crew)


def find_whereabouts() -> Whereabouts:
    """Called in the replica: where it runs, and what Serve calls it."""
    return Whereabouts(
        replica_id=str(serve.get_replica_context().replica_id.unique_id), address=ray.util.get_node_ip_address()
    )
