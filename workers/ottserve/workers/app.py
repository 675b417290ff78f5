"""Settings → the replica's deployment in a Ray Serve application. Imports no torch until an engine loads.

Serve's environment flags have to be set before this module is imported.
"""

from __future__ import annotations

from pydantic import Field
from ray import serve
from ray.serve import Application

from ottserve.workers.engine_thread import EngineLike, Progress
from ottserve.workers.replica import Replica
from ottserve.workers.settings import EngineSettings, Section

NAME = "replica"


class DeploymentSettings(Section):
    """How many replicas run, on what, and how Serve watches them."""

    num_replicas: int = Field(1, ge=1, le=1024, description="Replicas, each with a model and a cache of its own.")
    num_cpus: float = Field(1.0, ge=0, description="CPU cores that Ray sets aside for a replica.")
    num_gpus: float | None = Field(None, ge=0, description="GPUs of a replica; default 1 where it computes on one.")
    stall_s: float = Field(120.0, gt=0, description="Work pending and no step for so long: the replica is replaced.")
    grace_s: float = Field(60.0, ge=0, description="Time for running requests to finish when a replica ends.")
    health_period_s: float = Field(1.0, gt=0, description="Serve asks a replica for its health this often.")


def replica_application(engine: EngineSettings, deployment: DeploymentSettings, num_gpus: float) -> Application:
    """The replicas, bound to their settings.

    Args:
        engine: what each replica starts with.
        deployment: how many there are and how they are watched.
        num_gpus: GPUs of one replica, where `deployment.num_gpus` does not say.
    """
    scheduler = engine.scheduler
    options = {
        "num_cpus": deployment.num_cpus,
        "num_gpus": num_gpus if deployment.num_gpus is None else deployment.num_gpus,
    }
    described = serve.deployment(
        name=NAME,
        num_replicas=deployment.num_replicas,
        ray_actor_options=options,
        # Admission is the gateway's and the scheduler's: Serve must never be the one that holds a request back,
        # nor keep an abort or a question of health from getting through.
        max_ongoing_requests=2 * (scheduler.max_running + scheduler.max_waiting) + 64,
        graceful_shutdown_timeout_s=deployment.grace_s + 5,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=deployment.health_period_s,
        health_check_timeout_s=30,
        max_constructor_retry_count=1,
    )(Replica)
    return described.bind(engine, load_engine, replica_id, deployment.stall_s)


def load_engine(settings: EngineSettings, progress: Progress) -> EngineLike:
    """Called in the replica: only there is torch imported."""
    from ottserve.workers.engine import loading  # noqa: PLC0415  torch is for the replica alone

    return loading.load_engine(settings, progress)


def replica_id() -> str:
    """Called in the replica: what Serve calls it."""
    return str(serve.get_replica_context().replica_id.unique_id)
