"""Inputs that broke other servers, sent to the real one with the toy model; afterwards nothing is held.

The toy says the sign that follows the last one, so "a" is answered with "bcd…"; its rule is written at its model.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from ottserve import client as oc
from ottserve.loadtest.local import LocalService, local_service
from ottserve.loadtest.observe import LONG, SHORT, connect, finished, idle, open_streams, until
from ottserve.loadtest.scrape import imbalances, scrape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NUM_SIGNS, CONTEXT, GROUP, WINDOW, SLOTS, PAGES = 32, 2048, 128, 32, 8, 44
HOT = oc.Options(temperature=30.0, max_new_tokens=40, ignore_eos=True)
PREFIX_PAGES = 7


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    settings = {"cache__num_pages": PAGES, "scheduler__max_running": SLOTS, "scheduler__max_waiting": 64}
    with local_service(**settings) as running:
        yield running


@pytest.fixture
async def client(service: LocalService) -> AsyncIterator[oc.AsyncClient]:
    """Fails where a test leaves anything in hand."""
    async with connect(service) as connected:
        yield connected
        await idle(service)
        assert imbalances(await asyncio.to_thread(scrape, service.metrics_url)) == {}


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 27), k=num_tokens))


async def refusal(client: oc.AsyncClient, what: oc.Prompt, options: oc.Options) -> str:
    """Field and limit of a request that is INVALID_ARGUMENT."""
    with pytest.raises(oc.InvalidArgument) as caught:
        await client.generate(what, options, timeout_s=5)
    return " ".join(f"{problem.field}: {problem.description}" for problem in caught.value.fields)


@pytest.mark.parametrize(
    ("stop", "text"), [(("b",), ""), (("d" * 300,), "bcdefgh"), (("ef", "cdef"), "b"), (("def", "efg", "cd"), "b")]
)
async def test_the_stop_that_ends_earliest_wins(client: oc.AsyncClient, stop: tuple[str, ...], text: str) -> None:
    answer = await client.generate("a", oc.Options(temperature=0, max_new_tokens=7, stop=stop))
    assert answer.text == text
    assert "stop" in await refusal(client, "a", oc.Options(stop=("",)))


async def test_eos_as_the_last_permitted_token(client: oc.AsyncClient) -> None:
    text = (await client.generate("a", oc.Options(temperature=0, max_new_tokens=200))).text
    options = oc.Options(temperature=0, max_new_tokens=len(text) + 1)
    assert (await client.generate("a", options)).finish.reason is oc.FinishReason.EOS
    assert (await client.generate("a", replace(options, ignore_eos=True))).finish.reason is oc.FinishReason.LENGTH


async def test_extreme_sampling_in_one_batch_is_as_alone(client: oc.AsyncClient) -> None:
    greedy = oc.Options(temperature=0, max_new_tokens=20)
    mixed = [greedy]
    for extreme in ({"temperature": 1e-10}, {"temperature": 100.0}, {"top_k": NUM_SIGNS + 1}, {"top_p": 1e-6}):
        mixed.append(replace(greedy, seed=5, **({"temperature": 2.0} | extreme)))
    alone = [(await client.generate("a", options)).token_ids for options in mixed]
    together = await asyncio.gather(*(client.generate("a", options) for options in mixed))
    assert [answer.token_ids for answer in together] == alone
    assert alone[1] == alone[4] == alone[0], "nearly no temperature, and nearly no mass, are greedy"
    assert all(0 <= token_id < NUM_SIGNS for token_ids in alone for token_id in token_ids)
    assert len(set(alone)) == 3


async def test_lengths_are_clamped_to_the_context_or_refused(client: oc.AsyncClient) -> None:
    assert "max_new_tokens" in await refusal(client, "a", oc.Options(max_new_tokens=0))
    answer = await client.generate(prompt(CONTEXT - 10), oc.Options(max_new_tokens=2**31 - 1, ignore_eos=True))
    assert (answer.finish.reason, len(answer.token_ids)) == (oc.FinishReason.LENGTH, 10)
    assert str(CONTEXT - 1) in await refusal(client, prompt(CONTEXT), SHORT)


async def test_seeds_fix_answers_whatever_runs_beside(client: oc.AsyncClient) -> None:
    async def texts(seeds: list[int | None]) -> list[str]:
        options = (replace(HOT, seed=seed) for seed in seeds)
        return [answer.text for answer in await asyncio.gather(*(client.generate("a", o) for o in options))]

    [alone] = await texts([7])
    assert (await texts([7, *(None,) * 7]))[0] == alone
    seeds = [2**63 + i for i in range(8)]
    shuffled = random.Random(1).sample(seeds, 8)
    by_seed = dict(zip(seeds, await texts(list(seeds)), strict=True))
    assert dict(zip(shuffled, await texts(list(shuffled)), strict=True)) == by_seed
    assert len(set(by_seed.values())) >= 7
    assert len(set(await texts([None] * 8))) >= 7
    samples = [await client.generate("a", replace(HOT, seed=7, n=4)) for _ in range(2)]
    first, again = ({one.text, *(other.text for other in one.others)} for one in samples)
    assert len(first) == 4
    assert first == again


@pytest.mark.parametrize(
    ("form", "may_hold"),
    [
        ({"regex": "(((a+)+)+)+!"}, "a+!?"),
        ({"json_schema": '{"type": 7}'}, None),
        ({"json_schema": "{}"}, "null|true|false"),
    ],
)
async def test_forms_are_followed_or_refused_in_time(
    client: oc.AsyncClient, form: dict[str, str], may_hold: str | None
) -> None:
    """Of JSON the toy has the signs of three values."""
    beside = asyncio.create_task(client.generate("a", replace(LONG, max_new_tokens=400)))
    began = time.monotonic()
    options = oc.Options(temperature=1, max_new_tokens=30, **form)
    if may_hold:
        answer = await client.generate("a", options, timeout_s=10)
        assert re.fullmatch(may_hold, answer.text), answer
    else:
        assert "json_schema" in await refusal(client, "a", options)
    assert time.monotonic() - began < 5
    assert (await beside).finish.reason is oc.FinishReason.LENGTH


async def test_messages_over_and_under_their_limits(service: LocalService, client: oc.AsyncClient) -> None:
    with pytest.raises(oc.ClientError, match=str(4 * 2**20)):
        await client.generate("a" * 5_000_000, SHORT)
    text = "ab" * 1_200_000  # the answer has an id for each letter beside the text: over 4 MB together
    assert len((await client.tokenize(text)).token_ids) == len(text)


async def test_logprobs_of_the_longest_prompt(client: oc.AsyncClient) -> None:
    longest = prompt(CONTEXT - 1)
    answer = await client.generate(longest, oc.Options(max_new_tokens=1, prompt_logprobs=20))
    first, *others = answer.prompt_logprobs
    assert first is None
    assert tuple(told.token_id for told in others if told) == longest[1:]


async def test_one_id_twice_and_aborts_of_any_id(client: oc.AsyncClient) -> None:
    [stream] = await open_streams(client, 1, prefix="same-")
    with pytest.raises(oc.AlreadyExists):
        await client.generate("a", replace(SHORT, request_id="same-0"))
    assert not await client.abort("nobody")
    with pytest.raises(oc.InvalidArgument):
        await client.abort("")
    assert await client.abort("same-0")
    assert finished(await stream, oc.FinishReason.ABORTED)
    assert not await client.abort("same-0")
    assert (await client.generate("a", replace(SHORT, request_id="same-0"))).text == "bcd"
    assert not await client.abort("same-0")


async def test_who_has_no_time_or_leaves_the_queue_takes_nothing(service: LocalService, client: oc.AsyncClient) -> None:
    with pytest.raises(oc.DeadlineExceeded):
        await client.generate("a", LONG, timeout_s=0.2)
    await idle(service)
    streams = await open_streams(client, 3, prefix="holds-")  # of 15 pages each; a fourth has to wait
    waits = asyncio.create_task(client.generate("a", LONG))
    await until(lambda: _is(client, running=3, waiting=1), "it waits")
    waits.cancel()
    await until(lambda: _is(client, running=3, waiting=0), "it is gone")
    for number in range(3):
        await client.abort(f"holds-{number}")
    assert all(finished(outcome, oc.FinishReason.ABORTED) for outcome in await asyncio.gather(*streams))


async def test_samples_are_taken_all_or_none(client: oc.AsyncClient) -> None:
    """Each of 1,900 tokens takes 14 pages at its end, so of 44 three fit and four never do."""
    assert "n" in await refusal(client, "a", replace(LONG, n=4))
    answer = await client.generate("a", replace(LONG, n=3))
    assert [len(one.token_ids) for one in (answer, *answer.others)] == [1900] * 3


async def test_32_share_one_prefix_in_a_pool_that_holds_it_once(client: oc.AsyncClient) -> None:
    await client.flush_cache()
    shared = prompt(PREFIX_PAGES * GROUP + WINDOW, seed=9)
    options = oc.Options(temperature=0, max_new_tokens=150, ignore_eos=True)
    asked = [(*shared, *prompt(60, seed)) for seed in range(32)]
    answers = await asyncio.gather(*(client.generate(each, options, timeout_s=60) for each in asked))
    assert [len(answer.token_ids) for answer in answers] == [150] * 32
    cached = sorted(answer.finish.usage.num_cached_tokens for answer in answers)
    assert cached == [0] + [PREFIX_PAGES * GROUP] * 31


async def test_what_a_prompt_takes_from_the_cache(client: oc.AsyncClient) -> None:
    await client.flush_cache()

    async def cached(what: tuple[int, ...], salt: str = "") -> int:
        return (await client.generate(what, replace(SHORT, cache_salt=salt))).finish.usage.num_cached_tokens

    four_chunks = prompt(4 * 512 - 100, seed=3)
    assert await cached(four_chunks) == 0, "cold, though its chunks are computed one after the other"
    assert await cached(four_chunks) > 1500
    assert await cached(four_chunks, salt="mine") == 0
    whole_pages = prompt(3 * GROUP, seed=4)
    assert await cached(whole_pages) == 0
    assert await cached(whole_pages) in (2 * GROUP, 3 * GROUP - WINDOW)


async def test_a_maximal_prompt_beside_others_that_decode(client: oc.AsyncClient) -> None:
    """Their time between messages, at the 99th percentile, is at most five times what it was."""

    async def p99_ms(seed: int, beside: int) -> float:
        gaps, last = [], None
        task = asyncio.create_task(client.generate(prompt(CONTEXT - 2, seed), SHORT)) if beside else None
        async for _ in client.stream("a", replace(LONG, max_new_tokens=600)):
            now = time.monotonic()
            gaps += [] if last is None else [1000 * (now - last)]
            last = now
        if task:
            assert (await task).finish.usage.num_cached_tokens < GROUP
        return statistics.quantiles(gaps, n=100)[98]

    ratios = []
    for attempt in range(3):  # what else the machine does is no matter of ours
        alone, disturbed = await p99_ms(attempt, 0), await p99_ms(100 + attempt, 1)
        ratios.append(disturbed / alone)
        if ratios[-1] <= 5:
            return
    pytest.fail(f"{ratios} times")


async def test_a_reader_that_sleeps_holds_nobody_up_and_loses_nothing(client: oc.AsyncClient) -> None:
    alone = await client.generate("a", LONG)
    reader = client.stream("a", LONG)
    heard = [await anext(reader)]
    beside = [await client.generate("a", LONG, timeout_s=20) for _ in range(3)]
    assert [answer.token_ids for answer in beside] == [alone.token_ids] * 3
    heard += [chunk async for chunk in reader]
    assert "".join(chunk.text for chunk in heard) == alone.text


async def test_ids_make_no_series(service: LocalService, client: oc.AsyncClient) -> None:
    async def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        found = await asyncio.to_thread(scrape, service.metrics_url)
        return {(name, tuple(sorted(labels.items()))) for name, labels, _ in found}

    before = await series()
    for number in range(4):
        names = [f"id-{number}-{i}" for i in range(50)]
        await asyncio.gather(*(client.generate("a", replace(SHORT, request_id=name)) for name in names))
    assert await series() == before


async def _is(client: oc.AsyncClient, running: int, waiting: int) -> bool:
    [load] = await client.load()
    return (load.num_running, load.num_waiting) == (running, waiting)
