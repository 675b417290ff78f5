"""A gateway that answers with prepared words and fails as often as a test asks it to."""

# ruff: noqa: N802  the methods are named by gRPC
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ottserve.v1 import generation_pb2 as pb
from ottserve.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

FINISH = pb.Finish(
    reason=pb.FINISH_REASON_STOP_STRING,
    matched_stop=".",
    usage=pb.Usage(num_prompt_tokens=3, num_completion_tokens=2),
    seed=2**64 - 1,
    timings=pb.Timings(first_token=duration_pb2.Duration(nanos=250_000_000)),
)


class PreparedGateway(GenerationServiceServicer):
    """`failures` are raised one a call, first to last, before any answer; `break_with` after the first chunk."""

    def __init__(self) -> None:
        self.failures: list[tuple[grpc.StatusCode, list[Any]]] = []
        self.break_with: tuple[grpc.StatusCode, list[Any]] | None = None
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.hold_after_first_chunk = False
        self.stream_ended = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._take(request, context)
        return pb.GenerateResponse(request_id="r", samples=[pb.Sample(text="Hello.", token_ids=[5, 6], finish=FINISH)])

    def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._take(request, context)
        context.add_callback(self.stream_ended.set)
        yield pb.GenerateStreamResponse(request_id="r", chunk=pb.Chunk(text="Hel", token_ids=[5]))
        if self.hold_after_first_chunk:
            self._wait_for_cancel(context)
        if self.break_with:
            fail(context, *self.break_with)
        yield pb.GenerateStreamResponse(request_id="r", chunk=pb.Chunk(text="lo.", token_ids=[6]))
        yield pb.GenerateStreamResponse(request_id="r", finish=FINISH)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self._take(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2], text=request.text)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        self._take(request, context)
        return pb.DetokenizeResponse(text=str(list(request.token_ids)))

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self._take(request, context)
        return pb.AbortResponse(request_id=request.request_id, found=request.request_id == "live")

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        self._take(request, context)
        return pb.GetModelInfoResponse(
            model="m", eos_token_ids=[2], default_sampling=pb.DefaultSampling(temperature=0.5, top_k=3, top_p=1.0)
        )

    def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        self._take(request, context)
        return pb.GetServerInfoResponse(version="1", cache=pb.CacheInfo(policy="ott", k_bits=2))

    def GetLoad(self, request: pb.GetLoadRequest, context: grpc.ServicerContext) -> pb.GetLoadResponse:
        self._take(request, context)
        return pb.GetLoadResponse(replicas=[pb.ReplicaLoad(replica_id="x", num_running=1)])

    def FlushCache(self, request: pb.FlushCacheRequest, context: grpc.ServicerContext) -> pb.FlushCacheResponse:
        self._take(request, context)
        return pb.FlushCacheResponse(num_pages_dropped=4)

    def _take(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        if self.failures:
            fail(context, *self.failures.pop(0))

    @staticmethod
    def _wait_for_cancel(context: grpc.ServicerContext) -> None:
        while context.is_active():
            time.sleep(0.005)


def fail(context: grpc.ServicerContext, code: grpc.StatusCode, details: list[Any]) -> None:
    status = status_pb2.Status(code=code.value[0], message="refused")
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))


@pytest.fixture
def gateway() -> PreparedGateway:
    return PreparedGateway()


@pytest.fixture
def target(gateway: PreparedGateway) -> Iterator[str]:
    """Address of the prepared gateway."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_GenerationServiceServicer_to_server(gateway, server)
    checks = health.HealthServicer()
    checks.set("ottserve.v1.GenerationService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def retry_info() -> Any:
    """What a server attaches to say when to try again."""

    def make(seconds: float) -> error_details_pb2.RetryInfo:
        return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=int(seconds * 1e9)))

    return make
