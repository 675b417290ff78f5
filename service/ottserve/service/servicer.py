"""The methods of the contract, each a sentence. No logic: every step is a file of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ottserve.service import encode, validate
from ottserve.service.generation import Generations
from ottserve.service.interceptors import CallContext
from ottserve.service.readiness import Readiness
from ottserve.service.replicas import Replicas
from ottserve.service.settings import GatewaySettings
from ottserve.service.unknown_fields import refuse_unknown
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1 import generation_pb2_grpc as pb_grpc
from ottserve.workers.api import TextChunk

# ruff: noqa: N802 - gRPC names the methods


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Everything raised here is an `OttserveError`, which the interceptor turns into a status."""

    def __init__(
        self,
        settings: GatewaySettings,
        replicas: Replicas,
        readiness: Readiness,
        generations: Generations,
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._readiness = readiness
        self._generations = generations

    async def Generate(  # type: ignore[override] # the interceptor hands over its own context
        self, request: pb.GenerateRequest, context: CallContext
    ) -> pb.GenerateResponse:
        async with aclosing(self._chunks(request, context)) as chunks:
            return encode.whole_answer(request.request_id, [chunk async for chunk in chunks])

    async def GenerateStream(  # type: ignore[override] # as above
        self, request: pb.GenerateRequest, context: CallContext
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        async with aclosing(self._chunks(request, context)) as chunks:
            async for chunk in chunks:
                for message in encode.stream_messages(chunk):
                    yield message

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeResponse:
        tokenized = await validate.tokenized(request, self._readiness.require(request.model))
        return pb.TokenizeResponse(token_ids=tokenized.ids, text=tokenized.text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: object) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await validate.detokenized(request, self._readiness.require(request.model)))

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortResponse:
        request_id = validate.aborted_id(request)
        return pb.AbortResponse(request_id=request_id, found=await self._generations.abort(request_id, self._replicas))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.GetModelInfoResponse:
        served = self._readiness.known(request.model)
        validate.model_asked(request, served)
        return encode.model_info(served)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: object) -> pb.GetServerInfoResponse:
        refuse_unknown(request)
        return encode.server_info(self._readiness.known().info.server, self._settings)

    async def GetLoad(self, request: pb.GetLoadRequest, context: object) -> pb.GetLoadResponse:
        refuse_unknown(request)
        return encode.loads(await self._replicas.load())

    async def FlushCache(self, request: pb.FlushCacheRequest, context: object) -> pb.FlushCacheResponse:
        refuse_unknown(request)
        return pb.FlushCacheResponse(num_pages_dropped=await self._replicas.flush_cache())

    def _chunks(self, request: pb.GenerateRequest, context: CallContext) -> AsyncGenerator[TextChunk, None]:
        return self._generations.chunks(
            request, context.remaining_s, caller=context.caller, traceparent=context.traceparent
        )
