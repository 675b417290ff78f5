"""`grpc.health.v1` against the life of the gateway."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

SERVICE = "ottserve.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def check(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def test_alive_while_loading_and_ready_later(start: Any, replicas: Any, until: Any) -> None:
    loads, replicas.loads = replicas.loads, ()
    gateway = await start(is_ready=False)
    assert (await gateway.health.Check(check(""))).status == SERVING
    assert (await gateway.health.Check(check(SERVICE))).status == NOT_SERVING
    replicas.loads = loads
    await until(lambda: gateway.server.phase.name == "READY")
    assert (await gateway.health.Check(check(SERVICE))).status == SERVING


async def test_an_unknown_service(gateway: Any, refusal: Any) -> None:
    assert (await refusal(gateway.health.Check(check("other")))).code == grpc.StatusCode.NOT_FOUND
    watch = gateway.health.Watch(check("other"))
    assert (await watch.read()).status == UNKNOWN


async def test_a_watch_follows_the_replicas(gateway: Any, replicas: Any) -> None:
    """A lost replica turns readiness off and a returned one on; the process stays alive throughout."""
    watch = gateway.health.Watch(check(SERVICE))
    statuses = [(await watch.read()).status]
    loads, replicas.loads = replicas.loads, ()
    statuses.append((await watch.read()).status)
    assert (await gateway.health.Check(check(""))).status == SERVING
    replicas.loads = loads
    statuses.append((await watch.read()).status)
    assert statuses == [SERVING, NOT_SERVING, SERVING]


async def test_a_drain_is_told_and_ends_the_watch(start: Any) -> None:
    gateway = await start()
    watches = [gateway.health.Watch(check(name)) for name in (SERVICE, "")]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    began = time.monotonic()
    await gateway.server.drain()
    assert time.monotonic() - began < 1.5, "open watches hold up the shutdown"
    assert (await watches[0].read()).status == NOT_SERVING
    assert [await watch.read() for watch in watches] == [grpc.aio.EOF, grpc.aio.EOF]


async def test_being_busy_is_being_ready(start: Any, replicas: Any) -> None:
    replicas.loads = tuple(replace(load, num_waiting=200, last_step_at=time.time() + 60) for load in replicas.loads)
    gateway = await start()
    await asyncio.sleep(0.1)
    assert (await gateway.health.Check(check(SERVICE))).status == SERVING


async def test_pending_work_without_a_step_is_not_ready(start: Any, replicas: Any, until: Any) -> None:
    quick = {"poll_interval_s": 0.02, "stall_s": 0.1}
    gateway = await start(readiness=quick)
    replicas.loads = tuple(replace(load, num_waiting=1) for load in replicas.loads)
    await until(lambda: gateway.server.phase.name == "STALLED")
    assert (await gateway.health.Check(check(SERVICE))).status == NOT_SERVING
    # Steps go on, however late the next poll is.
    replicas.loads = tuple(replace(load, last_step_at=time.time() + 60) for load in replicas.loads)
    await until(lambda: gateway.server.phase.name == "READY")


async def test_a_replica_that_does_not_answer_counts_as_none(start: Any, replicas: Any, until: Any) -> None:
    gateway = await start(readiness={"poll_interval_s": 0.02, "poll_timeout_s": 0.05})

    async def never() -> tuple[Any, ...]:
        await asyncio.sleep(60)
        return ()

    replicas.load = never
    await until(lambda: gateway.server.phase.name == "NO_REPLICA")


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_tells_the_services_where_switched_on(start: Any, reflection: bool) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: PLC0415

    gateway = await start(reflection=reflection)
    stub = reflection_pb2_grpc.ServerReflectionStub(gateway.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    if not reflection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        return
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
