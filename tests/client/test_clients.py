"""Both clients against a prepared gateway: the same answers, the same typed errors, the same tries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from ottserve import client as oc

CODE = grpc.StatusCode
Call = Callable[..., Any]


class Blocking:
    """Gives the asyncio client the face of the blocking one, so that each test runs over both."""

    def __init__(self, target: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(target, options))

    async def _connect(self, target: str, options: dict[str, Any]) -> oc.AsyncClient:
        return oc.AsyncClient(target, **options)

    def __getattr__(self, name: str) -> Call:
        return lambda *arguments: self._runner.run(getattr(self._client, name)(*arguments))

    def stream(self, *arguments: Any) -> Iterator[oc.Chunk]:
        chunks = self._client.stream(*arguments)
        try:
            while True:
                try:
                    yield self._runner.run(anext(chunks))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(chunks.aclose())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=[oc.Client, Blocking], ids=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest, target: str) -> Iterator[Call]:
    """Makes clients of one kind and closes them."""
    clients: list[Any] = []

    def make(**options: Any) -> Any:
        clients.append(request.param(target, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_generate(connect: Call, gateway: Any) -> None:
    options = oc.Options(temperature=0.0, seed=7, max_new_tokens=2, stop=(".",), include_stop_text=True)
    answer = connect(token="secret").generate("Hi", options)
    assert (answer.text, answer.token_ids, answer.finish.reason) == ("Hello.", (5, 6), oc.FinishReason.STOP_STRING)
    assert (answer.finish.matched_stop, answer.finish.seed) == (".", 2**64 - 1)
    assert answer.finish.usage == oc.Usage(3, 0, 2)
    assert answer.finish.timings.first_token_s == 0.25
    sent = gateway.requests[0]
    assert (sent.text, sent.sampling.temperature, list(sent.stops.stop)) == ("Hi", 0.0, ["."])
    assert sent.sampling.HasField("temperature"), "0 is greedy, absence is the model's default"
    assert not sent.sampling.HasField("top_p")
    assert gateway.metadata["authorization"] == "Bearer secret"


def test_each_kind_of_prompt(connect: Call, gateway: Any) -> None:
    client = connect()
    client.generate(oc.Chat.user("Hi"))
    client.generate([1, 2])
    assert gateway.requests[0].chat.messages[0].content == "Hi"
    assert list(gateway.requests[1].token_ids.ids) == [1, 2]


def test_stream_concatenates_to_the_answer_and_ends_with_finish(connect: Call) -> None:
    chunks = list(connect().stream("Hi"))
    assert "".join(chunk.text for chunk in chunks) == "Hello."
    assert [chunk.finish is not None for chunk in chunks] == [False, False, True]


def test_unavailable_is_tried_again(connect: Call, gateway: Any) -> None:
    gateway.failures = [(CODE.UNAVAILABLE, [])] * 2
    assert connect(retry=oc.RetryPolicy(first_delay_s=0.01)).generate("Hi").text == "Hello."
    assert len(gateway.requests) == 3


def test_the_pause_that_the_server_asks_for_is_kept(connect: Call, gateway: Any, retry_info: Call) -> None:
    gateway.failures = [(CODE.RESOURCE_EXHAUSTED, [retry_info(0.3)])]
    client = connect(retry=oc.RetryPolicy(first_delay_s=0.01))
    began = time.monotonic()
    assert next(iter(client.stream("Hi"))).text == "Hel"
    assert time.monotonic() - began >= 0.3


def test_it_gives_up(connect: Call, gateway: Any) -> None:
    gateway.failures = [(CODE.UNAVAILABLE, [])] * 9
    with pytest.raises(oc.Unavailable):
        connect(retry=oc.RetryPolicy(max_attempts=3, first_delay_s=0.01)).generate("Hi")
    assert len(gateway.requests) == 3


def test_a_broken_stream_is_never_tried_again(connect: Call, gateway: Any) -> None:
    gateway.break_with = (CODE.UNAVAILABLE, [error_details_pb2.ErrorInfo(reason="STREAM_BROKEN")])
    with pytest.raises(oc.StreamBroken):
        list(connect().stream("Hi"))
    assert len(gateway.requests) == 1


def test_what_came_before_a_break_is_delivered(connect: Call, gateway: Any) -> None:
    gateway.break_with = (CODE.UNAVAILABLE, [])
    stream = connect().stream("Hi")
    assert next(stream).text == "Hel"
    with pytest.raises(oc.StreamBroken):
        next(stream)


def test_closing_a_stream_cancels_the_call(connect: Call, gateway: Any) -> None:
    gateway.hold_after_first_chunk = True
    stream = connect().stream("Hi")
    next(stream)
    stream.close()
    assert gateway.stream_ended.wait(2)


def test_refused_fields_are_named(connect: Call, gateway: Any) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="top_p", description="over 0 to 1, got 2")
    gateway.failures = [(CODE.INVALID_ARGUMENT, [error_details_pb2.BadRequest(field_violations=[violation])])]
    with pytest.raises(oc.InvalidArgument) as caught:
        connect().generate("Hi")
    assert caught.value.fields == (oc.FieldProblem("top_p", "over 0 to 1, got 2"),)
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.UNAUTHENTICATED, oc.Unauthenticated),
        (CODE.NOT_FOUND, oc.NotFound),
        (CODE.ALREADY_EXISTS, oc.AlreadyExists),
        (CODE.DEADLINE_EXCEEDED, oc.DeadlineExceeded),
        (CODE.INTERNAL, oc.InternalError),
    ],
)
def test_each_status_is_a_class(connect: Call, gateway: Any, code: CODE, kind: type[oc.ClientError]) -> None:
    gateway.failures = [(code, [])]
    with pytest.raises(kind) as caught:
        connect().generate("Hi")
    assert caught.value.code is code


def test_the_other_calls(connect: Call) -> None:
    client = connect()
    assert client.tokenize("Hi") == oc.Tokens((1, 2), "Hi")
    assert client.detokenize((3, 4)) == "[3, 4]"
    assert (client.abort("live"), client.abort("gone")) == (True, False)
    assert client.model_info().eos_token_ids == (2,)
    assert client.server_info().cache.policy == "ott"
    assert client.load()[0].num_running == 1
    assert client.load()[0].last_step_at is None
    assert client.flush_cache() == 4
    assert client.ready() is True


def test_nobody_there() -> None:
    with oc.Client("127.0.0.1:1", retry=oc.RetryPolicy(max_attempts=1)) as client, pytest.raises(oc.Unavailable):
        client.ready()
