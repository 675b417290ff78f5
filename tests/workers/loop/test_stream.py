"""A stream merges what nobody has taken, and sends at most once an interval."""

from __future__ import annotations

import asyncio
import time

import pytest

from ottserve.workers.api import Finish, FinishReason, Internal, TextChunk, Timings, Usage
from ottserve.workers.stream import MESSAGE_S, Stream

FINISH = Finish(FinishReason.EOS, Usage(1, 0, 1), Timings(0.0, 0.0, 0.0, 0.0), 0)


async def test_first_chunk_does_not_wait_and_later_ones_merge_over_the_interval() -> None:
    stream = Stream("a", interval_s=0.1)
    stream.put(TextChunk("a", "x", (1,)))
    began = time.monotonic()
    assert (await stream.take()).text == "x"
    assert time.monotonic() - began < 0.05
    stream.put(TextChunk("a", "y", (2,)))
    stream.put(TextChunk("a", "z", (3,)))
    chunk = await stream.take()
    assert (chunk.text, chunk.token_ids) == ("yz", (2, 3))
    assert time.monotonic() - began >= 0.1


async def test_the_end_does_not_wait_for_the_interval() -> None:
    stream = Stream("a", interval_s=30.0)
    stream.put(TextChunk("a", "x", (1,)))
    await stream.take()
    stream.put(TextChunk("a", "y", (2,), FINISH))
    chunk = await asyncio.wait_for(stream.take(), 1)
    assert (chunk.text, chunk.finish) == ("y", FINISH)


async def test_text_before_an_error_is_delivered_before_it() -> None:
    stream = Stream("a", interval_s=0.0)
    stream.put(TextChunk("a", "x", (1,)))
    stream.put(Internal("gone", "test"))
    stream.put(TextChunk("a", "late", (9,)))
    assert (await stream.take()).text == "x"
    with pytest.raises(Internal, match="gone"):
        await stream.take()


async def test_a_reader_that_sleeps_finds_one_message() -> None:
    stream = Stream("a", interval_s=0.0)
    for i in range(1000):
        stream.put(TextChunk("a", str(i), (i,)))
    assert (await stream.take()).token_ids == tuple(range(1000))


async def test_text_without_tokens_before_an_error_is_not_lost() -> None:
    stream = Stream("a", interval_s=0.0)
    stream.put(TextChunk("a", "held back", ()))
    stream.put(Internal("gone", "test"))
    assert (await stream.take()).text == "held back"


async def test_where_many_send_each_waits_for_its_turn() -> None:
    now = [0.0]
    stream = Stream("a", interval_s=0.02, clock=lambda: now[0], num_streams=lambda: 200)
    stream.put(TextChunk("a", "x", (1,)))
    await stream.take()
    now[0] = 200 * MESSAGE_S - 0.05
    stream.put(TextChunk("a", "y", (2,)))
    began = time.monotonic()
    assert (await stream.take()).text == "y"
    assert 0.04 < time.monotonic() - began < 0.09


async def test_streams_have_their_turns_together_whenever_they_began() -> None:
    now = [10.0011]
    streams = [Stream(name, interval_s=0.02, clock=lambda: now[0]) for name in "ab"]
    for stream in streams:
        stream.put(TextChunk(stream.request_id, "x", (1,)))
        await stream.take()
        now[0] += 0.003
    turns = {stream._next_at for stream in streams}
    assert len(turns) == 1 and turns.pop() == pytest.approx(10.025)


async def test_without_an_interval_no_turn_is_waited_for() -> None:
    stream = Stream("a", interval_s=0.0, clock=lambda: 10.0011)
    stream.put(TextChunk("a", "x", (1,)))
    await stream.take()
    assert stream._next_at == pytest.approx(10.0011 + MESSAGE_S)


async def test_a_chunk_that_comes_when_its_turn_has_come_is_one_message() -> None:
    """Also where the timer of an earlier chunk has not yet been heard of."""
    now = [0.0]
    stream = Stream("a", interval_s=0.02, clock=lambda: now[0])
    stream.put(TextChunk("a", "x", (1,)))
    await stream.take()
    stream.put(TextChunk("a", "y", (2,)))
    now[0] = 1.0
    stream.put(TextChunk("a", "z", (3,)))
    assert (await asyncio.wait_for(stream.take(), 0.01)).text == "yz"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.take(), 0.06)


async def test_a_chunk_that_comes_between_turn_and_reader_is_part_of_the_message() -> None:
    """Also where the clock does not agree yet that it is the stream's turn: a timer may be early."""
    stream = Stream("a", interval_s=0.02, clock=lambda: 0.0)
    stream.put(TextChunk("a", "x", (1,)))
    await stream.take()
    stream.put(TextChunk("a", "y", (2,)))
    await asyncio.sleep(0.04)
    stream.put(TextChunk("a", "z", (3,)))
    assert (await asyncio.wait_for(stream.take(), 0.01)).text == "yz"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.take(), 0.06)
