"""Pieces → the answer of a call, whole or as a stream of events. Knows no endpoint."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing

from ottserve.service.accounts import Call
from ottserve.service.http.pieces import Piece, PromptAnswers
from ottserve.service.http.reply import Reply
from ottserve.service.http.requests import GenerationBody, StreamOptions
from ottserve.service.http.shapes import Json, Shape
from ottserve.service.http.usage import UsageCount
from ottserve.workers.api import invalid


class Answer:
    """What one call gets."""

    def __init__(
        self, call: Call, body: GenerationBody, shape: Shape, model: str, prompts: Sequence[PromptAnswers]
    ) -> None:
        """Raises InvalidField for options of a stream where none is asked for."""
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "set", "only with stream: true")
        self._call = call
        self._options = body.stream_options or StreamOptions()
        self._streams = body.stream
        self._shape = shape
        self._prompts = prompts
        self._usage = UsageCount(prompts)
        self._envelope = {"id": shape.prefix + call.request_id, "created": int(time.time()), "model": model}

    async def send(self, pieces: AsyncGenerator[Piece, None], reply: Reply) -> None:
        """Sends what comes, and tells the call's account of every end."""
        async with aclosing(pieces):
            await (self._send_events(pieces, reply) if self._streams else self._send_whole(pieces, reply))

    async def _send_whole(self, pieces: AsyncIterable[Piece], reply: Reply) -> None:
        gathered: defaultdict[int, list[Piece]] = defaultdict(list)
        async for piece in pieces:
            self._note(piece)
            gathered[piece.choice].append(piece)
        choices = [self._shape.whole(gathered[choice]) for choice in sorted(gathered)]
        about = {"object": self._shape.whole_object, "choices": choices, "usage": self._usage.in_all()}
        await reply.whole(self._envelope | about)

    async def _send_events(self, pieces: AsyncIterable[Piece], reply: Reply) -> None:
        """Nothing is sent before the first piece: until then an error has a status of its own."""
        async for piece in pieces:
            if not reply.has_begun:
                await self._open(reply)
            self._note(piece)
            await self._event([self._shape.event(piece)], reply)
        if self._options.include_usage:
            await self._event([], reply, self._usage.in_all())
        await reply.done()

    async def _open(self, reply: Reply) -> None:
        for prompt in self._prompts:
            for choice in prompt.choices:
                if opening := self._shape.opening(choice):
                    await self._event([opening], reply)

    async def _event(self, choices: Sequence[Json], reply: Reply, usage: Json | None = None) -> None:
        about: Json = {"object": self._shape.event_object, "choices": choices}
        if self._options.include_usage:
            about["usage"] = self._usage.so_far() if self._options.continuous_usage_stats and usage is None else usage
        await reply.event(self._envelope | about)

    def _note(self, piece: Piece) -> None:
        self._usage.add(piece)
        if piece.finish is not None:
            count = self._usage
            self._call.finished(piece.finish.reason.value, count.num_prompt, count.num_completion)
