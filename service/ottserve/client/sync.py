"""The blocking client. Safe to share among threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ottserve.client import messages
from ottserve.client.connection import CHANNEL_OPTIONS, DEFAULT_TARGET, SERVICE, Tls, call_metadata
from ottserve.client.errors import NotFound, from_broken_stream, from_rpc_error
from ottserve.client.retry import RetryPolicy
from ottserve.client.types import Answer, Chat, Chunk, ModelInfo, Options, Prompt, ReplicaLoad, ServerInfo, Tokens
from ottserve.v1 import generation_pb2 as pb
from ottserve.v1.generation_pb2_grpc import GenerationServiceStub

Result = TypeVar("Result")


class _Responses(Protocol):
    """A server's stream of messages, as grpc hands it out."""

    def __iter__(self) -> Iterator[pb.GenerateStreamResponse]: ...
    def __next__(self) -> pb.GenerateStreamResponse: ...
    def cancel(self) -> bool: ...


class Client:
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
        if tls:
            self._channel = grpc.secure_channel(target, tls.credentials(), CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
        self._stub = GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = call_metadata(token)
        self._retry = retry or RetryPolicy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in progress are cancelled."""
        self._channel.close()

    def generate(self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None) -> Answer:
        """The whole answer."""
        request = messages.generate_request(prompt, options or Options())
        return messages.read_answer(self._call(self._stub.Generate, request, timeout_s))

    def stream(self, prompt: Prompt, options: Options | None = None, timeout_s: float | None = None) -> Iterator[Chunk]:
        """The answer as it appears. Closing the iterator cancels the call. Nothing is tried again once text came."""
        request = messages.generate_request(prompt, options or Options())
        responses, first = self._attempt(lambda: self._start_stream(request, timeout_s))
        try:
            yield messages.read_chunk(first)
            for response in responses:
                yield messages.read_chunk(response)
        except grpc.RpcError as error:
            raise from_broken_stream(error) from error
        finally:
            responses.cancel()

    def tokenize(self, source: str | Chat, add_special_tokens: bool | None = None) -> Tokens:
        """The token ids that `generate` would use."""
        response = self._call(self._stub.Tokenize, messages.tokenize_request(source, add_special_tokens))
        return Tokens(tuple(response.token_ids), response.text)

    def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool | None = None) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._stub.Detokenize, request).text

    def abort(self, request_id: str) -> bool:
        """End a live request; whether there was one. Raises Unavailable where that cannot be told now."""
        return self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id)).found

    def model_info(self) -> ModelInfo:
        """What the model is."""
        return messages.read_model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        """The settings in effect."""
        return messages.read_server_info(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def load(self) -> tuple[ReplicaLoad, ...]:
        """The state of every replica."""
        return messages.read_load(self._call(self._stub.GetLoad, pb.GetLoadRequest()))

    def flush_cache(self) -> int:
        """Drop unused prefix pages; how many there were."""
        return self._call(self._stub.FlushCache, pb.FlushCacheRequest()).num_pages_dropped

    def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the service says that it serves. Raises `Unavailable` when nobody answers."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = self._health.Check(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if isinstance(typed := from_rpc_error(error), NotFound):
                return False
            raise typed from error
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _call(self, method: Callable[..., Result], request: object, timeout_s: float | None = None) -> Result:
        return self._attempt(lambda: method(request, timeout=timeout_s, metadata=self._metadata))

    def _start_stream(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> tuple[_Responses, pb.GenerateStreamResponse]:
        """The stream and its first message: until that has come, nothing is lost by another try."""
        responses = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        return responses, next(responses)

    def _attempt(self, attempt: Callable[[], Result]) -> Result:
        num_attempts = 0
        while True:
            try:
                return attempt()
            except grpc.RpcError as error:
                num_attempts += 1
                typed = from_rpc_error(error)
                delay_s = self._retry.delay_s(typed, num_attempts)
                if delay_s is None:
                    raise typed from error
            time.sleep(delay_s)
