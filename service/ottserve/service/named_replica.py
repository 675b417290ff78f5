"""Ray Serve's part in routing: it sends a task to the replica that the task names. Decides nothing by itself.

Set `ray_environment.RAY_ENVIRONMENT` before importing this.
"""

from __future__ import annotations

import importlib
import random

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_ROUTERS: dict[str, NamedReplicaRouter] = {}  # of this process by deployment: Serve makes them and hands them to nobody


class NamedReplicaRouter(RequestRouter):
    """The named replica first; after it, or without a name, any. Only calls with a task come here, not broadcasts."""

    def initialize_state(self) -> None:
        """Called by Serve once. Serve hands the class around by value, with globals of its own: so by its name here."""
        importlib.import_module("ottserve.service.named_replica")._ROUTERS[str(self._deployment_id)] = self

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, tried in turn."""
        name = ""
        if pending_request:
            pending_request.routing_context.should_backoff = True
            name = pending_request.args[0].replica_id
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id != name]
        random.shuffle(others)
        return [named, *([replica] for replica in others)]


def roster(handle: DeploymentHandle) -> frozenset[str] | None:
    """Ids of the replicas that take requests now; None where Serve routes by itself."""
    router = _ROUTERS.get(str(handle.deployment_id))
    return frozenset(replica_id.unique_id for replica_id in router.curr_replicas) if router else None
