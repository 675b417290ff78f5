"""Replicas that have no memory left for a step: the step fails, its request is told why, and the replica goes on.

The fault is the system's own: it grants a replica no more than little above what it has. Linux alone.
"""

from __future__ import annotations

import contextlib
import random
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from ottserve import client as oc
from ottserve.loadtest.local import REPLICA, LocalService
from ottserve.loadtest.observe import SHORT, Times, Watch, connect, idle, require, serves
from ottserve.loadtest.scrape import scrape

FRESH_BYTES = 1 << 20
LEFT_BYTES = 2 << 20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(FRESH_BYTES)}
"""Of the service: what is larger than `FRESH_BYTES` is asked of the system each time, whatever was freed before."""

ERRORS = "ottserve_gateway_internal_errors_total"
PROMPT_TOKENS = 1900  # a chunk at its end masks 512 by 1900 scores, 4 MB in one piece


async def out_of_memory(service: LocalService) -> Times:
    """A prompt whose step needs more than replicas may have; then they may have it again."""
    before, counted = service.pids(REPLICA), _counted(service)
    options = replace(SHORT, ignore_eos=True)
    prompt = tuple(random.Random(1).choices(range(1, 27), k=PROMPT_TOKENS))
    async with connect(service) as client:
        await client.flush_cache()  # nothing of it is to be computed already
        watch = Watch()
        with _no_more_memory(before):
            try:
                await client.generate(prompt, options, timeout_s=20)
            except oc.InternalError as error:
                told = error
            else:
                require(False, "a step had memory that the system did not grant")
        require(told.code is grpc.StatusCode.INTERNAL and "out of memory" in told.message, f"told of it by {told!r}")
        watch.stamp("told INTERNAL, out of memory")
        await serves(client)
        watch.stamp("next request served")
        await idle(service)
        watch.stamp("gauges at 0")
        answer = await client.generate(prompt, options, timeout_s=20)
        require(answer.finish.usage.num_completion_tokens == options.max_new_tokens, f"a wrong answer: {answer}")
        watch.stamp("the same prompt served")
    require(_counted(service) - counted == {"out_of_memory": 1}, f"counted as {_counted(service)}, before {counted}")
    require(service.pids(REPLICA) == before, "a replica was replaced")
    return watch.times


@contextlib.contextmanager
def _no_more_memory(pids: list[int]) -> Iterator[None]:
    """Each of these processes may have `LEFT_BYTES` above what it has, until the scope is left."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_DATA) for pid in pids}
    try:
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_DATA, (_size(pid) + LEFT_BYTES, hard))
        yield
    finally:
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_DATA, limit)


def _counted(service: LocalService) -> Counter[str]:
    """Internal errors that the gateway has told of, by reason."""
    return Counter({has["reason"]: int(value) for name, has, value in scrape(service.metrics_url) if name == ERRORS})


def _size(pid: int) -> int:
    """Bytes that it may write to and shares with nobody, touched or not: what the limit counts."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * int(status["VmData"].split()[0])
