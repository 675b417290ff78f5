"""Around every call by gRPC: its id, its outcome, and errors as statuses. Knows no parameter.

A call's id is the message's `request_id`, else `x-request-id` of the metadata, else drawn; it is sent back in the
initial metadata.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from ottserve.service import errors, validate
from ottserve.service.accounts import Accounts, Call
from ottserve.service.metrics import SERVICE
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api

REQUEST_ID = "x-request-id"
PREFIX = f"/{SERVICE.full_name}/"

Context = grpc.aio.ServicerContext[Message, Message]
Unary = Callable[[Message, Context], Awaitable[Message]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Streaming = Callable[[Message, Context], AsyncGenerator[Message, None]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of our service; health and reflection pass."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler
        method = handler_call_details.method.removeprefix(PREFIX)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(method, cast(Streaming, handler.unary_stream)),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, cast(Unary, handler.unary_unary)),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _unary(self, method: str, serve: Unary) -> Unary:
        async def call(request: Message, context: Context) -> Message:
            async with self._accounted(method, request, context) as call:
                response = await serve(request, context)
                _note_finish(call, response)
                return response

        return call

    def _streaming(self, method: str, serve: Streaming) -> Callable[[Message, Context], Awaitable[None]]:
        """Writes by itself, so that a cancel that hits a write closes the generator at once."""

        async def call(request: Message, context: Context) -> None:
            async with self._accounted(method, request, context) as call, aclosing(serve(request, context)) as messages:
                async for message in messages:
                    _note_finish(call, message)
                    await context.write(message)

        return call

    @asynccontextmanager
    async def _accounted(self, method: str, request: Message, context: Context) -> AsyncIterator[Call]:
        call = self._accounts.begin(method, uuid.uuid4().hex)
        try:
            _identify(call, request, context)
            await context.send_initial_metadata(((REQUEST_ID, call.request_id),))
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


def _identify(call: Call, request: Message, context: Context) -> None:
    """Settles the call's id and writes it into a message that has none. Raises InvalidField for an unusable one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID:
            call.request_id = validate.request_id(str(value), REQUEST_ID)
    if isinstance(request, pb.GenerateRequest):
        request.request_id = validate.request_id(request.request_id or call.request_id)
        call.request_id = request.request_id
