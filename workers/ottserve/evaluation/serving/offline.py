"""The same points at the engine alone: no gateway, no Ray, no thread, and the settings of the service."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles

import torch

from ottserve.evaluation.engine_speed import EngineTimes, time_prompts
from ottserve.evaluation.serving.plan import Task
from ottserve.evaluation.serving.results import Figures
from ottserve.workers.api import OttserveError, ServerInfo
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.models.loading import Progress
from ottserve.workers.settings import EngineSettings

WARM_UP_STEPS = 4

Prompts = Sequence[tuple[int, ...]]
Job = tuple[Task, int]
"""What is to be measured, and the number of the repeat."""


def measure_offline(
    settings: EngineSettings,
    progress: Progress,
    jobs: Iterable[Job],
    make_prompts: Callable[[Task, int], Prompts],
    num_new: int,
    keep: Callable[[Task, int, Figures | str], None],
) -> None:
    """Load one engine as a replica does and measure all jobs with it; its memory is free again in the end.

    Args:
        progress: told in words what is going on.
        jobs: consumed one by one.
        make_prompts: of a task and a repeat.
        num_new: tokens of each sequence that are timed.
        keep: told what came of each, figures or what went wrong.

    Raises:
        ValueError: as `load_engine`.
    """
    engine = load_engine(settings, progress)
    try:
        is_warm = False
        for task, repeat in jobs:
            prompts = make_prompts(task, repeat)
            if not is_warm:
                time_prompts(engine, [prompts[0][:512]], WARM_UP_STEPS, task.num_answer)
                is_warm = True
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            try:
                times = time_prompts(engine, prompts, num_new, task.num_answer)
            except (ValueError, OttserveError) as error:
                keep(task, repeat, str(error))
            else:
                keep(task, repeat, _figures(times, len(prompts), engine.server_info))
    finally:
        del engine
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _figures(times: EngineTimes, num_sequences: int, server: ServerInfo) -> Figures:
    return Figures(
        tokens_per_s=times.decode_rate,
        first_token_p50_s=median(times.first_token_s),
        first_token_p99_s=_p99(times.first_token_s),
        inter_token_p50_s=median(times.step_s),
        inter_token_p99_s=_p99(times.step_s),
        sequences=num_sequences,
        pages=times.num_pages,
        kv_bytes=times.num_pages * server.page_bytes + num_sequences * server.slot_bytes,
        gpu_bytes=torch.cuda.max_memory_allocated() or None,
        graph_share=times.graph_share,
        completed=num_sequences,
        refused=0,
        failed=0,
    )


def _p99(seconds: Sequence[float]) -> float:
    """The 99th percentile; of less than a hundred, the longest or nearly."""
    return quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
