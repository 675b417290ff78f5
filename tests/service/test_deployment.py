"""The gateway in a real Ray Serve, in front of a toy engine in another process."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ottserve.service.ray_environment import RAY_ENVIRONMENT
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1 import generation_pb2_grpc
from ottserve.workers import api

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Engine:
    """Counts, 5 ms a token, and notes in a file how far each request came."""

    def __init__(self, info: api.ReplicaInfo, load: api.LoadReport, folder: str) -> None:
        self._info, self._load, self._folder = info, load, Path(folder)
        (self._folder / "pid").write_text(str(os.getpid()))

    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        if task.sampling.top_k == 7:
            raise api.QueueFull("full", 70)
        num_tokens = task.stops.max_new_tokens
        try:
            for i in range(num_tokens):
                await asyncio.sleep(0.005)
                usage = api.Usage(len(task.prompt_ids), 0, i + 1)
                end = api.Finish(api.FinishReason.LENGTH, usage, api.Timings(0, 0, 0, 0), task.sampling.seed)
                yield api.TextChunk(task.request_id, f"{i} ", (i,), end if i + 1 == num_tokens else None)
        finally:
            (self._folder / task.request_id).write_text(str(i))

    async def abort(self, request_id: str) -> api.AbortResult:
        return api.AbortResult(request_id, request_id == "known")

    async def info(self) -> api.ReplicaInfo:
        return self._info

    async def load(self) -> api.LoadReport:
        return self._load

    async def metrics_address(self) -> str:
        return "10.0.0.7:9000"


class AbortableEngine(Engine):
    """Counts until it is aborted, and notes in a file on which replica."""

    def __init__(self, info: api.ReplicaInfo, load: api.LoadReport, folder: str) -> None:
        from ray import serve  # noqa: PLC0415 - the environment comes first

        super().__init__(info, load, folder)
        self._id = str(serve.get_replica_context().replica_id.unique_id)
        self._load = replace(load, replica_id=self._id)
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        (self._folder / f"{task.request_id}-at").write_text(self._id)
        aborted = self._aborted[task.request_id] = asyncio.Event()
        yield api.TextChunk(task.request_id, "0 ", (0,))
        await aborted.wait()
        timings, usage = api.Timings(0, 0, 0, 0), api.Usage(len(task.prompt_ids), 0, 1)
        yield api.TextChunk(task.request_id, "", (), api.Finish(api.FinishReason.ABORTED, usage, timings, 0))

    async def abort(self, request_id: str) -> api.AbortResult:
        aborted = self._aborted.pop(request_id, None)
        if aborted:
            aborted.set()
        return api.AbortResult(request_id, aborted is not None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One Ray for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "disabled"}).items():
            patch.setenv(name, value)
        import ray  # noqa: PLC0415 - the environment comes first
        from ray import serve  # noqa: PLC0415

        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 * 2**20, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield serve
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def port(cluster: Any, folder: Path, settings_for_ray: Any, described: Any, unused_tcp_port_factory: Any) -> int:
    """Starts the application once; returns the port of the gateway."""
    from ray import cloudpickle  # noqa: PLC0415

    from ottserve.service.deployment import gateway_application  # noqa: PLC0415 - the environment comes first

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    engine = cluster.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0}, health_check_period_s=1)
    settings = settings_for_ray.model_copy(update={"port": unused_tcp_port_factory()})
    cluster.run(gateway_application(settings, engine(Engine).bind(*described, str(folder))), name="o")
    return int(settings.port)


@pytest.fixture
async def stub(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await ready(channel)
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def ready(channel: grpc.aio.Channel, timeout_s: float = 30.0) -> None:
    request = health_pb2.HealthCheckRequest(service="ottserve.v1.GenerationService")
    async with asyncio.timeout(timeout_s):
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


def request(request_id: str, max_new_tokens: int, **fields: Any) -> pb.GenerateRequest:
    stops = pb.StopParams(max_new_tokens=max_new_tokens)
    return pb.GenerateRequest(text="hi", request_id=request_id, stops=stops, **fields)


async def test_answers_and_refusals_cross_the_cluster(stub: Any) -> None:
    answer = await stub.Generate(request("whole", 3))
    assert answer.samples[0].text == "0 1 2 "
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request("full", 3, sampling=pb.SamplingParams(top_k=7)))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert (await stub.Abort(pb.AbortRequest(request_id="known"))).found
    assert not (await stub.Abort(pb.AbortRequest(request_id="other"))).found
    assert len((await stub.GetLoad(pb.GetLoadRequest())).replicas) == 1


async def test_a_client_that_leaves_stops_the_replica(stub: Any, folder: Path, until: Any) -> None:
    call = stub.GenerateStream(request("left", 90))
    for _ in range(5):
        await call.read()
    call.cancel()
    await until((folder / "left").exists)
    assert int((folder / "left").read_text()) < 30


async def test_a_deadline_stops_the_replica(stub: Any, folder: Path, until: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request("late", 90), timeout=0.1)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until((folder / "late").exists)
    assert int((folder / "late").read_text()) < 60


async def test_a_killed_replica_breaks_its_streams_and_returns(stub: Any, folder: Path) -> None:
    """kill -9 with a stream running: UNAVAILABLE in less than 5 s, and the next request is served."""
    stream = aiter(stub.GenerateStream(request("broken", 90)))
    await anext(stream)
    began = time.monotonic()
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [message async for message in stream]
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "after the first token" in str(caught.value.details())
    assert time.monotonic() - began < 5
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await stub.Generate(request("again", 2), timeout=20)
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                await asyncio.sleep(0.1)
    assert answer.samples[0].text == "0 1 "


async def test_an_abort_reaches_a_replica_that_only_finishes_what_it_has(
    port: int, cluster: Any, folder: Path, settings_for_ray: Any, described: Any, unused_tcp_port: int
) -> None:
    """One of two replicas leaves, with a stream on each: both streams can still be aborted."""
    from ray.serve.config import RequestRouterConfig  # noqa: PLC0415 - the environment comes first

    from ottserve.service.deployment import gateway_application  # noqa: PLC0415
    from ottserve.service.named_replica import NamedReplicaRouter  # noqa: PLC0415

    engine = cluster.deployment(
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=NamedReplicaRouter),
    )(AbortableEngine)

    def run(num_replicas: int) -> None:
        application = engine.options(num_replicas=num_replicas).bind(*described, str(folder))
        cluster.run(application, name="engines", route_prefix=None)

    async def num_replicas() -> int:
        return len((await stub.GetLoad(pb.GetLoadRequest())).replicas)

    await asyncio.to_thread(run, 2)
    front = gateway_application(
        settings_for_ray.model_copy(update={"port": unused_tcp_port}),
        cluster.get_deployment_handle("AbortableEngine", "engines"),
    )
    await asyncio.to_thread(cluster.run, front, name="front", route_prefix=None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        await ready(channel)
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        names = ("one", "other")
        streams = [aiter(stub.GenerateStream(request(name, 90))) for name in names]
        for stream in streams:
            await anext(stream)
        assert len({(folder / f"{name}-at").read_text() for name in names}) == 2, "a stream on each replica"
        shrinking = asyncio.create_task(asyncio.to_thread(run, 1))
        async with asyncio.timeout(30):
            while await num_replicas() != 1:  # noqa: ASYNC110 - Serve tells of it
                await asyncio.sleep(0.05)
        for name, stream in zip(names, streams, strict=True):
            assert (await stub.Abort(pb.AbortRequest(request_id=name))).found, name
            *_, last = [message async for message in stream]
            assert last.finish.reason == pb.FINISH_REASON_ABORTED
            assert not (await stub.Abort(pb.AbortRequest(request_id=name))).found
        await shrinking


async def test_the_end_drains(stub: Any, cluster: Any) -> None:
    """A stream that runs when the application is deleted finishes. Keep this the last test."""
    stream = aiter(stub.GenerateStream(request("last", 90)))
    await anext(stream)
    deleting = asyncio.create_task(asyncio.to_thread(cluster.delete, "o"))
    messages = [message async for message in stream]
    assert messages[-1].finish.usage.num_completion_tokens == 90
    await deleting
