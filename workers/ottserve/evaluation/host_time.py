"""What a step costs the host: an engine whose forward pass computes nothing, timed whole and by file.

Everything else is real: plan, inputs, sampling, commit, text. Prints nothing.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ottserve.evaluation.silent import SilentRunner
from ottserve.evaluation.step_load import SteadyEngine, StepLoad
from ottserve.workers.models.loading import LoadedModel

COLUMNS = ("file", "µs a step", "share")
WARM_UP_STEPS = 5
OWN_CODE = "ottserve"
ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class HostTime:
    """What one step costs.

    Attributes:
        num_rows, context, prompt_tokens: as of `StepLoad`.
        step_us: time of this thread in the quickest step; others tell what else the machine does.
        by_file: microseconds by file of this project, what it calls of others included, the dearest first. From a
            profile, which slows Python down, scaled to `step_us`.
    """

    num_rows: int
    context: int
    prompt_tokens: int
    step_us: float
    by_file: dict[str, float]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of `COLUMNS`, and the sum."""
        parts = [(name, f"{us:,.0f}", f"{us / self.step_us:.0%}") for name, us in self.by_file.items()]
        return [*parts, ("all", f"{self.step_us:,.0f}", "100%")]


def time_host(model: LoadedModel, load: StepLoad) -> HostTime:
    """Time the steps of a load, and as many under the profiler. What a newcomer costs at the door is counted too.

    Raises:
        ValueError: the load is impossible over this model, or a page would be filled meanwhile.
    """
    load = load.sealed(model)
    engine = SteadyEngine(model, load, 2 * load.num_steps + WARM_UP_STEPS, make_runner=SilentRunner)
    times = [_timed_step(engine) for _ in range(WARM_UP_STEPS + load.num_steps)]
    with cProfile.Profile() as profile:
        for _ in range(load.num_steps):
            engine.step()
    step_us = min(times[WARM_UP_STEPS:]) * 1e6
    return HostTime(load.num_rows, load.context, load.prompt_tokens, step_us, _by_file(profile, step_us))


def _timed_step(engine: SteadyEngine) -> float:
    began = time.thread_time()
    engine.step()
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
