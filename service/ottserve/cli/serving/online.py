"""The points of one start, measured by callers of the service that runs. Starts and ends none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from ottserve import client as oc
from ottserve.cli.serving.choice import Wanted
from ottserve.cli.serving.starts import figures_of
from ottserve.evaluation.engine_speed import random_prompts
from ottserve.evaluation.serving.offline import Job, Prompts
from ottserve.evaluation.serving.plan import Task
from ottserve.evaluation.serving.points import Offered
from ottserve.evaluation.serving.results import Figures
from ottserve.loadtest.bench.decode import PointFailed, Seen, decode
from ottserve.loadtest.bench.offer import offer, steady_load
from ottserve.loadtest.local import LocalService

WARM_UP_TOKENS, WARM_UP_PROMPT, WARM_UP_SEED = 8, 512, 1_000_000


async def measure_online(
    service: LocalService,
    wanted: Wanted,
    jobs: Iterable[Job],
    make_prompts: Callable[[Task, int], Prompts],
    keep: Callable[[Task, int, Figures | str], None],
) -> None:
    """Measure all jobs, after one request that warms up. Arguments as of `measure_offline`."""
    await _warm_up(service, wanted)
    for task, repeat in jobs:
        try:
            seen = await _measure(service, wanted, task, repeat, make_prompts)
        except (PointFailed, OSError) as error:
            keep(task, repeat, str(error))
        else:
            keep(task, repeat, figures_of(seen, has_first_token=wanted.reads_prompts))


async def _warm_up(service: LocalService, wanted: Wanted) -> None:
    """Whatever becomes of it: what is wrong shows in the points."""
    num_tokens = min(WARM_UP_PROMPT, wanted.bounds.context_length // 2)
    (prompt,) = random_prompts(wanted.vocab_size, num_tokens, 1, WARM_UP_SEED)
    options = oc.Options(temperature=0, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    async with oc.AsyncClient(service.target) as client:
        with contextlib.suppress(oc.ClientError):
            await client.generate(prompt, options)


async def _measure(
    service: LocalService, wanted: Wanted, task: Task, repeat: int, make_prompts: Callable[[Task, int], Prompts]
) -> Seen:
    where = (service.target, service.metrics_url)
    if isinstance(task.point, Offered):
        workload = steady_load(task.point.requests_per_s, *wanted.offered, repeat, wanted.point_timeout_s)
        return await offer(*where, workload, tuple(range(wanted.vocab_size)))
    prompts = make_prompts(task, repeat)
    return await decode(*where, prompts, task.num_answer, wanted.bounds.num_new, wanted.point_timeout_s)
