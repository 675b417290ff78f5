"""The replica that a task names is tried first, whatever Serve would think of it."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from ottserve.service.named_replica import NamedReplicaRouter

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
