"""Whose turn it is, with one place unless a test says otherwise."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from ottserve.service.turns import Turns


class Line:
    """Requests that queue up, and the order in which they came through."""

    def __init__(self, num_places: int = 1) -> None:
        self.turns = Turns(lambda: num_places)
        self.order: list[str] = []
        self.open = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, caller: str, cost: float = 1.0, priority: int = 0) -> None:
        self.tasks[name] = asyncio.create_task(self._go(name, caller, cost, priority))
        await asyncio.sleep(0)

    async def _go(self, name: str, caller: str, cost: float, priority: int) -> None:
        async with self.turns.turn(caller, cost, priority):
            self.order.append(name)
            await self.open.wait()

    async def end(self) -> list[str]:
        self.open.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert self.turns.num_waiting == 0
        return self.order


async def test_one_callers_requests_go_in_order() -> None:
    line = Line()
    for i in range(5):
        await line.come(str(i), "a")
    assert line.order == ["0"]
    assert await line.end() == ["0", "1", "2", "3", "4"]


async def test_a_flood_lets_another_in_at_the_next_place() -> None:
    line = Line()
    for i in range(50):
        await line.come(f"flood {i}", "a")
    await line.come("other", "b")
    assert (await line.end())[:3] == ["flood 0", "other", "flood 1"]


async def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    line = Line()
    for i in range(6):
        await line.come(f"long {i}", "a", cost=300)
    for i in range(9):
        await line.come(f"short {i}", "b", cost=100)
    order = await line.end()
    long = [i for i, name in enumerate(order) if name.startswith("long")]
    between = [after - before - 1 for before, after in pairwise(long[1:])]
    assert between[:2] == [3, 3], "three short ones for a long one"


async def test_idle_time_earns_nothing() -> None:
    """b comes late: it gets half from then on, not all that a had before."""
    line = Line()
    for i in range(20):
        await line.come(f"a{i}", "a")
    for _ in range(10):
        line.open.set()
        await asyncio.sleep(0)
    done = len(line.order)
    assert 3 < done < 15
    line.open.clear()
    for i in range(5):
        await line.come(f"b{i}", "b")
    rest = (await line.end())[done:]
    assert rest.index("b4") > 6, "they alternate"


async def test_higher_priority_goes_first_whoever_calls() -> None:
    line = Line()
    await line.come("running", "a")
    await line.come("low", "b")
    await line.come("high", "a", priority=5)
    assert await line.end() == ["running", "high", "low"]


async def test_as_many_as_there_are_places() -> None:
    line = Line(num_places=3)
    for i in range(5):
        await line.come(str(i), "a")
    assert (line.order, line.turns.num_waiting) == (["0", "1", "2"], 2)
    assert len(await line.end()) == 5


async def test_who_leaves_while_waiting_holds_no_place_and_pays_nothing() -> None:
    line = Line()
    await line.come("running", "b")
    for i in range(9):
        await line.come(f"left {i}", "a")
        line.tasks[f"left {i}"].cancel()
    await asyncio.sleep(0)
    assert line.turns.num_waiting == 0
    await line.come("b", "b")
    await line.come("a", "a")
    assert await line.end() == ["running", "a", "b"]


async def test_who_leaves_just_as_the_turn_comes_gives_it_on() -> None:
    line = Line()
    for name in ("running", "left", "next"):
        await line.come(name, "a")
    line.open.set()
    await asyncio.sleep(0)  # "running" ends and hands on its place, and "left" has not run yet
    line.tasks["left"].cancel()
    assert (await line.end())[-1] == "next"


async def test_who_has_left_unheard_is_passed_over() -> None:
    """Its place comes before it had time to withdraw."""
    line = Line()
    for name in ("running", "left", "next"):
        await line.come(name, "a")
    line.open.set()
    line.tasks["left"].cancel()
    assert await line.end() == ["running", "next"]


async def test_a_failure_gives_the_place_back() -> None:
    turns = Turns(lambda: 1)
    with pytest.raises(RuntimeError):
        async with turns.turn("a", 1, 0):
            raise RuntimeError
    async with asyncio.timeout(1), turns.turn("a", 1, 0):
        pass
