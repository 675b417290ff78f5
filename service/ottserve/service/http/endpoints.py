"""OpenAI's endpoints, each a sentence: read, translate, generate, answer. Knows no socket and no JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ottserve.service.callers import Caller
from ottserve.service.generation import Generations
from ottserve.service.http import translate
from ottserve.service.http.answer import Answer
from ottserve.service.http.body import read
from ottserve.service.http.exchange import Visit, until_gone
from ottserve.service.http.merge import merged
from ottserve.service.http.pieces import Decode, PromptAnswers
from ottserve.service.http.prompts import Prompt
from ottserve.service.http.requests import ChatBody, CompletionBody, GenerationBody
from ottserve.service.http.shapes import ChatShape, CompletionShape, Shape
from ottserve.service.readiness import Readiness, ServedModel
from ottserve.service.validate import MAX_ID_CHARACTERS
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import invalid

MAX_CHOICES = 128

Authenticate = Callable[[str | None], Caller]
"""What a call has under `authorization`, if anything → who calls. Raises an `OttserveError` for one who must not."""


class Endpoints:
    """The answers of the interface. Each raises `OttserveError`s, which its exchange turns into refusals."""

    def __init__(
        self, generations: Generations, readiness: Readiness, authenticate: Authenticate, max_request_bytes: int
    ) -> None:
        self._generations = generations
        self._readiness = readiness
        self._authenticate = authenticate
        self._max_request_bytes = max_request_bytes
        self._started_at = int(time.time())

    async def models(self, visit: Visit) -> None:
        """GET /v1/models"""
        self._caller(visit)
        await visit.reply.whole(
            {"object": "list", "data": [self._described(served) for served in self._readiness.all_known()]}
        )

    async def model(self, visit: Visit) -> None:
        """GET /v1/models/{name}"""
        self._caller(visit)
        await visit.reply.whole(self._described(self._readiness.known(visit.request.path_params["name"])))

    async def completions(self, visit: Visit) -> None:
        """POST /v1/completions"""
        caller = self._caller(visit)
        body = await read(visit.request, CompletionBody, self._max_request_bytes)
        served = self._readiness.require(body.model)
        n = _num_samples(body, len(body.prompt))
        requests = [
            translate.completion_request(body, prompt, request_id)
            for prompt, request_id in zip(body.prompt, _request_ids(visit, len(body.prompt)), strict=True)
        ]
        prompts = [
            PromptAnswers(range(i * n, (i + 1) * n), _echo(body, prompt, served), translate.is_score(body))
            for i, prompt in enumerate(body.prompt)
        ]
        await self._answer(visit, body, CompletionShape(served.tokenizer.bytes), served, caller, requests, prompts)

    async def chat_completions(self, visit: Visit) -> None:
        """POST /v1/chat/completions"""
        caller = self._caller(visit)
        body = await read(visit.request, ChatBody, self._max_request_bytes)
        served = self._readiness.require(body.model)
        request = translate.chat_request(body, visit.call.request_id)
        prompts = [PromptAnswers(range(_num_samples(body, 1)))]
        await self._answer(visit, body, ChatShape(served.tokenizer.bytes), served, caller, [request], prompts)

    def _caller(self, visit: Visit) -> Caller:
        return self._authenticate(visit.request.headers.get("authorization"))

    async def _answer(
        self,
        visit: Visit,
        body: GenerationBody,
        shape: Shape,
        served: ServedModel,
        caller: Caller,
        requests: Sequence[pb.GenerateRequest],
        prompts: Sequence[PromptAnswers],
    ) -> None:
        if body.user is not None:
            visit.call.facts["user"] = body.user
        answer = Answer(visit.call, body, shape, served.info.model.name, prompts)
        streams = [
            prompt.pieces(
                self._generations.chunks(request, visit.timeout_s, prompt.accept, caller, visit.call.traceparent)
            )
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        pieces = streams[0] if len(streams) == 1 else merged(streams)
        await until_gone(visit.request.receive, answer.send(pieces, visit.reply))

    def _described(self, served: ServedModel) -> dict[str, Any]:
        model = served.info.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "ottserve",
            "max_model_len": model.context_length,
        }


def _num_samples(body: GenerationBody, num_prompts: int) -> int:
    """Of each prompt. Raises InvalidField."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise invalid("n", n, f"1 to {MAX_CHOICES}")
    if n * num_prompts > MAX_CHOICES:
        raise invalid("prompt", f"{num_prompts} prompts", f"at most {MAX_CHOICES} choices together, n={n} for each")
    return n


def _request_ids(visit: Visit, num_prompts: int) -> list[str]:
    """An id for each generation, by which it can be aborted: the call's, cut where its number would have no room."""
    call_id = visit.call.request_id
    if num_prompts == 1:
        return [call_id]
    numbers = [f"-{i}" for i in range(num_prompts)]
    return [call_id[: MAX_ID_CHARACTERS - len(number)] + number for number in numbers]


def _echo(body: CompletionBody, prompt: Prompt, served: ServedModel) -> Decode | None:
    """A text comes back as it was given, whatever its tokens would say."""

    async def text(token_ids: tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await served.tokenizer.decode(token_ids, body.skip_special_tokens)

    return text if body.echo else None
