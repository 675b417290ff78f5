"""Errors and cancels across a Serve handle, in Serve's local testing mode (no cluster)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentResponseGenerator

from ottserve.service import ray_replicas
from ottserve.service.ray_replicas import RayReplicas, as_ottserve_error
from ottserve.service.settings import RoutingSettings
from ottserve.workers import api


class Engine:
    """Counts like the fake of the other tests, and notes how far it came."""

    def __init__(self) -> None:
        self.num_made = 0
        self.is_closed = False

    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        try:
            for i in range(task.stops.max_new_tokens):
                await asyncio.sleep(0.001)
                if task.request_id == f"fail-{i}":
                    raise api.QueueFull("full", 70)
                self.num_made = i + 1
                yield api.TextChunk(task.request_id, f"{i} ", (i,))
        finally:
            self.is_closed = True

    async def progress(self) -> tuple[int, bool]:
        return self.num_made, self.is_closed


def task(request_id: str, num_tokens: int) -> api.GenerationTask:
    return api.GenerationTask(request_id, (1,), api.SamplingParams(), api.StopParams(num_tokens), received_at=0.0)


@pytest.fixture
def handle() -> Any:
    app = serve.deployment(max_ongoing_requests=100)(Engine).bind()
    return serve.run(app, _local_testing_mode=True)


@pytest.fixture
def replicas(handle: Any) -> RayReplicas:
    return RayReplicas(handle, RoutingSettings(), answer_timeout_s=5.0)


async def test_chunks_pass(replicas: RayReplicas) -> None:
    assert [chunk.text async for chunk in replicas.generate(task("r", 3))] == ["0 ", "1 ", "2 "]


@pytest.mark.parametrize("num_before", [0, 2])
async def test_our_errors_arrive_as_they_were_raised(replicas: RayReplicas, num_before: int) -> None:
    chunks = []
    with pytest.raises(api.QueueFull) as caught:
        async for chunk in replicas.generate(task(f"fail-{num_before}", 5)):
            chunks.append(chunk)
    assert type(caught.value) is api.QueueFull
    assert (caught.value.message, caught.value.retry_after_ms) == ("full", 70)
    assert len(chunks) == num_before


async def test_closing_the_stream_stops_the_work(replicas: RayReplicas, handle: Any) -> None:
    async with aclosing(replicas.generate(task("r", 1000))) as chunks:
        await anext(chunks)
    await asyncio.sleep(0.05)
    num_made, is_closed = await handle.progress.remote()
    assert is_closed
    assert num_made < 20


def task_error(cause: Exception) -> Exception:
    return RayTaskError("f", "Traceback: /secret/path.py", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), api.QueueFull),
        (ActorDiedError(), api.Unavailable),
        (OutOfMemoryError("killed on /secret/path.py"), api.Unavailable),
        (ActorUnavailableError("gone", None), api.Unavailable),
        (DeploymentUnavailableError(serve.exceptions.DeploymentID("d", "a")), api.Unavailable),
        (ReplicaUnavailableError("gone"), api.Unavailable),
        (RequestCancelledError("1"), api.Unavailable),
        (TimeoutError("late"), api.Unavailable),
        (task_error(api.StreamBroken("lost")), api.StreamBroken),
        (task_error(api.invalid("text", "x", "shorter")), api.InvalidField),
        (task_error(ValueError("/secret/path.py")), api.Internal),
        (KeyError("/secret/path.py"), api.Internal),
    ],
)
def test_every_error_of_ray_has_an_answer(error: Exception, kind: type[api.OttserveError]) -> None:
    told = as_ottserve_error(error)
    assert type(told) is kind
    assert "secret" not in str(told)


def test_a_delay_asked_for_by_a_replica_survives() -> None:
    told = as_ottserve_error(task_error(api.QueueFull("full", 70)))
    assert isinstance(told, api.QueueFull)
    assert told.retry_after_ms == 70


class Assigned:
    """What Serve hands out for a call that a replica has taken. Of `chunks` the last one never comes."""

    def __init__(self, *chunks: str) -> None:
        self.is_cancelled = False
        self.wait_was_cancelled = False
        self._chunks = list(chunks)
        self._ended = asyncio.Event()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._ended.set()

    async def __anext__(self) -> str:
        if self._chunks:
            return self._chunks.pop(0)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.wait_was_cancelled = True
            raise
        raise RequestCancelledError("1")


class OneCall:
    """A handle whose one call is what the test says, in Serve's own wrapping."""

    deployment_id = "none"

    def __init__(self) -> None:
        self.assigned: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.generate = SimpleNamespace(remote=self._remote)

    def options(self, **options: Any) -> Any:
        return self

    def _remote(self, task: api.GenerationTask) -> Any:
        metadata = RequestMetadata(request_id="1", internal_request_id="1")
        return DeploymentResponseGenerator(self.assigned, metadata, _is_router_running_in_separate_loop=False)


async def test_a_call_that_is_left_in_the_moment_it_is_assigned_is_cancelled() -> None:
    """Serve's own cancel passes over it: the replica would work to the end, and the call stay open for ever."""
    handle: Any = OneCall()
    call = Assigned()
    chunks = RayReplicas(handle, RoutingSettings(), answer_timeout_s=5.0).generate(task("r", 3))
    reader = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0.01)
    handle.assigned.set_result(call)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert call.is_cancelled


async def test_who_leaves_ends_the_call_and_not_the_wait_within_grpc() -> None:
    """A wait that is cancelled there never gives back its memory."""
    handle: Any = OneCall()
    call = Assigned("first")
    handle.assigned.set_result(call)
    chunks = RayReplicas(handle, RoutingSettings(), answer_timeout_s=5.0).generate(task("r", 3))
    assert await anext(chunks) == "first"
    reader = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert call.is_cancelled
    assert not call.wait_was_cancelled


class Late:
    """What Serve hands out for a broadcast to replicas of which some never answer."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.deployment_id = "none"

    def options(self, **options: Any) -> Any:
        return self

    def broadcast(self, method: str, *args: Any) -> Any:
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        return [SimpleNamespace(get_async=partial(self._give, answer)) for answer in self._answers]

    async def _give(self, answer: Any) -> Any:
        if answer is None:
            await asyncio.sleep(60)
        return answer


async def test_one_that_is_late_is_left_out() -> None:
    handle: Any = Late("10.0.0.1:1", None, "10.0.0.3:1")
    replicas = RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05)
    assert await replicas.metrics_addresses() == ("10.0.0.1:1", "10.0.0.3:1")


async def test_when_all_are_late_none_is_there() -> None:
    handle: Any = Late(None, None)
    with pytest.raises(api.Unavailable):
        await RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05).metrics_addresses()


class Nobody(Late):
    """The same where Serve knows of no replica."""

    def broadcast(self, method: str, *args: Any) -> Any:
        raise DeploymentUnavailableError(serve.exceptions.DeploymentID("d", "a"))


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What those answer that only finish what they have; for the test to fill. Serve's router knows of no other."""
    answers: list[Any] = []

    async def ask(handle: Any, method: str, request_id: str, timeout_s: float) -> list[Any]:
        return answers

    monkeypatch.setattr(ray_replicas, "ask_leaving", ask)
    monkeypatch.setattr(ray_replicas, "roster", lambda handle: frozenset())
    return answers


@pytest.mark.parametrize("found", [True, False])
async def test_an_abort_asks_those_that_left_where_no_other_has_it(left: list[Any], found: bool) -> None:
    left.append(api.AbortResult("r", found))
    handles: tuple[Any, ...] = Nobody(), Late(api.AbortResult("r", False))
    for handle in handles:
        replicas = RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05)
        assert await replicas.abort("r") == api.AbortResult("r", found)


async def test_one_that_left_and_is_late_may_have_it(left: list[Any]) -> None:
    left += [TimeoutError(), api.AbortResult("r", False)]
    handle: Any = Late(api.AbortResult("r", False))
    replicas = RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05)
    with pytest.raises(api.Unavailable, match="no replica answered in time"):
        await replicas.abort("r")
    left.append(api.AbortResult("r", True))
    assert await replicas.abort("r") == api.AbortResult("r", True)


async def test_where_nobody_is_nobody_has_it(left: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a replica keeps no abort from being told that nothing was found."""
    handle: Any = Nobody()
    replicas = RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05)
    assert await replicas.abort("r") == api.AbortResult("r", False)
    with pytest.raises(api.Unavailable, match="no replica answers"):
        await replicas.info()
    monkeypatch.setattr(ray_replicas, "roster", lambda handle: None)
    with pytest.raises(api.Unavailable):  # where it is not known who is there, somebody may be
        await replicas.abort("r")


async def test_an_abort_is_found_although_another_is_late() -> None:
    handle: Any = Late(None, api.AbortResult("r", True))
    replicas = RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05)
    assert await replicas.abort("r") == api.AbortResult("r", True)


async def test_what_nobody_found_may_be_with_one_that_is_late() -> None:
    """To say that nothing was found would tell a caller that it has ended, while it runs."""
    handle: Any = Late(api.AbortResult("r", False), None)
    with pytest.raises(api.Unavailable, match="no replica answered in time"):
        await RayReplicas(handle, RoutingSettings(), answer_timeout_s=0.05).abort("r")
