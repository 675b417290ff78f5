"""The asyncio client. Use it on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ottserve.client import messages
from ottserve.client.connection import DEFAULT_TARGET, SERVICE, Tls, async_channel, call_metadata
from ottserve.client.errors import NotFound, from_broken_stream, from_rpc_error
from ottserve.client.retry import RetryPolicy
from ottserve.client.types import Answer, Chat, Chunk, ModelInfo, Options, Prompt, ReplicaLoad, ServerInfo, Tokens
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1.generation_pb2_grpc import GenerationServiceStub

Result = TypeVar("Result")
StreamCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]


class AsyncClient:
    """A connection to a gateway. Every method raises `ClientError`; `timeout_s` is the deadline of one attempt."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`target` is host:port; with `tls` the channel is encrypted, `token` goes as a bearer token."""
        self._channel = async_channel(target, tls)
        self._stub = GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = call_metadata(token)
        self._retry = retry or RetryPolicy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in progress are cancelled."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None) -> Answer:
        """The whole answer. Cancelling the coroutine stops the work on the server."""
        request = messages.generate_request(prompt, options or Options())
        return messages.read_answer(await self._call(self._stub.Generate, request, timeout_s))

    async def stream(
        self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it appears. Closing the generator cancels the call. Nothing is tried again once text came."""
        request = messages.generate_request(prompt, options or Options())
        call, first = await self._attempt(lambda: self._start_stream(request, timeout_s))
        try:
            yield messages.read_chunk(first)
            async for response in call:
                yield messages.read_chunk(response)
        except grpc.RpcError as error:
            raise from_broken_stream(error) from error
        finally:
            call.cancel()

    async def tokenize(self, source: str | Chat, add_special_tokens: bool | None = None) -> Tokens:
        """The token ids that `generate` would use."""
        response = await self._call(self._stub.Tokenize, messages.tokenize_request(source, add_special_tokens))
        return Tokens(tuple(response.token_ids), response.text)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool | None = None) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def abort(self, request_id: str) -> bool:
        """End a live request; whether there was one. Raises Unavailable where that cannot be told now."""
        return (await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))).found

    async def model_info(self) -> ModelInfo:
        """What the model is."""
        return messages.read_model_info(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        """The settings in effect."""
        return messages.read_server_info(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    async def load(self) -> tuple[ReplicaLoad, ...]:
        """The state of every replica."""
        return messages.read_load(await self._call(self._stub.GetLoad, pb.GetLoadRequest()))

    async def flush_cache(self) -> int:
        """Drop unused prefix pages; how many there were."""
        return (await self._call(self._stub.FlushCache, pb.FlushCacheRequest())).num_pages_dropped

    async def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the service says that it serves. Raises `Unavailable` when nobody answers."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = await self._health.Check(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if isinstance(typed := from_rpc_error(error), NotFound):
                return False
            raise typed from error
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _call(
        self, method: Callable[..., Awaitable[Result]], request: object, timeout_s: float | None = None
    ) -> Result:
        return await self._attempt(lambda: method(request, timeout=timeout_s, metadata=self._metadata))

    async def _start_stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> tuple[StreamCall, pb.GenerateStreamResponse]:
        """The stream and its first message: until that has come, nothing is lost by another try."""
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        return call, await anext(aiter(call))

    async def _attempt(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        num_attempts = 0
        while True:
            try:
                return await attempt()
            except grpc.RpcError as error:
                num_attempts += 1
                typed = from_rpc_error(error)
                delay_s = self._retry.delay_s(typed, num_attempts)
                if delay_s is None:
                    raise typed from error
            await asyncio.sleep(delay_s)
