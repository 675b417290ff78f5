"""Ray Serve's part in routing: it sends a task to the replica that the task names. Decides nothing by itself.

Also reaches replicas that Serve no longer counts, since they take nothing new, while they finish what they have.
Set `ray_environment.RAY_ENVIRONMENT` before importing this.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from typing import Any

from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

MAX_LEAVING = 64  # remembered; those that are gone are forgotten when they are asked, or when so many others have left

_ROUTERS: dict[str, NamedReplicaRouter] = {}  # of this process by deployment: Serve makes them and hands them to nobody


class NamedReplicaRouter(RequestRouter):
    """The named replica first; after it, or without a name, any. Only calls with a task come here, not broadcasts."""

    def initialize_state(self) -> None:
        """Called by Serve once. Serve hands the class around by value, with globals of its own: so by its name here."""
        importlib.import_module("ottserve.service.named_replica")._ROUTERS[str(self._deployment_id)] = self

        self.leaving: dict[Any, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with those that take tasks."""
        known = self.leaving | dict(self.curr_replicas)
        super().update_replicas(replicas)
        gone = {replica_id: replica for replica_id, replica in known.items() if replica_id not in self.curr_replicas}
        self.leaving = dict(list(gone.items())[-MAX_LEAVING:])

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


async def ask_leaving(handle: DeploymentHandle, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """What replicas answer that take no more tasks, or a TimeoutError of each that does not in time.

    None are known where Serve routes by itself.
    """
    router = _ROUTERS.get(str(handle.deployment_id))
    if router is None:
        return []
    options = handle.handle_options.copy_and_update(method_name=method, stream=False)

    async def ask(replica_id: Any, replica: RunningReplica) -> Any:
        metadata = get_request_metadata(handle.init_options, options)
        request = PendingRequest(args=list(args), kwargs={}, metadata=metadata)
        try:
            result: ReplicaResult = replica.try_send_request(request, with_rejection=False)
            return await asyncio.wait_for(result.get_async(), timeout_s)
        except TimeoutError as error:
            return error
        except Exception:  # noqa: BLE001  it has ended, and there are many ways to learn of it
            router.leaving.pop(replica_id, None)
            return None

    answers = await asyncio.gather(*(ask(*each) for each in router.leaving.items()))
    return [answer for answer in answers if answer is not None]
