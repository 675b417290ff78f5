"""The replica that a task names is tried first, whatever Serve would think of it."""

from __future__ import annotations

import asyncio
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from ottserve.service import named_replica
from ottserve.service.named_replica import MAX_LEAVING, NamedReplicaRouter, ask_leaving

REPLICAS: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]


def pending(name: str) -> Any:
    return SimpleNamespace(
        args=[SimpleNamespace(replica_id=name)], routing_context=SimpleNamespace(should_backoff=False)
    )


async def ranks(request: Any) -> list[list[str]]:
    router = NamedReplicaRouter.__new__(NamedReplicaRouter)
    chosen = await router.choose_replicas(REPLICAS, request)
    return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]


@pytest.mark.parametrize("name", "abc")
async def test_the_named_one_then_the_others(name: str) -> None:
    first, *others = await ranks(pending(name))
    assert first == [name]
    assert sorted(chain.from_iterable(others)) == sorted(set("abc") - {name})


@pytest.mark.parametrize("request_", [pending("gone"), pending(""), None])
async def test_any_where_none_of_that_name_is(request_: Any) -> None:
    assert sorted(chain.from_iterable(await ranks(request_))) == ["a", "b", "c"]


async def test_serve_waits_between_two_rounds() -> None:
    """Without this it would ask again and again, with no pause, while no replica takes the task."""
    request = pending("a")
    await ranks(request)
    assert request.routing_context.should_backoff


class Leaving:
    """A replica that answers a question with its name, after a while or never."""

    def __init__(self, name: str, after_s: float = 0.0, error: Exception | None = None) -> None:
        self.replica_id = name
        self._after_s, self._error = after_s, error

    def try_send_request(self, request: Any, with_rejection: bool) -> Any:
        self.asked = request.args
        return self

    async def get_async(self) -> str:
        await asyncio.sleep(self._after_s)
        if self._error:
            raise self._error
        return self.replica_id


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> NamedReplicaRouter:
    """One that Serve has made, for the deployment "d"."""
    router = NamedReplicaRouter.__new__(NamedReplicaRouter)
    router.leaving, router._replicas = {}, {}

    def keep(self: Any, replicas: list[Any]) -> None:
        self._replicas = {replica.replica_id: replica for replica in replicas}

    monkeypatch.setattr(RequestRouter, "update_replicas", keep)
    monkeypatch.setattr(named_replica, "_ROUTERS", {"d": router})
    monkeypatch.setattr(named_replica, "get_request_metadata", lambda init, options: options)
    return router


async def ask(deployment_id: str) -> list[Any]:
    options = SimpleNamespace(copy_and_update=lambda **changes: changes)
    handle: Any = SimpleNamespace(deployment_id=deployment_id, handle_options=options, init_options=None)
    return await ask_leaving(handle, "abort", "r1", timeout_s=0.05)


async def test_who_has_left_can_be_asked_until_it_is_gone(router: NamedReplicaRouter) -> None:
    stays, leaves, dead, hung = Leaving("stays"), Leaving("leaves"), Leaving("dead", 0, OSError()), Leaving("hung", 60)
    everyone: list[Any] = [stays, leaves, dead, hung]
    router.update_replicas(everyone)
    assert await ask("d") == []
    router.update_replicas(everyone[:1])
    assert set(router.leaving) == {"leaves", "dead", "hung"}
    answer, late = await ask("d")
    assert answer == "leaves" and isinstance(late, TimeoutError)
    assert leaves.asked == ["r1"]
    assert set(router.leaving) == {"leaves", "hung"}, "one that is gone is not asked again"
    router.update_replicas(everyone[:2])
    assert set(router.leaving) == {"hung"}, "one that is back has not left"
    assert await ask("another deployment") == []


async def test_only_so_many_that_left_are_remembered(router: NamedReplicaRouter) -> None:
    for number in range(MAX_LEAVING + 2):
        replica: Any = Leaving(str(number))
        router.update_replicas([replica])
    router.update_replicas([])
    assert list(router.leaving) == [str(number) for number in range(2, MAX_LEAVING + 2)]
