"""Around every call by gRPC: its id, its outcome, and errors as statuses. Knows no parameter.

A call's id is the message's `request_id`, else `x-request-id` of the metadata, else drawn; it is sent back in the
initial metadata.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from ottserve.service import errors, validate
from ottserve.service.accounts import Accounts, Call
from ottserve.service.callers import Caller, Callers
from ottserve.service.metrics import SERVICE
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api

REQUEST_ID = "x-request-id"
AUTHORIZATION = "authorization"
PREFIX = f"/{SERVICE.full_name}/"

Context = grpc.aio.ServicerContext[Message, Message]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Parse = Callable[[bytes], Message]
Unary = Callable[[Message, "CallContext"], Awaitable[Message]]
Streaming = Callable[[Message, "CallContext"], AsyncGenerator[Message, None]]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the servicer is told of a call beside its message, in place of gRPC's own context.

    Attributes:
        remaining_s: how long the caller waits, from when the call came; None for ever.
        traceparent: W3C trace context of the call, or empty.
    """

    caller: Caller
    remaining_s: float | None
    traceparent: str


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of our service; health and reflection pass, and need no token."""

    def __init__(self, accounts: Accounts, callers: Callers) -> None:
        self._accounts = accounts
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler
        method = handler_call_details.method.removeprefix(PREFIX)
        parse = cast(Parse, handler.request_deserializer)
        # Messages come as bytes: who may not call has none of them looked at, and what is no message is told as such.
        if handler.response_streaming:
            stream = self._streaming(method, parse, cast(Streaming, handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
        unary = self._unary(method, parse, cast(Unary, handler.unary_unary))
        return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)

    def _unary(self, method: str, parse: Parse, serve: Unary) -> Callable[[bytes, Context], Awaitable[Message]]:
        async def call(raw: bytes, context: Context) -> Message:
            async with self._accounted(method, context) as call:
                request, told = await self._received(call, raw, parse, context)
                response = await serve(request, told)
                _note_finish(call, response)
                return response

        return call

    def _streaming(self, method: str, parse: Parse, serve: Streaming) -> Callable[[bytes, Context], Awaitable[None]]:
        """Writes by itself, so that a cancel that hits a write closes the generator at once."""

        async def call(raw: bytes, context: Context) -> None:
            async with self._accounted(method, context) as call:
                request, told = await self._received(call, raw, parse, context)
                async with aclosing(serve(request, told)) as messages:
                    async for message in messages:
                        _note_finish(call, message)
                        await context.write(message)

        return call

    @asynccontextmanager
    async def _accounted(self, method: str, context: Context) -> AsyncIterator[Call]:
        call = self._accounts.begin(method, uuid.uuid4().hex, _metadata(context))
        try:
            yield call
        except asyncio.CancelledError:
            call.outcome = _outcome_of_leaving(context)
            raise
        except grpc.aio.InternalError as error:  # a write after the caller has gone
            call.outcome = _outcome_of_leaving(context)
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001 - nothing but the table's messages may reach a caller
            await context.abort_with_status(rpc_status.to_status(errors.status_of(self._accounts.refused(call, error))))
        finally:
            self._accounts.end(call)

    async def _received(self, call: Call, raw: bytes, parse: Parse, context: Context) -> tuple[Message, CallContext]:
        """The message and what came with it. Raises Unauthenticated before looking at either, and InvalidField."""
        remaining_s = context.time_remaining()
        metadata = _metadata(context)
        caller = self._callers.identify(metadata.get(AUTHORIZATION))
        if self._callers.are_told_apart:
            call.facts["caller"] = caller.name
        request = _identified(call, _parsed(raw, parse), metadata)
        await context.send_initial_metadata(((REQUEST_ID, call.request_id),))
        return request, CallContext(caller, remaining_s, call.traceparent)


def _metadata(context: Context) -> dict[str, str]:
    """Texts by key; those of one key are joined, as in HTTP."""
    metadata: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        metadata[key] = f"{metadata[key]}, {value!s}" if key in metadata else str(value)
    return metadata


def _parsed(raw: bytes, parse: Parse) -> Message:
    try:
        return parse(raw)
    except DecodeError as error:
        raise api.invalid(
            "message", f"{len(raw)} bytes", "a message of this method, as the contract writes it"
        ) from error


def _outcome_of_leaving(context: Context) -> str:
    """Whether the caller's time was up, or it left by itself."""
    remaining_s = context.time_remaining()
    is_late = remaining_s is not None and remaining_s <= 0
    return errors.TABLE[api.DeadlineExceeded].label if is_late else errors.CANCELLED


def _note_finish(call: Call, message: Message) -> None:
    """Takes note of how a generation ended."""
    if isinstance(message, pb.GenerateStreamResponse) and message.HasField("finish"):
        finish = message.finish
    elif isinstance(message, pb.GenerateResponse):
        finish = message.samples[0].finish
    else:
        return
    reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
    call.finished(reason, finish.usage.num_prompt_tokens, finish.usage.num_completion_tokens)


def _identified(call: Call, request: Message, metadata: Mapping[str, str]) -> Message:
    """Settles the call's id and writes it into a message that has none. Raises InvalidField for an unusable one."""
    if REQUEST_ID in metadata:
        call.request_id = validate.request_id(metadata[REQUEST_ID], REQUEST_ID)
    if isinstance(request, pb.GenerateRequest):
        request.request_id = validate.request_id(request.request_id or call.request_id)
        call.request_id = request.request_id
    return request
