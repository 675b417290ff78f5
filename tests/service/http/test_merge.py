"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from ottserve.service.http.merge import merged

closed: list[str] = []


async def counting(name: str, fails_at: int = -1) -> AsyncGenerator[str, None]:
    try:
        for i in range(100):
            await asyncio.sleep(0)
            if i == fails_at:
                raise ZeroDivisionError
            yield f"{name}{i}"
    finally:
        closed.append(name)


@pytest.fixture(autouse=True)
def none_closed() -> None:
    closed.clear()


async def test_all_items_come_each_stream_in_its_order() -> None:
    items = [item async for item in merged([counting("a"), counting("b")])]
    assert sorted(items) == sorted(f"{name}{i}" for name in "ab" for i in range(100))
    for name in "ab":
        assert [item for item in items if item[0] == name] == [f"{name}{i}" for i in range(100)]
    assert items[:150] != sorted(items[:150]), "in turns, not one after the other"


async def test_one_that_fails_closes_all() -> None:
    with pytest.raises(ZeroDivisionError):
        async with aclosing(merged([counting("a"), counting("b", fails_at=3)])) as items:
            async for _ in items:
                pass
    assert sorted(closed) == ["a", "b"]


async def test_leaving_closes_all() -> None:
    async with aclosing(merged([counting("a"), counting("b")])) as items:
        await anext(items)
    assert sorted(closed) == ["a", "b"]
