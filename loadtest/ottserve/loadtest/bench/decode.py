"""So many callers at once, each with a prompt of its own: what all of them get a second while all of them get tokens.

The time begins when the last caller has its first tokens, and ends when each has got as many more as are asked for. So
no prompt is computed meanwhile, and the number of sequences does not change. Then they leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate

from ottserve import client as oc
from ottserve.loadtest.bench.watch import Counters, Watch, Watched
from ottserve.loadtest.draw import Drawn
from ottserve.loadtest.histogram import Histogram
from ottserve.loadtest.stream import Timed, send_async

CALLERS_A_CHANNEL = 32
WARM_UP_TOKENS = 8
POLL_S = 0.005
MARGIN_S = 30.0
ONE_TRY = oc.RetryPolicy(max_attempts=1)


class PointFailed(Exception):
    """A point could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What callers saw at one point, and the service's metrics meanwhile.

    Attributes:
        tokens_per_s: over all callers.
        first_token, inter_token: histograms over tokens, in seconds.
        outcomes: how calls ended; those that left when enough was seen are "completed".
        counters: their growth over the time in which tokens counted, `counted_s` long.
    """

    tokens_per_s: float
    first_token: Histogram
    inter_token: Histogram
    outcomes: Counter[str]
    watched: Watched
    counters: Counters
    counted_s: float


async def decode(
    target: str,
    metrics_url: str,
    prompts: Sequence[tuple[int, ...]],
    num_answer: int,
    num_new: int,
    timeout_s: float,
) -> Seen:
    """Measure one point.

    Args:
        target, metrics_url: of the service.
        prompts: one for each caller.
        num_answer: tokens that a caller asks for: more than it gets until the last one has begun.
        num_new: tokens that count, of each caller.
        timeout_s: for the whole point.

    Raises:
        PointFailed: a call failed, or an answer ended, or there was no time left; says how many had begun.
    """
    watch = Watch(metrics_url)
    all_timed = [Timed("decode") for _ in prompts]
    deadline = time.perf_counter() + timeout_s
    async with AsyncExitStack() as stack:
        num_channels = -(-len(prompts) // CALLERS_A_CHANNEL)
        channels = [oc.AsyncClient(target, retry=ONE_TRY) for _ in range(num_channels)]
        clients = [await stack.enter_async_context(channel) for channel in channels]
        await stack.enter_async_context(watch.watching())
        calls = [
            asyncio.create_task(
                send_async(
                    clients[number % num_channels],
                    Drawn("decode", prompt, num_answer, None),
                    timeout_s + MARGIN_S,
                    time.perf_counter,
                    timed,
                )
            )
            for number, (prompt, timed) in enumerate(zip(prompts, all_timed, strict=True))
        ]
        try:
            await _each_has(all_timed, [1] * len(prompts), deadline)
            await _each_has(all_timed, [timed.num_tokens + WARM_UP_TOKENS for timed in all_timed], deadline)
            before, begin = await watch.look(), time.perf_counter()
            await _each_has(all_timed, [timed.num_tokens + num_new for timed in all_timed], deadline)
            end = time.perf_counter()
            growth, counted_s = (await watch.look()).since(before), time.perf_counter() - begin
        finally:
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
    return Seen(
        tokens_per_s=sum(rate(timed, begin, end) for timed in all_timed),
        first_token=_first_tokens(all_timed),
        inter_token=_gaps(all_timed, begin, end),
        outcomes=Counter(timed.outcome for timed in all_timed),
        watched=watch.seen,
        counters=growth,
        counted_s=counted_s,
    )


async def _each_has(all_timed: Sequence[Timed], wanted: Sequence[int], deadline: float) -> None:
    """Until every caller has so many tokens. Raises PointFailed for the first call that ends before."""
    while any(timed.num_tokens < num for timed, num in zip(all_timed, wanted, strict=True)):
        begun = f"{sum(timed.num_tokens > 0 for timed in all_timed)} of {len(all_timed)} callers had begun"
        for timed in all_timed:
            if timed.error is not None:
                raise PointFailed(f"{timed.outcome}: {timed.error.message} ({begun})")
            if timed.e2e_s:
                raise PointFailed(f"an answer ended with its {timed.num_tokens} tokens when {begun}")
        if time.perf_counter() > deadline:
            raise PointFailed(f"the time was over when {begun}")
        await asyncio.sleep(POLL_S)


def rate(timed: Timed, begin: float, end: float) -> float:
    """Tokens a second between the last messages before either end, so that no message is cut."""
    marks = _marks(timed)
    before = max((mark for mark in marks if mark[0] <= begin), default=marks[0])
    after = max(mark for mark in marks if mark[0] <= end)
    return (after[1] - before[1]) / (after[0] - before[0]) if after[0] > before[0] else 0.0


def _marks(timed: Timed) -> list[tuple[float, int]]:
    """When messages came, and the tokens that had come with them and before."""
    first_s = timed.first_token_s or 0.0
    moments = accumulate((gap_s for gap_s, _ in timed.gaps), initial=timed.began + first_s)
    first_tokens = timed.num_tokens - sum(num for _, num in timed.gaps)
    return list(zip(moments, accumulate((num for _, num in timed.gaps), initial=first_tokens), strict=True))


def _first_tokens(all_timed: Sequence[Timed]) -> Histogram:
    histogram = Histogram()
    for timed in all_timed:
        if timed.first_token_s is not None:
            histogram.add(timed.first_token_s)
    return histogram


def _gaps(all_timed: Sequence[Timed], begin: float, end: float) -> Histogram:
    """Times between tokens of messages that came between begin and end; tokens of one message share its time."""
    histogram = Histogram()
    for timed in all_timed:
        for (moment, _), (gap_s, num_tokens) in zip(_marks(timed)[1:], timed.gaps, strict=True):
            if begin < moment <= end:
                histogram.add(gap_s / num_tokens, num_tokens)
    return histogram
