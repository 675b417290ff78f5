"""What goes back to a caller: one JSON object, or a stream of server-sent events. Knows no endpoint."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Send

from ottserve.service.http.errors import Refusal

JSON = "application/json"
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy that gathers a stream makes it none
}
DONE = "[DONE]"


def to_json(value: object) -> bytes:
    """Compact, and in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Reply:
    """Sends at most one answer. Sending waits for a slow reader, so that nothing gathers here.

    Attributes:
        headers: of the answer, until it has begun.
    """

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self.headers = headers
        self._send = send
        self._streams = False

    @property
    def has_begun(self) -> bool:
        """Whether a stream has begun."""
        return self._streams

    async def whole(self, content: dict[str, Any], status: int = 200) -> None:
        """The answer is this object."""
        body = to_json(content)
        await self._begin(status, {"content-type": JSON, "content-length": str(len(body))})
        await self._body(body, more=False)

    async def event(self, content: dict[str, Any]) -> None:
        """The next event of a stream."""
        if not self._streams:
            self._streams = True
            await self._begin(200, EVENTS)
        await self._body(b"data: " + to_json(content) + b"\n\n")

    async def done(self) -> None:
        """The stream has come to its end."""
        await self._body(f"data: {DONE}\n\n".encode(), more=False)

    async def refuse(self, refusal: Refusal, status: int | None = None) -> None:
        """An error: with a status of its own, or, where a stream has begun, as its last event."""
        if self._streams:
            await self.event(refusal.body)
            await self._body(b"", more=False)
        else:
            self.headers |= refusal.headers
            await self.whole(refusal.body, status or refusal.status)

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        raw = Headers(self.headers | headers).raw
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, content: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
