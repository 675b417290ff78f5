"""What a decode step costs the host: an engine whose forward pass computes nothing, timed whole and by file.

Everything else is real: plan, inputs, sampling, commit, text. Prints nothing.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ottserve.evaluation.policies import PolicyRow
from ottserve.evaluation.speed import step
from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import make_engine
from ottserve.workers.engine.runner import Runner
from ottserve.workers.kv.step import StepTensors
from ottserve.workers.kv.table import resolve_spec
from ottserve.workers.models.loading import LoadedModel
from ottserve.workers.settings import EngineSettings, SchedulerSettings

COLUMNS = ("file", "µs a step", "share")
WARM_UP_STEPS = 5
VOCABULARY = 512
"""Width of the logits: as narrow as makes arithmetic cheap, so that what is timed is the calls."""

OWN_CODE = "ottserve"
ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class HostTime:
    """What one step of `num_rows` decoding sequences of `context` tokens costs.

    Attributes:
        step_us: time of this thread in the quickest step; others tell what else the machine does.
        by_file: microseconds by file of this project, what it calls of others included, the dearest first. From a
            profile, which slows Python down, scaled to `step_us`.
    """

    num_rows: int
    context: int
    step_us: float
    by_file: dict[str, float]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of `COLUMNS`, and the sum."""
        parts = [(name, f"{us:,.0f}", f"{us / self.step_us:.0%}") for name, us in self.by_file.items()]
        return [*parts, ("all", f"{self.step_us:,.0f}", "100%")]


def time_host(
    model: LoadedModel, row: PolicyRow, num_rows: int, context: int, num_steps: int, sampling: SamplingParams
) -> HostTime:
    """Time steps in which `num_rows` sequences decode and none fills a page.

    Args:
        context: prompt tokens of each, rounded up to where a page was just sealed.
        num_steps: timed steps, and as many under the profiler.
        sampling: of every sequence, but for the seed.

    Raises:
        ValueError: the row is impossible over this model, or a page would be filled meanwhile.
    """
    context = starting_context(model, row, context)
    num_timed = 2 * num_steps + WARM_UP_STEPS
    with patch.object(Runner, "run", silent(model)):
        engine = decoding_engine(model, row, num_rows, context, num_timed, sampling)
        times = [_timed_step(engine) for _ in range(WARM_UP_STEPS + num_steps)]
        with cProfile.Profile() as profile:
            for _ in range(num_steps):
                step(engine)
    step_us = min(times[WARM_UP_STEPS:]) * 1e6
    return HostTime(num_rows, context, step_us, _by_file(profile, step_us))


def starting_context(model: LoadedModel, row: PolicyRow, context: int) -> int:
    """So many tokens, rounded up to where a page was just sealed."""
    return resolve_spec(row.cache, model.shape).next_seal(context)


def decoding_engine(
    model: LoadedModel,
    row: PolicyRow,
    num_rows: int,
    context: int,
    num_steps: int,
    sampling: SamplingParams,
    *,
    overlap: bool = False,
) -> Engine:
    """An engine in which so many sequences decode, for so many steps more without filling a page.

    Args:
        context: prompt tokens of each, as `starting_context` says.
        sampling: of every sequence, but for the seed.
        overlap: as the setting `scheduler.overlap`.

    Raises:
        ValueError: the row is impossible over this model, or a page would be filled.
    """
    spec = resolve_spec(row.cache, model.shape)
    num_new = num_steps + 2
    if num_new >= spec.group:
        raise ValueError(f"{num_steps} steps: a page of {spec.group} tokens would be filled")
    settings = EngineSettings(
        cache=row.cache.model_copy(
            update={"num_pages": num_rows * spec.sealed_pages(context) + num_rows + 1, "prefix_cache": False}
        ),
        scheduler=SchedulerSettings(  # type: ignore[call-arg]
            max_running=num_rows,
            max_waiting=num_rows,
            max_waiting_tokens=num_rows * (context + num_new),
            max_tokens_per_step=num_rows * context,
            max_prompt_tokens_beside_decoding=num_rows * context,
            overlap=overlap,
        ),
    )
    engine = make_engine(settings, model, lambda message: None)
    _fill(engine, num_rows, context, num_new, sampling)
    return engine


def silent(model: LoadedModel) -> Callable[[Runner, StepTensors], Tensor]:
    """Stands where `Runner.run` stands: touches neither model nor cache, and has its logits ready."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, min(VOCABULARY, model.info.vocab_size), generator=generator).to(model.device, model.dtype)
    return lambda runner, step: row.expand(len(step.sampled_rows), -1)


def _fill(engine: Engine, num_rows: int, context: int, num_new: int, sampling: SamplingParams) -> None:
    num_words = min(VOCABULARY, engine.model_info.vocab_size)
    for index in range(num_rows):
        prompt = tuple((index + position) % num_words for position in range(context))
        params = replace(sampling, seed=index)
        engine.add(GenerationTask(str(index), prompt, params, StopParams(num_new, ignore_eos=True), time.time()))
    waiting = {str(index) for index in range(num_rows)}
    while waiting:
        waiting -= {chunk.request_id for chunk in step(engine) if chunk.token_ids}


def _timed_step(engine: Engine) -> float:
    began = time.thread_time()
    step(engine)
    return time.thread_time() - began


def _by_file(profile: cProfile.Profile, step_us: float) -> dict[str, float]:
    """Time of each file of ours. What others' code took counts for whoever of ours called it, directly or through more
    of others' code, in the shares in which its callers spent that time."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    spent: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in stats.items():
        for name, share in _owners(function, callers, stats, depth=8).items():
            spent[name] += own_s * share
    total = sum(spent.values())
    return {name: seconds / total * step_us for name, seconds in spent.most_common()}


def _owners(function: Any, callers: Any, stats: Any, depth: int) -> Counter[str]:
    """Shares of the files of ours on whose behalf a function ran; they sum to 1."""
    path = Path(function[0])
    if OWN_CODE in path.parts:
        return Counter({"/".join(path.parts[-2:]): 1.0})
    total = sum(by[3] for by in callers.values())
    if not callers or not total or not depth:
        return Counter({ELSEWHERE: 1.0})
    shares: Counter[str] = Counter()
    for caller, by in callers.items():
        for name, share in _owners(caller, stats[caller][4], stats, depth - 1).items():
            shares[name] += share * by[3] / total
    return shares
