"""The same points at the engine alone: no gateway, no Ray, no thread, and the settings of the service."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ottserve.evaluation.engine_speed import EngineTimes, random_prompts, time_prompts
from ottserve.evaluation.serving.arrivals import Offer, time_offer
from ottserve.evaluation.serving.plan import Task
from ottserve.evaluation.serving.points import Offered
from ottserve.evaluation.serving.results import Figures
from ottserve.evaluation.serving.times import p50_p99
from ottserve.workers.api import OttserveError, ServerInfo
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.progress import Progress
from ottserve.workers.settings import EngineSettings

WARM_UP_STEPS, WARM_UP_ANSWER = 4, 16
WARM_UP_PROMPT, WARM_UP_SEED = 512, 1_000_000

Prompts = Sequence[tuple[int, ...]]
Job = tuple[Task, int]
"""What is to be measured, and the number of the repeat."""


def measure_offline(
    settings: EngineSettings,
    progress: Progress,
    jobs: Iterable[Job],
    make_prompts: Callable[[Task, int], Prompts],
    make_offer: Callable[[Offered, int], Offer],
    num_new: int,
    keep: Callable[[Task, int, Figures | str], None],
) -> None:
    """Load one engine as a replica does and measure all jobs with it; its memory is free again in the end.

    Args:
        progress: told in words what is going on.
        jobs: consumed one by one.
        make_prompts: of a task and a repeat, where sequences decode at once.
        make_offer: of a point and a repeat, where requests come at a rate.
        num_new: tokens of each sequence that are timed.
        keep: told what came of each, figures or what went wrong.

    Raises:
        ValueError: as `load_engine`.
    """
    engine = load_engine(settings, progress)
    try:
        _warm_up(engine)
        for task, repeat in jobs:
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            try:
                if isinstance(task.point, Offered):
                    figures = time_offer(engine, make_offer(task.point, repeat))
                else:
                    prompts = make_prompts(task, repeat)
                    times = time_prompts(engine, prompts, num_new, task.num_answer)
                    figures = _figures(times, len(prompts), engine.server_info)
            except (ValueError, OttserveError) as error:
                keep(task, repeat, str(error))
            else:
                keep(task, repeat, replace(figures, gpu_bytes=torch.cuda.max_memory_allocated() or None))
    finally:
        del engine
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _warm_up(engine: Engine) -> None:
    """Whatever becomes of it: what is wrong shows in the points."""
    model = engine.model_info
    prompts = random_prompts(model.vocab_size, min(WARM_UP_PROMPT, model.context_length // 2), 1, WARM_UP_SEED)
    with contextlib.suppress(ValueError, OttserveError):
        time_prompts(engine, prompts, WARM_UP_STEPS, WARM_UP_ANSWER)


def _figures(times: EngineTimes, num_sequences: int, server: ServerInfo) -> Figures:
    first, between = p50_p99(times.first_token_s), p50_p99(times.step_s)
    return Figures(
        tokens_per_s=times.decode_rate,
        first_token_p50_s=first[0],
        first_token_p99_s=first[1],
        inter_token_p50_s=between[0],
        inter_token_p99_s=between[1],
        sequences=num_sequences,
        pages=times.num_pages,
        kv_bytes=times.num_pages * server.page_bytes + num_sequences * server.slot_bytes,
        graph_share=times.graph_share,
        completed=num_sequences,
        refused=0,
        failed=0,
    )
