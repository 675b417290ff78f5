"""Several models behind one gateway, each with replicas of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ottserve.service.replicas import AllReplicas
from ottserve.service.server import GatewayServer
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1 import generation_pb2_grpc
from ottserve.workers import api

READY = health_pb2.HealthCheckRequest(service="ottserve.v1.GenerationService")


def named(replicas: Any, name: str) -> Any:
    """The fake replicas of a model of this name."""
    model = replace(replicas.info_.model, name=name)
    loads = tuple(replace(load, replica_id=f"{name}-0") for load in replicas.loads)
    return type(replicas)(info_=replace(replicas.info_, model=model), loads=loads)


@pytest.fixture
def models(replicas: Any) -> tuple[Any, Any]:
    return named(replicas, "large"), named(replicas, "small")


@pytest.fixture
async def server(models: Any, settings_for_ray: Any, until: Callable[..., Any]) -> AsyncIterator[GatewayServer]:
    """A gateway with both models ready."""
    started = GatewayServer(settings_for_ray, *models)
    await started.start()
    await until(lambda: started.phase.name == "READY" and len(started._readiness.all_known()) == 2)
    yield started
    await started.close()


@pytest.fixture
async def channel(server: GatewayServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened


@pytest.fixture
def stub(channel: Any) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)


def request(model: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", model=model, stops=pb.StopParams(max_new_tokens=2))


@pytest.mark.parametrize(("name", "counts"), [("large", (1, 0)), ("small", (0, 1)), ("", (1, 0))])
async def test_a_request_goes_to_the_model_it_names(stub: Any, models: Any, name: str, counts: tuple[int, int]) -> None:
    await stub.Generate(request(name))
    assert tuple(len(model.tasks) for model in models) == counts
    described = await stub.GetModelInfo(pb.GetModelInfoRequest(model=name))
    assert described.model == (name or "large")


async def test_another_name_is_not_found(stub: Any, refusal: Any, models: Any) -> None:
    for call in (
        stub.Generate(request("medium")),
        stub.GetModelInfo(pb.GetModelInfoRequest(model="medium")),
        stub.Tokenize(pb.TokenizeRequest(text="hi", model="medium")),
    ):
        told = await refusal(call)
        assert told.code == grpc.StatusCode.NOT_FOUND
        assert told.message == "model 'medium' is not served here, 'large', 'small' are"
    assert not any(model.tasks for model in models)


async def test_all_replicas_are_told_of(stub: Any) -> None:
    loads = await stub.GetLoad(pb.GetLoadRequest())
    assert [load.replica_id for load in loads.replicas] == ["large-0", "small-0"]


async def test_a_lost_model_takes_no_other_along(stub: Any, channel: Any, models: Any) -> None:
    models[0].loads = ()
    code = None
    while code is None:
        try:
            await stub.Generate(request("large"))
        except grpc.aio.AioRpcError as error:
            code = error.code()
    assert code == grpc.StatusCode.UNAVAILABLE
    await stub.Generate(request("small"))
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(READY)).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(READY)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    models[1].loads = ()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_unknown_name_may_be_that_of_a_model_that_loads(
    models: Any, settings_for_ray: Any, refusal: Any, until: Callable[..., Any]
) -> None:
    models[1].loads = ()
    server = GatewayServer(settings_for_ray, *models)
    await server.start()
    await until(lambda: server.phase.name == "READY")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        told = await refusal(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request("small")))
    await server.close()
    assert (told.code, told.message) == (grpc.StatusCode.UNAVAILABLE, "the model is loading")


class Refusing:
    """Replicas of which none answers."""

    async def load(self) -> tuple[api.LoadReport, ...]:
        raise api.Unavailable("no replica answers")

    async def abort(self, request_id: str) -> api.AbortResult:
        raise api.Unavailable("no replica answers")


class Having:
    """Replicas of which one has the request r."""

    async def abort(self, request_id: str) -> api.AbortResult:
        return api.AbortResult(request_id, request_id == "r")


async def test_who_does_not_answer_is_left_out_unless_nobody_does(models: Any) -> None:
    refusing: Any = Refusing()
    assert len(await AllReplicas((refusing, models[0])).load()) == 1
    with pytest.raises(api.Unavailable):
        await AllReplicas((refusing, refusing)).load()


async def test_an_abort_tells_of_none_only_where_all_have_answered() -> None:
    refusing: Any = Refusing()
    having: Any = Having()
    assert (await AllReplicas((refusing, having)).abort("r")).found
    assert not (await AllReplicas((having, having)).abort("gone")).found
    with pytest.raises(api.Unavailable):
        await AllReplicas((having, refusing)).abort("gone")


async def test_the_page_of_readiness_tells_of_each_model(server: GatewayServer, models: Any, until: Any) -> None:
    url = f"http://127.0.0.1:{server.metrics_port}/ready"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            facts = await answer.json()
            assert (answer.status, facts["models"]) == (200, {"large": "ready", "small": "ready"})
        models[0].loads = ()
        await until(lambda: server._readiness.phases["large"].name == "NO_REPLICA")
        async with session.get(url) as answer:
            told = {"large": "no replica answers", "small": "ready"}
            assert (answer.status, await answer.json()) == (503, {"reason": "no replica answers", "models": told})
