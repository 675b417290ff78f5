"""Faults done to a real service: what callers see of them, and how long it takes to recover."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from ottserve.loadtest import scaling
from ottserve.loadtest.faults import callers, memory, processes, replicas
from ottserve.loadtest.local import LocalService
from ottserve.loadtest.observe import NUM_REPLICAS, Times, connect, whole

SETTINGS = scaling.settings(NUM_REPLICAS) | {"scheduler__max_waiting": 28}
ENVIRONMENT = memory.ENVIRONMENT

FAULTS: dict[str, Callable[[LocalService], Awaitable[Times]]] = {
    "all-cancelled": callers.all_cancelled,
    "all-aborted": callers.all_aborted,
    "out-of-memory": memory.out_of_memory,
    "replicas-killed": replicas.killed,
    "replicas-hung": replicas.hung,
    "one-replica-hung": replicas.one_hung,
    "load-rises-and-goes": functools.partial(scaling.rise_and_go, least=NUM_REPLICAS),
    "gateway-killed": processes.gateway_killed,
    "controller-killed": processes.controller_killed,
    "terminated": processes.terminated,  # the last one: nothing is left after it
}


async def do(name: str, service: LocalService) -> Times:
    """One of `FAULTS` to a service that has recovered from those before.

    Raises:
        ContractBroken: a caller saw what must never be seen, or it took too long.
    """
    async with connect(service) as client:
        await whole(client, service)
    return await FAULTS[name](service)
