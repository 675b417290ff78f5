"""The points of one start, measured by callers of the service that runs. Starts and ends none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from ottserve import client as oc
from ottserve.cli.serving.choice import Wanted
from ottserve.cli.serving.offered import offered_load
from ottserve.cli.serving.starts import figures_of
from ottserve.evaluation.engine_speed import random_prompts
from ottserve.evaluation.serving.offline import WARM_UP_PROMPT, WARM_UP_SEED, Job, Prompts
from ottserve.evaluation.serving.plan import Task
from ottserve.evaluation.serving.points import Offered
from ottserve.evaluation.serving.results import Figures
from ottserve.loadtest.bench.decode import PointFailed, Seen, decode
from ottserve.loadtest.bench.offer import offer
from ottserve.loadtest.local import START_TIMEOUT_S, LocalService

WARM_UP_TOKENS, WARM_UP_EACH = 8, 4
POLL_S = 0.25


async def measure_online(
    service: LocalService,
    wanted: Wanted,
    jobs: Iterable[Job],
    make_prompts: Callable[[Task, int], Prompts],
    keep: Callable[[Task, int, Figures | str], None],
) -> None:
    """Measure all jobs when all replicas are there and warm. Arguments as of `measure_offline`."""
    num_there = await _replicas_there(service, wanted.layout.num_replicas)
    await _warm_up(service, wanted)
    for task, repeat in jobs:
        if num_there < wanted.layout.num_replicas:
            keep(task, repeat, f"{num_there} of {wanted.layout.num_replicas} replicas came")
            continue
        try:
            seen = await _measure(service, wanted, task, repeat, make_prompts)
        except (PointFailed, OSError) as error:
            keep(task, repeat, str(error))
        else:
            keep(task, repeat, figures_of(seen, has_first_token=wanted.asked.reads_prompts))


async def _replicas_there(service: LocalService, wanted: int) -> int:
    """How many replicas answer, once so many do or none more is waited for; a service is ready with the first."""
    number = 0
    async with oc.AsyncClient(service.target) as client:
        for _ in range(int(START_TIMEOUT_S / POLL_S)):
            with contextlib.suppress(oc.ClientError):
                number = len(await client.load())
            if number >= wanted:
                break
            await asyncio.sleep(POLL_S)
    return number


async def _warm_up(service: LocalService, wanted: Wanted) -> None:
    """Whatever becomes of it: what is wrong shows in the points."""
    num_replicas, num_tokens = wanted.layout.num_replicas, min(WARM_UP_PROMPT, wanted.bounds.context_length // 2)
    num_prompts = 1 if num_replicas == 1 else WARM_UP_EACH * num_replicas  # the gateway draws where each goes
    prompts = random_prompts(wanted.vocab_size, num_tokens, num_prompts, WARM_UP_SEED)
    options = oc.Options(temperature=0, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    async with oc.AsyncClient(service.target) as client:
        calls = [client.generate(prompt, options) for prompt in prompts]
        await asyncio.gather(*calls, return_exceptions=True)


async def _measure(
    service: LocalService, wanted: Wanted, task: Task, repeat: int, make_prompts: Callable[[Task, int], Prompts]
) -> Seen:
    where = (service.target, service.metrics_url)
    if isinstance(task.point, Offered):
        return await offer(*where, *offered_load(wanted, task.point, repeat))
    prompts = make_prompts(task, repeat)
    return await decode(*where, prompts, task.num_answer, wanted.bounds.num_new, wanted.asked.point_timeout_s)
