"""One HTTP call from its first byte to its last: its id, its account, its deadline, and its end if the caller leaves.

Knows no endpoint. A call's id is `x-request-id`, else drawn; it is sent back under that name.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ottserve.service import errors, validate
from ottserve.service.accounts import Accounts, Call
from ottserve.service.http.body import TooLarge
from ottserve.service.http.errors import TOO_LARGE, refusal_of
from ottserve.service.http.reply import Reply
from ottserve.workers import api

REQUEST_ID = "x-request-id"
TIMEOUT = "x-request-timeout-ms"
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Visit:
    """What an endpoint gets of a call. `timeout_s`: how long the caller waits; None for ever."""

    call: Call
    request: Request
    reply: Reply
    timeout_s: float | None


Endpoint = Callable[[Visit], Awaitable[None]]


class CallerGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange(Response):
    """Runs an endpoint under an account. Whatever happens, the account ends and the work with it."""

    def __init__(self, accounts: Accounts, method: str, endpoint: Endpoint) -> None:
        super().__init__()
        self._accounts = accounts
        self._method = method
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call = self._accounts.begin(self._method, uuid.uuid4().hex, request.headers)
        reply = Reply(send, {REQUEST_ID: call.request_id})
        try:
            if REQUEST_ID in request.headers:
                call.request_id = validate.request_id(request.headers[REQUEST_ID], REQUEST_ID)
                reply.headers[REQUEST_ID] = call.request_id
            await self._in_time(call, request, reply)
        except asyncio.CancelledError:
            call.outcome = errors.CANCELLED
            raise
        except (CallerGone, ClientDisconnect):
            call.outcome = errors.CANCELLED
        except TooLarge as error:
            reply.headers["connection"] = "close"
            refusal = refusal_of(self._accounts.refused(call, error.refusal))
            await reply.refuse(refusal, TOO_LARGE)
        except Exception as error:  # noqa: BLE001 - nothing but the table's messages may reach a caller
            await reply.refuse(refusal_of(self._accounts.refused(call, error)))
        finally:
            self._accounts.end(call)

    async def _in_time(self, call: Call, request: Request, reply: Reply) -> None:
        timeout_s = _timeout_s(request)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._endpoint(Visit(call, request, reply, timeout_s))
        except TimeoutError:
            if limit.expired():
                raise api.DeadlineExceeded(f"the answer was not complete within {TIMEOUT}") from None
            raise


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, unless the caller leaves before its end: then it is cancelled. The request has been read.

    Raises CallerGone, and what the work raises.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGone
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _timeout_s(request: Request) -> float | None:
    """How long the caller waits; None for ever. Raises InvalidField."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_TIMEOUT_MS):
        raise api.invalid(TIMEOUT, given, f"milliseconds from 1 to {MAX_TIMEOUT_MS}")
    return int(given) / 1000
